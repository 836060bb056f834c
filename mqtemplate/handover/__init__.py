"""Hand-over of an application from one broker to another one, while it runs."""

from mqtemplate.handover.broker import HandOverBroker, HandOverOptions, Mover
from mqtemplate.handover.consuming import OLD_PREFIX
from mqtemplate.handover.pending import MovedMessages

__all__ = ["OLD_PREFIX", "HandOverBroker", "HandOverOptions", "MovedMessages", "Mover"]
