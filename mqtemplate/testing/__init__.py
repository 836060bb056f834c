"""Test kit for applications: virtual time, fixtures, recorded messages, and the contract suite for brokers.

Names are imported when they are used: pytest loads `mqtemplate.testing.plugin` in every run.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mqtemplate.testing.handled import HandlerFailedError, HandlerFailure
    from mqtemplate.testing.harness import Harness, NotIdleError
    from mqtemplate.testing.recording import Inbox, RecordingTemplate, SentMessage, messages_in
    from mqtemplate.testing.start_app import StartApp
else:

    def __getattr__(name):
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = _MODULES.get(name, "recording")
        return getattr(import_module(f"{__name__}.{module}"), name)

    _MODULES = {
        "Harness": "harness",
        "NotIdleError": "harness",
        "HandlerFailedError": "handled",
        "HandlerFailure": "handled",
        "StartApp": "start_app",
    }


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
