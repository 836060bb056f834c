"""Hand-over of an application from an old broker to a new one, while it runs."""

from typing import TYPE_CHECKING

from mqtemplate.exports import late_import
from mqtemplate.handover.broker import HandOverBroker, HandOverOptions
from mqtemplate.handover.consuming import OLD_PREFIX
from mqtemplate.handover.mover import Mover, MoverSettings
from mqtemplate.handover.pending import HandOverDelayed

if TYPE_CHECKING:
    from mqtemplate.handover.control import ApplicationHandOver, application_hand_over

__all__ = [
    "OLD_PREFIX",
    "ApplicationHandOver",
    "HandOverBroker",
    "HandOverDelayed",
    "HandOverOptions",
    "Mover",
    "MoverSettings",
    "application_hand_over",
]

# Operators need it, and few applications.
__getattr__ = late_import(
    __name__, dict.fromkeys(("ApplicationHandOver", "application_hand_over"), "mqtemplate.handover.control")
)
