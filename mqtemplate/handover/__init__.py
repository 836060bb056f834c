"""Hand-over of an application from an old broker to a new one, while it runs."""

from mqtemplate.handover.admin import HandOverAdmin
from mqtemplate.handover.broker import HandOverBroker, HandOverOptions
from mqtemplate.handover.consuming import HandOverConsumer
from mqtemplate.handover.limits import MoverSettings
from mqtemplate.handover.mover import Mover
from mqtemplate.handover.old_broker import OLD_PREFIX
from mqtemplate.handover.pending import HandOverDelayed
from mqtemplate.handover.pop import HandOverPop

__all__ = [
    "OLD_PREFIX",
    "HandOverAdmin",
    "HandOverBroker",
    "HandOverConsumer",
    "HandOverDelayed",
    "HandOverOptions",
    "HandOverPop",
    "Mover",
    "MoverSettings",
]
