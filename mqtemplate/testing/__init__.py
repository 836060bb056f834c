"""For tests of applications: virtual time, fixtures, recorded messages, and the contract of the port."""

from mqtemplate.testing.harness import Harness, StillBusyError
from mqtemplate.testing.recording import Inbox, RecordingTemplate, SentMessage, messages_in

__all__ = ["Harness", "Inbox", "RecordingTemplate", "SentMessage", "StillBusyError", "messages_in"]
