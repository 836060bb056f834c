"""Codes 11 and 361: consumers pull messages.

Source: RocketMQ ``broker: PullMessageProcessor``, ``DefaultPullMessageResultHandler``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from mqtemplate.engine.engine import Engine
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.codes import PullSysFlag, RequestCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.message import PullMessageRequestHeader
from mqtemplate.server.pulls.pull_checks import PullChecks
from mqtemplate.server.pulls.pull_hold import HeldPull, PullHold
from mqtemplate.server.pulls.raw_reader import RawReader, RawStatus
from mqtemplate.server.requests.deferred_work import DeferredWork
from mqtemplate.server.requests.registration import handles
from mqtemplate.server.state.creations import ClientCreations
from mqtemplate.server.state.settings import BrokerServerSettings
from mqtemplate.server.state.subscriptions import LONG_EXPRESSION, Subscriptions


@dataclass(frozen=True, slots=True)
class PullProcessor:
    """Answers a pull at once if it found a message or may not wait. `PullHold` holds the others."""

    engine: Engine
    settings: BrokerServerSettings
    creations: ClientCreations
    checks: PullChecks
    subscriptions: Subscriptions
    raw: RawReader
    hold: PullHold
    deferred_work: DeferredWork

    @handles(RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE)
    def _process(self, connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
        header = request.header(PullMessageRequestHeader)
        if self.creations.groups.find(header.consumer_group) is not None:
            return self._pull(connection, request, header, may_compile=False)
        return self.deferred_work.run(connection, request, partial(self._pull, connection, request, header))

    def _pull(
        self,
        connection: Connection,
        request: RemotingCommand,
        header: PullMessageRequestHeader,
        *,
        may_compile: bool = True,
    ) -> RemotingCommand | None:
        group = self.creations.group(connection, request, header.consumer_group)
        self.checks.check(header, group)
        expression = self.subscriptions.expression_of_pull(header)
        compiled = self.subscriptions.cache.find(expression)
        if compiled is None:
            if not may_compile and len(expression[1]) > LONG_EXPRESSION:
                again = partial(self._pull, connection, request, header)
                return self.deferred_work.run(connection, request, again)
            compiled = self.subscriptions.compile(*expression)
        if header.sys_flag & PullSysFlag.COMMIT_OFFSET:
            offset = max(0, header.commit_offset)
            self.engine.offsets.commit(header.consumer_group, header.topic, header.queue_id, offset)
        query, at = self.checks.query(header, compiled.selector), header.queue_offset
        found = self.raw.pull(query, at)
        may_wait = header.sys_flag & PullSysFlag.SUSPEND and header.suspend_timeout_millis > 0
        if found.status is RawStatus.NO_NEW_MSG and may_wait:
            suspend_ms = min(header.suspend_timeout_millis, self.settings.max_suspend_ms)
            deadline_ms = self.engine.clock.steady_ms() + suspend_ms
            owner = self.creations.limits.owner(connection, request)
            self.hold.hold(HeldPull(connection, request, query, at, at, deadline_ms, owner))
            return None
        return found.response_to(request)
