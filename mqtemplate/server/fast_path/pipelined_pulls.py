"""Pulls of one connection that are answered without decoding each request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.bodies.group import SubscriptionGroupConfig
from mqtemplate.remoting.protocol.bodies.route import SubscriptionData
from mqtemplate.remoting.protocol.codec import Frame, json_frame_head
from mqtemplate.remoting.protocol.codes import PullSysFlag, RequestCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.header_forms import ConnectionForms
from mqtemplate.remoting.protocol.headers.message import PullMessageRequestHeader
from mqtemplate.remoting.protocol.json_header import json_header_template
from mqtemplate.server.parts import ServerParts
from mqtemplate.server.processors.pulls.pull_checks import PullChecks
from mqtemplate.server.processors.pulls.pull_forms import PullForm, PullForms
from mqtemplate.server.pulls.raw_reader import RawPull, RawQuery, RawStatus

_MAX_BYTES = 256 << 10
"""Responses are sent when they have so many bytes, though more pulls were read."""
_MAX_CHECKED = 1_000
_NEXT_OFFSET, _MIN_OFFSET, _MAX_OFFSET, _OPAQUE = 1_234_567, 2_345_678, 3_456_789, 4_567_891
"""Numbers in whose places a template has those of a response."""


class _Checked(NamedTuple):
    """The messages that pulls of one form read from one queue. Valid while the other attributes are the same objects.

    Attributes:
        topics: `TopicConfigs.state`.
        subscription: That of the group; None for pulls that have a subscription of their own.
    """

    query: RawQuery
    topics: object
    group: SubscriptionGroupConfig | None
    subscription: SubscriptionData | None


class PullRun:
    """Run of pulls that find messages. What they have in common is decoded and checked once, see `PullForm`.

    All other pulls are processed as commands: those that may have to wait, and those that are refused.

    Args:
        forms: Those of all connections.
        on_processed: Called with the number of requests that were processed here.
    """

    def __init__(
        self,
        connection: Connection,
        server: ServerParts,
        checks: PullChecks,
        forms: PullForms,
        on_processed: Callable[[int], None],
    ) -> None:
        self._connection = connection
        self._server = server
        self._checks = checks
        self._forms = ConnectionForms(forms)
        self._on_processed = on_processed
        self._checked: dict[tuple[PullForm, bytes], _Checked] = {}
        self._opaques: list[int] = []
        self._parts: list[bytes | memoryview] = []
        self._bytes = 0

    def take(self, frame: Frame) -> bool:
        found = None if frame[0] else self._forms.match(frame[1])
        if found is None:
            return False
        try:
            return self._pull(*found)
        except Exception:  # as a command it gets its own response, and what is unexpected is logged
            return False

    def _pull(self, form: PullForm, values: tuple[bytes, ...]) -> bool:
        queue_text, offset_text, commit_text, opaque_text = values
        pull, checked = form.header, self._checked.get((form, queue_text))
        if checked is None or not self._is_valid(pull, checked):
            checked = self._check(form, queue_text)
        if checked is None:
            return False
        found = self._server.raw.pull(checked.query, int(offset_text))
        if found.status is RawStatus.NO_NEW_MSG:
            return False
        if pull.sys_flag & PullSysFlag.COMMIT_OFFSET:
            queue_id = checked.query.queue.queue_id
            self._server.engine.offsets.commit(pull.consumer_group, pull.topic, queue_id, int(commit_text))
        opaque = int(opaque_text)
        if not self._connection.begin(opaque):
            return False
        self._add_response(opaque, found)
        return True

    def _add_response(self, opaque: int, found: RawPull) -> None:
        size = sum(map(len, found.parts))
        numbers = found.next_begin_offset, found.min_offset, found.max_offset, opaque
        self._opaques.append(opaque)
        self._parts += json_frame_head(_TEMPLATES[found.status] % numbers, size), *found.parts
        self._bytes += size
        if self._bytes >= _MAX_BYTES:
            self.process()

    def _is_valid(self, pull: PullMessageRequestHeader, checked: _Checked) -> bool:
        server = self._server
        return (
            checked.topics is server.topics.state
            and checked.group is server.groups.find(pull.consumer_group)
            and checked.subscription is self._subscription(pull)
            and not server.engine.has_members(pull.consumer_group)
        )

    def _subscription(self, pull: PullMessageRequestHeader) -> SubscriptionData | None:
        if pull.sys_flag & PullSysFlag.SUBSCRIPTION:
            return None
        return self._server.clients.subscription(pull.consumer_group, pull.topic)

    def _check(self, form: PullForm, queue_text: bytes) -> _Checked | None:
        """Return what a pull reads, and keep it; None if each pull has to be processed as a command.

        That is where a group has to be created, an expression compiled, or the members of the group checked.

        Raises:
            RefusedError: The pull will be refused.
        """
        pull, server = replace(form.header, queue_id=int(queue_text)), self._server
        topics, group = server.topics.state, server.groups.find(pull.consumer_group)
        subscription = self._subscription(pull)
        if group is None or not group.consume_broadcast_enable:
            return None
        self._checks.check(pull, group)
        compiled = server.subscriptions.cache.find(server.subscriptions.expression_of_pull(pull))
        if compiled is None:
            return None
        if len(self._checked) >= _MAX_CHECKED:
            self._checked.clear()
        checked = _Checked(self._checks.query(pull, compiled.selector), topics, group, subscription)
        self._checked[form, queue_text] = checked
        return checked

    def process(self) -> None:
        opaques, parts = self._opaques, self._parts
        if opaques:
            self._opaques, self._parts, self._bytes = [], [], 0
            self._on_processed(len(opaques))
            self._connection.reply_to_run(opaques, parts)


def _template(status: RawStatus) -> bytes:
    """Return the header of the responses with *status*, as a format for the numbers of one."""
    found = RawPull(status, _NEXT_OFFSET, _MIN_OFFSET, _MAX_OFFSET)
    response = found.response_to(RemotingCommand(RequestCode.PULL_MESSAGE, _OPAQUE))
    return json_header_template(response, (_NEXT_OFFSET, _MIN_OFFSET, _MAX_OFFSET, _OPAQUE))


_TEMPLATES = {status: _template(status) for status in RawStatus}
