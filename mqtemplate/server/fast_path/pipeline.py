"""Pipelined pulls, which are answered without decoding each request, and the pipelines of all connections."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mqtemplate.engine.engine import Engine
from mqtemplate.record.properties_template import AddedProperties
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.codec import Frame, json_frame_head
from mqtemplate.remoting.protocol.codes import PullSysFlag, RequestCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.json_header import json_header_template
from mqtemplate.server.fast_path.header_templates import (
    ConnectionTemplates,
    HeaderTemplates,
    PullTemplate,
    pull_templates,
    send_templates,
)
from mqtemplate.server.fast_path.pipelined_sends import (
    PipelinedSends,
    SendResponses,
    added_properties,
)
from mqtemplate.server.pulls.pull_checks import CheckedPull, PullChecks
from mqtemplate.server.pulls.raw_reader import RawPull, RawReader, RawStatus
from mqtemplate.server.state.settings import BrokerServerSettings
from mqtemplate.server.state.topics import TopicConfigs
from mqtemplate.store.tables import ConsumerOffsets

_MAX_BYTES = 256 << 10
"""Responses are sent when they have so many bytes, though more pulls were read: they take memory, and clients wait."""
_MAX_CHECKED = 1_000
_NEXT_OFFSET, _MIN_OFFSET, _MAX_OFFSET, _OPAQUE = 1_234_567, 2_345_678, 3_456_789, 4_567_891
"""Numbers that mark the places of the numbers of a response in a template."""


class PipelinedPulls:
    """Pulls over one connection that find messages. Their common part is decoded and checked once: `PullTemplate`.

    All other pulls are processed as commands: they may have to wait, or they are refused.

    Args:
        templates: Templates of all connections.
        on_processed: Called with the number of requests that were processed here.
    """

    def __init__(
        self,
        connection: Connection,
        raw: RawReader,
        offsets: ConsumerOffsets,
        checks: PullChecks,
        templates: HeaderTemplates[PullTemplate],
        on_processed: Callable[[int], None],
    ) -> None:
        self._connection = connection
        self._raw = raw
        self._offsets = offsets
        self._checks = checks
        self._templates = ConnectionTemplates(templates)
        self._on_processed = on_processed
        self._checked: dict[tuple[PullTemplate, bytes], CheckedPull] = {}  # by the template and the text of the queue
        self._opaques: list[int] = []
        self._parts: list[bytes | memoryview] = []
        self._bytes = 0

    def accept(self, frame: Frame) -> bool:
        """Read what a pull requests, and keep its response; return False if it has to be processed as a command."""
        found = None if frame[0] else self._templates.match(frame[1])
        if found is None:
            return False
        try:
            return self._pull(*found)
        except Exception:  # as a command it gets its own response, and an unexpected error is logged
            return False

    def _pull(self, template: PullTemplate, values: tuple[bytes, ...]) -> bool:
        queue_text, offset_text, commit_text, opaque_text = values
        pull, checked = template.header, self._checked.get((template, queue_text))
        if checked is None or not self._checks.is_valid(pull, checked):
            checked = self._check(template, queue_text)
        if checked is None:
            return False
        found = self._raw.pull(checked.query, int(offset_text))
        if found.status is RawStatus.NO_NEW_MSG:
            return False
        if pull.sys_flag & PullSysFlag.COMMIT_OFFSET:
            self._offsets.commit(pull.consumer_group, pull.topic, checked.query.queue.queue_id, int(commit_text))
        opaque = int(opaque_text)
        # After the read and the commit: as a command the same pull does both again, which changes nothing.
        if not self._connection.begin(opaque):
            return False
        self._add_response(opaque, found)
        return True

    def _check(self, template: PullTemplate, queue_text: bytes) -> CheckedPull | None:
        checked = self._checks.check_once(replace(template.header, queue_id=int(queue_text)))
        if checked is not None:
            if len(self._checked) >= _MAX_CHECKED:
                self._checked.clear()
            self._checked[template, queue_text] = checked
        return checked

    def _add_response(self, opaque: int, found: RawPull) -> None:
        size = sum(map(len, found.parts))
        numbers = found.next_begin_offset, found.min_offset, found.max_offset, opaque
        self._opaques.append(opaque)
        self._parts += json_frame_head(_TEMPLATES[found.status] % numbers, size), *found.parts
        self._bytes += size
        if self._bytes >= _MAX_BYTES:
            self.process()

    def process(self) -> None:
        """Send the responses."""
        opaques, parts = self._opaques, self._parts
        if opaques:
            self._opaques, self._parts, self._bytes = [], [], 0
            self._on_processed(len(opaques))
            self._connection.reply_together(opaques, parts)


def _template(status: RawStatus) -> bytes:
    """Return the header of the responses with *status*, as a format for the numbers of one."""
    found = RawPull(status, _NEXT_OFFSET, _MIN_OFFSET, _MAX_OFFSET)
    response = found.response_to(RemotingCommand(RequestCode.PULL_MESSAGE, _OPAQUE))
    return json_header_template(response, (_NEXT_OFFSET, _MIN_OFFSET, _MAX_OFFSET, _OPAQUE))


_TEMPLATES = {status: _template(status) for status in RawStatus}


_STARTS_OF_PULLS = (b'{"code":11,', b'{"code":361,')
"""Clients write the code first. Pulls of a client that does not are processed as commands."""


class Pipeline:
    """The requests of one connection that are processed without decoding each: a `RequestPipeline`."""

    def __init__(self, sends: PipelinedSends, pulls: PipelinedPulls) -> None:
        self._sends = sends
        self._pulls = pulls

    def accept(self, frame: Frame) -> bool:
        """Accept a request; return False if it has to be processed as a command, after the requests before it."""
        if not frame[1].startswith(_STARTS_OF_PULLS):
            return self._sends.accept(frame)
        self._sends.process()  # messages are stored before a pull after them reads
        return self._pulls.accept(frame)

    def process(self) -> None:
        """Process the requests that were accepted."""
        self._sends.process()
        self._pulls.process()


class FastPath:
    """Creator of the pipelines of all connections, which share templates, and the properties that the server adds.

    A server without one processes each request as a command: it stores the same bytes, and gives the same answers.
    """

    def __init__(
        self,
        engine: Engine,
        settings: BrokerServerSettings,
        topics: TopicConfigs,
        raw: RawReader,
        checks: PullChecks,
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._topics = topics
        self._raw = raw
        self._checks = checks
        added = added_properties(settings)
        self._responses = SendResponses(added)
        self._send_templates = send_templates(AddedProperties(added))
        self._pull_templates = pull_templates()
        self._batch_properties = AddedProperties({})  # messages of a batch have no more, as with RocketMQ 5.5.0

    def pipeline(self, connection: Connection, on_processed: Callable[[int], None]) -> Pipeline:
        """Return the pipeline of a new connection.

        Args:
            on_processed: Called with the number of requests that the pipeline has processed.
        """
        sends = PipelinedSends(
            connection,
            self._engine,
            self._topics,
            self._send_templates,
            self._settings.max_batch_messages,
            self._batch_properties,
            self._responses,
            on_processed,
        )
        offsets = self._engine.offsets
        pulls = PipelinedPulls(connection, self._raw, offsets, self._checks, self._pull_templates, on_processed)
        return Pipeline(sends, pulls)
