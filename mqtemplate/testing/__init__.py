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

__getattr__ = late_import(
    __name__,
    {
        "HandlerFailedError": "mqtemplate.testing.recording",
        "HandlerFailure": "mqtemplate.testing.recording",
        "Harness": "mqtemplate.testing.harness",
        "Inbox": "mqtemplate.testing.recording",
        "NotIdleError": "mqtemplate.testing.harness",
        "RecordingTemplate": "mqtemplate.testing.recording",
        "SentMessage": "mqtemplate.testing.recording",
        "StartApp": "mqtemplate.testing.harness",
        "messages_in": "mqtemplate.testing.recording",
    },
)
