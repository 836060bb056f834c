"""For tests of applications: virtual time, fixtures, recorded messages, and the contract of the port."""

from mqtemplate.testing.harness import Harness, NotIdleError
from mqtemplate.testing.recording import Inbox, RecordingTemplate, SentMessage, messages_in

__all__ = ["Harness", "Inbox", "NotIdleError", "RecordingTemplate", "SentMessage", "messages_in"]
