"""Hand-over of an application from an old broker to a new one, while it runs."""

from mqtemplate.handover.broker import HandOverBroker, HandOverOptions
from mqtemplate.handover.consuming import OLD_PREFIX
from mqtemplate.handover.mover import Mover, MoverSettings
from mqtemplate.handover.pending import HandOverDelayed

__all__ = ["OLD_PREFIX", "HandOverBroker", "HandOverDelayed", "HandOverOptions", "Mover", "MoverSettings"]
