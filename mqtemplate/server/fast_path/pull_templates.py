"""Forms of the headers of pulls. See `mqtemplate.remoting.protocol.header_forms`.

The headers of a consumer for one topic differ in queue ID, queue offset, offset to commit and opaque. In its first
pulls the sys flag says that there is no offset to commit: that is a second form.
"""

from __future__ import annotations

from dataclasses import dataclass

from mqtemplate.remoting.protocol.codes import RequestCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.header_forms import OPAQUE, HeaderForms, HeaderKey, field_value
from mqtemplate.remoting.protocol.headers.message import PullMessageRequestHeader

_CODES = (RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE)

_VALUES = {
    "queue_id": field_value("queueId", rb"[0-9]{1,9}", b"123456789"),
    "queue_offset": field_value("queueOffset", rb"[0-9]{1,18}", b"345678912345"),
    "commit_offset": field_value("commitOffset", rb"[0-9]{1,18}", b"987654321987"),
    "opaque": OPAQUE,
}


@dataclass(frozen=True, slots=True, eq=False)
class PullForm:
    """Common part of all pulls of one form. The values are queue ID, queue offset, offset to commit and opaque.

    Attributes:
        header: A header of this form. Its values are not those of a request.
    """

    header: PullMessageRequestHeader


class PullForms(HeaderForms[PullForm]):
    """The known forms of pulls."""

    def __init__(self) -> None:
        super().__init__(_VALUES)

    def form_of(self, key: HeaderKey, request: RemotingCommand) -> PullForm | None:
        """Return the form; None if it is no pull."""
        if request.code not in _CODES:
            return None
        pull = request.header(PullMessageRequestHeader)
        values = pull.queue_id, pull.queue_offset, pull.commit_offset
        probes = tuple(int(_VALUES[name].probe) for name in ("queue_id", "queue_offset", "commit_offset"))
        return PullForm(pull) if values == probes else None
