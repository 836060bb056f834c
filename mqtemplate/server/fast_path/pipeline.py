"""The fast path of one server, and the pipelines of its connections."""

from __future__ import annotations

from collections.abc import Callable

from mqtemplate.engine.engine import Engine
from mqtemplate.record.properties_template import AddedProperties
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.codec import Frame
from mqtemplate.server.fast_path.header_templates import PullTemplates, SendTemplates
from mqtemplate.server.fast_path.pipelined_batches import PipelinedBatches
from mqtemplate.server.fast_path.pipelined_pulls import PipelinedPulls
from mqtemplate.server.fast_path.pipelined_sends import PipelinedSends
from mqtemplate.server.fast_path.send_responses import SendResponses, added_properties
from mqtemplate.server.pulls.pull_checks import PullChecks
from mqtemplate.server.pulls.raw_reader import RawReader
from mqtemplate.server.state.settings import BrokerServerSettings
from mqtemplate.server.state.topics import TopicConfigs

_STARTS_OF_PULLS = (b'{"code":11,', b'{"code":361,')
"""Clients write the code first. Pulls of a client that does not are processed as commands."""


class Pipeline:
    """The requests of one connection that are processed without decoding each: a `RequestPipeline`."""

    def __init__(self, sends: PipelinedSends, pulls: PipelinedPulls) -> None:
        self._sends = sends
        self._pulls = pulls

    def accept(self, frame: Frame) -> bool:
        """Accept a request; return False if it has to be processed as a command, after those before it."""
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
        self._send_templates = SendTemplates(AddedProperties(added))
        self._pull_templates = PullTemplates()
        self._batch_properties = AddedProperties({})  # messages of a batch have no more, as with RocketMQ 5.5.0

    def pipeline(self, connection: Connection, on_processed: Callable[[int], None]) -> Pipeline:
        """Return the pipeline of a new connection.

        Args:
            on_processed: Called with the number of requests that the pipeline has processed.
        """
        engine, max_messages = self._engine, self._settings.max_batch_messages
        batches = PipelinedBatches(
            connection, engine, max_messages, self._batch_properties, self._responses, on_processed
        )
        sends = PipelinedSends(
            connection, engine, self._topics, self._send_templates, batches, self._responses, on_processed
        )
        pulls = PipelinedPulls(connection, self._raw, engine.offsets, self._checks, self._pull_templates, on_processed)
        return Pipeline(sends, pulls)
