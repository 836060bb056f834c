"""Test kit for applications: virtual time, fixtures, recorded messages, and the contract suite for brokers.

Names are imported when they are used: pytest loads `mqtemplate.testing.plugin` in every run.
"""

from typing import TYPE_CHECKING

from mqtemplate.exports import late_import

if TYPE_CHECKING:
    from mqtemplate.testing.harness import Harness, NotIdleError, StartApp
    from mqtemplate.testing.recording import (
        HandlerFailedError,
        HandlerFailure,
        Inbox,
        RecordingTemplate,
        SentMessage,
        messages_in,
    )

__all__ = [
    "HandlerFailedError",
    "HandlerFailure",
    "Harness",
    "Inbox",
    "NotIdleError",
    "RecordingTemplate",
    "SentMessage",
    "StartApp",
    "messages_in",
]

_MODULES = {
    "harness": "Harness NotIdleError StartApp",
    "recording": "HandlerFailedError HandlerFailure Inbox RecordingTemplate SentMessage messages_in",
}
"""Module -> the public names that it defines."""

__getattr__ = late_import(
    __name__, {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names.split()}
)
