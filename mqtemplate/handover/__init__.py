"""Hand-over of an application from an old broker to a new one, while it runs."""

from typing import TYPE_CHECKING

from mqtemplate.exports import late_import
from mqtemplate.handover.admin import HandOverAdmin
from mqtemplate.handover.broker import HandOverBroker, HandOverOptions
from mqtemplate.handover.consuming import HandOverConsumer
from mqtemplate.handover.mover import Mover, MoverSettings
from mqtemplate.handover.old_broker import OLD_PREFIX
from mqtemplate.handover.pending import HandOverDelayed
from mqtemplate.handover.pop import HandOverPop

if TYPE_CHECKING:
    from mqtemplate.handover.control import ApplicationHandOver, application_hand_over

__all__ = [
    "OLD_PREFIX",
    "ApplicationHandOver",
    "HandOverAdmin",
    "HandOverBroker",
    "HandOverConsumer",
    "HandOverDelayed",
    "HandOverOptions",
    "HandOverPop",
    "Mover",
    "MoverSettings",
    "application_hand_over",
]

# Operators need it, and few applications.
__getattr__ = late_import(
    __name__, dict.fromkeys(("ApplicationHandOver", "application_hand_over"), "mqtemplate.handover.control")
)
