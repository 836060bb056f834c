"""Requests of producers after a send, in any protocol: the end of a transaction, the recall of a delayed message.

Source: RocketMQ ``broker: EndTransactionProcessor``, ``RecallMessageProcessor``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from mqtemplate.engine.engine import Engine
from mqtemplate.engine.transactions import TransactionEnd
from mqtemplate.errors import MessageError, StoreError
from mqtemplate.event_log import LimitedLog
from mqtemplate.remoting.protocol.bodies.own_requests import Refusal, RefusalHeader
from mqtemplate.remoting.protocol.codes import ResponseCode
from mqtemplate.results import TransactionState
from mqtemplate.server.acl.access import AccessControl
from mqtemplate.server.acl.settings import Right
from mqtemplate.server.requests.caller import Caller
from mqtemplate.server.requests.refusal import RefusedError, decode_handles
from mqtemplate.server.state.settings import BrokerServerSettings
from mqtemplate.server.state.topics import TopicConfigs


class ClientTransactionEnd(NamedTuple):
    """The end of a transaction, as its producer requests it.

    Attributes:
        half_offset: Queue offset of the half message.
        physical_offset: Physical offset of the same half message.
        msg_id: For the log.
        remark: Why the state is unknown, for the log.
    """

    caller: Caller
    group: str
    half_offset: int
    physical_offset: int
    state: TransactionState
    msg_id: str | None = None
    remark: str | None = None


@dataclass(frozen=True, slots=True)
class ClientTransactionEnds:
    """Ends transactions for producers that are clients.

    Unlike RocketMQ's broker, this one accepts the end of a transaction that arrives after a check was sent. A
    transaction still ends once.
    """

    engine: Engine
    access: AccessControl
    peer_log: LimitedLog

    def end(self, request: ClientTransactionEnd) -> TransactionEnd | None:
        """End a transaction. `MessageStore.confirm` makes the end durable.

        Returns:
            None if nothing was stored: the state is unknown, or the transaction has ended already.

        Raises:
            RefusedError: There is no such half message, it is of another group, the client has no right to its topic,
                or the end was not stored.
        """
        try:
            return self.engine.transactions.end(
                request.half_offset,
                request.physical_offset,
                request.group,
                request.state,
                remark=request.remark,
                check_right=partial(self._check_right, request),
            )
        except (MessageError, StoreError, RefusedError) as exc:
            # Most clients do not wait for an answer: without a log entry the error would be lost.
            self.peer_log.warning("server.end_refused", group=request.group, msg_id=request.msg_id, reason=str(exc))
            if isinstance(exc, RefusedError):
                raise
            raise RefusedError(ResponseCode.SYSTEM_ERROR, str(exc)) from exc

    def _check_right(self, request: ClientTransactionEnd, topic: str) -> None:
        """Check the right to the topic of the half message: the request may name another topic, or none."""
        self.access.check_topic(request.caller, topic, Right.PUB, f"half message {request.half_offset}")


@dataclass(frozen=True, slots=True)
class ClientRecalls:
    """Cancels delayed messages by handle. Unlike RocketMQ's broker, it refuses the recall of a delivered message."""

    engine: Engine
    topics: TopicConfigs
    settings: BrokerServerSettings

    def recall(self, topic: str, handle: str) -> str:
        """Cancel a message for *topic*, and return its message id.

        Raises:
            RefusedError: Recalls are disabled, or the topic does not exist.
            NotRecallableError: The message is not pending here.
        """
        self.check_enabled()
        self.topics.get(topic)
        return self.engine.delayed.recall(topic, handle)

    def check_enabled(self, reason: str = "") -> None:
        """Raise `RefusedError` if clients may not cancel delayed messages. *reason* begins its text."""
        if not self.settings.recall_message_enable:
            raise RefusedError(
                ResponseCode.NO_PERMISSION,
                f"{reason}recall is disabled; set recall-message-enable to true",
                RefusalHeader(refusal=Refusal.RECALL_DISABLED),
            )

    def check_change(self, handles: str | None) -> None:
        """Raise `RefusedError` if changes are disabled, or one of the handles is not of this broker.

        Args:
            handles: Handles, joined by commas; None for a change by key.
        """
        self.check_enabled()
        name = self.engine.name
        for handle in decode_handles(handles):
            if handle.broker_name != name:
                raise RefusedError(
                    ResponseCode.ILLEGAL_OPERATION,
                    f"the handle is for a message of broker {handle.broker_name!r}, not of {name!r}; send it there",
                )
