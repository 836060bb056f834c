"""Messages that brokers gave by POP: the requests for them, their receipt handles, and the requests that end their
deliveries.

Source: RocketMQ ``client: MQClientAPIImpl.processPopResponse``, ``ackMessageAsync``, ``changeInvisibleTimeAsync``.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypedDict

from mqtemplate.broker import Capability, ConsumerSpec, PopConsumers, ReceivedMessage
from mqtemplate.brokers.remote.cluster.client import ClientContext
from mqtemplate.brokers.remote.cluster.failures import response_error
from mqtemplate.engine.group_rules import SentBack, sent_back_message
from mqtemplate.engine.pop.receipt_handle import ReceiptHandle
from mqtemplate.errors import BrokerError, InvalidReceiptHandleError, MQTemplateError, RemoteProtocolError
from mqtemplate.event_log import get_logger
from mqtemplate.message import Property
from mqtemplate.remoting.protocol.bodies.group import BatchAck, BatchAckMessageRequestBody
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers import pop as headers
from mqtemplate.remoting.protocol.messages import decode_messages
from mqtemplate.selectors.tags import Selector, TagSelector
from mqtemplate.user_code import error_text

if TYPE_CHECKING:
    from mqtemplate.key_limits import KeyLimits

_log = get_logger("mqtemplate.remote")

# --- pops -----------------------------------------------------------------------------------------


_MOST_AT_ONCE = 32


class WantedMessages(NamedTuple):
    """Arguments of a pop; see `PopConsumers.receive`."""

    group: str
    topic: str
    max_count: int
    invisible_ms: int
    selector: Selector | None
    is_ordered: bool
    attempt_id: str


def pop_request(
    context: ClientContext,
    wanted: WantedMessages,
    broker_name: str,
    poll_ms: int,
    *,
    from_first: bool,
    key_limits: KeyLimits | None = None,
) -> RemotingCommand:
    """Return the request of a pop from all queues of a broker.

    It has no time of birth: with one, a broker would not hold a pop of a client whose clock is behind.

    Args:
        from_first: A new group starts at the first message; False: at the last one.
    """
    kind, expression = _expression(wanted.selector)
    header = headers.PopMessageRequestHeader(
        consumer_group=context.namespace.wrap(wanted.group),
        topic=context.namespace.wrap(wanted.topic),
        queue_id=-1,
        max_msg_nums=min(max(wanted.max_count, 1), _MOST_AT_ONCE),
        invisible_time=wanted.invisible_ms,
        poll_time=poll_ms,
        init_mode=headers.INIT_MIN if from_first else headers.INIT_MAX,
        exp_type=kind,
        exp=expression,
        order=wanted.is_ordered,
        attempt_id=wanted.attempt_id or None,
        broker_name=broker_name,
    )
    if key_limits is not None:
        header = dataclasses.replace(
            header,
            mqt_fair_by=key_limits.fair_by,
            mqt_max_in_flight_per_key=key_limits.max_in_flight,
            mqt_max_rate_per_key=None if key_limits.max_rate is None else repr(key_limits.max_rate),
        )
    return RemotingCommand.request(RequestCode.POP_MESSAGE, header)


def _expression(selector: Selector | None) -> tuple[str, str]:
    if selector is None or selector.selects_all:
        return "TAG", "*"
    if isinstance(selector, TagSelector):
        return "TAG", " || ".join(sorted(selector.tags))
    return "SQL92", selector.expression


def read_popped(
    context: ClientContext, wanted: WantedMessages, broker_name: str, response: RemotingCommand
) -> list[ReceivedMessage]:
    """Return the messages of a response to a pop.

    Raises:
        RemoteProtocolError: It cannot be read. Its messages are delivered again later.
    """
    try:
        return _read(context, wanted, broker_name, response)
    except RemoteProtocolError:
        raise
    except Exception as exc:  # whatever a response holds
        raise RemoteProtocolError(
            f"broker {broker_name!r} sent an invalid response to a pop: {error_text(exc)}"
        ) from exc


def _read(
    context: ClientContext, wanted: WantedMessages, broker_name: str, response: RemotingCommand
) -> list[ReceivedMessage]:
    header = response.header(headers.PopMessageResponseHeader)
    queues = {(each.topic_type, each.queue_id): each for each in headers.parse_queues(header)}
    wire_group = context.namespace.wrap(wanted.group)
    visible_ms = context.clock.steady_ms() + wanted.invisible_ms
    received = []
    for message in decode_messages(response.body, broker_name, context.settings.max_body_bytes):
        known = message.properties.pop(Property.POP_CK, None)
        if known is not None:  # of a message from a retry topic, which the broker has hidden
            handle = ReceiptHandle.parse(known)
        else:
            kind = headers.popped_topic(message.topic, wire_group)[1]
            delivery = header.pop_time, header.invisible_time, header.revive_qid, kind, broker_name
            start = queues[kind, message.queue_id].start_offset
            handle = ReceiptHandle(start, *delivery, message.queue_id, message.queue_offset, None)
        queue = queues.get((handle.topic_type, handle.queue_id))
        if wanted.is_ordered and queue is not None and (count := queue.counts.get(handle.queue_offset)):
            message.reconsume_times = count
        message.topic = wanted.topic
        if (original := message.properties.get(Property.RETRY_TOPIC)) is not None:
            message.properties[Property.RETRY_TOPIC] = context.namespace.unwrap(original)
        received.append(ReceivedMessage(message, _Receipt(handle, visible_ms).text, message.reconsume_times + 1))
    return received


# --- deliveries -----------------------------------------------------------------------------------


_COPY_MS = 60_000
_TO_DEAD_LETTERS = -1
_MOST_BITS = 1 << 16
_ENDED = frozenset({ResponseCode.NO_MESSAGE, ResponseCode.MESSAGE_ILLEGAL})
_NEVER_MS = 1 << 62


class _Receipt(NamedTuple):
    """Receipt handle of one delivery.

    Attributes:
        handle: What the broker knows. Requests go to its broker.
        visible_ms: Time (steady ms of this process) at which the message is delivered again.
    """

    handle: ReceiptHandle
    visible_ms: int

    @property
    def text(self) -> str:
        """The text for `ReceivedMessage.receipt`."""
        return f"{self.handle.extra_info}@{self.visible_ms}"

    @classmethod
    def parse(cls, text: str) -> _Receipt:
        """Return the receipt of a `text`. The time of a handle alone is not over."""
        handle, _, visible = text.rpartition("@")
        if handle and visible.isdecimal():
            return cls(ReceiptHandle.parse(handle), int(visible))
        return cls(ReceiptHandle.parse(text), _NEVER_MS)


class _Ending(NamedTuple):
    """A request that ends a delivery, or changes its time.

    Attributes:
        visible_ms: Time (steady ms) at which the message is visible after a change.
        operation: What the request is for.
    """

    receipt: _Receipt
    visible_ms: int
    request: RemotingCommand
    operation: str


class _HandleFields(TypedDict):
    """Fields that name a delivery in the header of a request."""

    consumer_group: str
    topic: str
    queue_id: int
    extra_info: str
    offset: int
    broker_name: str


class Deliveries(PopConsumers):
    """Requests about messages that were popped. They go to the broker of each message, and several go at once.

    Args:
        send_back: Sends a message back as the client itself; see `Members.send_back`.
    """

    def __init__(self, context: ClientContext, send_back: Callable[[SentBack], None]) -> None:
        self.context = context
        self.send_back = send_back

    # --- ends and changes ----------------------------------------------------------------------

    def ack(self, group: str, topic: str, receipt: str) -> None:
        self._call(self._ack(group, topic, _Receipt.parse(receipt)))

    def ack_all(self, group: str, topic: str, receipts: Sequence[str]) -> list[MQTemplateError | None]:
        """Acknowledge several messages, with one request to each broker.

        Returns:
            For each receipt the error, or None. Source: ``MQClientAPIImpl.batchAckMessageAsync``.
        """
        parsed = [_Receipt.parse(receipt) for receipt in receipts]
        by_broker: dict[str, list[int]] = {}
        single: list[int] = []
        now_ms = self.context.clock.steady_ms()
        for index, (handle, visible_ms) in enumerate(parsed):
            # A broker leaves ended deliveries out of a batch without a word.
            fits = 0 <= handle.queue_offset - handle.start_offset < _MOST_BITS and visible_ms > now_ms
            (by_broker.setdefault(handle.broker_name, []) if fits else single).append(index)

        def batch(broker_name: str) -> tuple[str, RemotingCommand]:
            acks = self._batch_acks(group, topic, [parsed[index].handle for index in by_broker[broker_name]])
            body = BatchAckMessageRequestBody(broker_name=broker_name, acks=acks).encode()
            request = RemotingCommand.request(RequestCode.BATCH_ACK_MESSAGE, body=body)
            return self.context.routes.master(broker_name), request

        results: dict[int, MQTemplateError | None] = {}
        for name, (_, response) in self.context.invoke_each(by_broker, batch).items():
            if isinstance(response, RemotingCommand) and response.code != ResponseCode.SUCCESS:
                single += by_broker[name]  # the response does not tell which ones were refused
            else:
                error = response if isinstance(response, BrokerError) else None
                results |= dict.fromkeys(by_broker[name], error)
        singles = self._call_each([self._ack(group, topic, parsed[index]) for index in single])
        for index, result in zip(single, singles, strict=True):
            results[index] = result if isinstance(result, MQTemplateError) else None
        return [results[index] for index in range(len(parsed))]

    def change_invisible(self, group: str, topic: str, receipt: str, invisible_ms: int, *, counts: bool = True) -> str:
        change = self._change(group, topic, _Receipt.parse(receipt), invisible_ms, counts=counts)
        return _changed(change, self._call(change))

    def change_all(
        self, group: str, topic: str, receipts: Sequence[str], invisible_ms: int, *, counts: bool = True
    ) -> list[str | MQTemplateError]:
        """Change the invisible times of several messages. Return the new receipt or the error of each."""
        changes = [
            self._change(group, topic, _Receipt.parse(receipt), invisible_ms, counts=counts) for receipt in receipts
        ]
        results: list[str | MQTemplateError] = []
        for change, response in zip(changes, self._call_each(changes), strict=True):
            try:
                results.append(_changed(change, response) if isinstance(response, RemotingCommand) else response)
            except MQTemplateError as exc:
                results.append(exc)
        return results

    def dead_letter(
        self, group: str, topic: str, received: ReceivedMessage, properties: Mapping[str, str] | None = None
    ) -> None:
        # The message stays invisible until its copy is stored. So no other member has it, and nothing is copied twice.
        receipt = self.change_invisible(group, topic, received.receipt, _COPY_MS)
        spec = ConsumerSpec(group=group, subscriptions={})
        self.send_back(sent_back_message(spec, received.message, _TO_DEAD_LETTERS, None, properties))
        self.ack(group, topic, receipt)

    # --- of messages that no handler gets ------------------------------------------------------

    def settle(self, group: str, received: ReceivedMessage, *, is_dead: bool) -> None:
        """Acknowledge a message, or store it as a dead letter. If that fails, it is delivered again later."""
        message = received.message
        try:
            if is_dead:
                self.dead_letter(group, message.topic, received)
            else:
                self.ack(group, message.topic, received.receipt)
        except MQTemplateError as exc:
            _log.warning("message.release_failed", topic=message.topic, msg_id=message.msg_id, reason=str(exc))

    def release(self, group: str, topic: str, received: Sequence[ReceivedMessage]) -> None:
        """Let other members have messages at once, with the same attempt."""
        receipts = [each.receipt for each in received]
        for each, result in zip(received, self.change_all(group, topic, receipts, 0, counts=False), strict=True):
            if isinstance(result, MQTemplateError) and not isinstance(result, InvalidReceiptHandleError):
                _log.warning("message.release_failed", topic=topic, msg_id=each.message.msg_id, reason=str(result))

    # --- requests ------------------------------------------------------------------------------

    def _ack(self, group: str, topic: str, receipt: _Receipt) -> _Ending:
        header = headers.AckMessageRequestHeader(**self._fields(group, topic, receipt.handle))
        request = RemotingCommand.request(RequestCode.ACK_MESSAGE, header)
        return _Ending(receipt, 0, request, f"acknowledge a message of {topic!r}")

    def _change(self, group: str, topic: str, receipt: _Receipt, invisible_ms: int, *, counts: bool) -> _Ending:
        header = headers.ChangeInvisibleTimeRequestHeader(
            **self._fields(group, topic, receipt.handle), invisible_time=invisible_ms, suspend=not counts
        )
        request = RemotingCommand.request(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, header)
        visible_ms = self.context.clock.steady_ms() + invisible_ms
        return _Ending(receipt, visible_ms, request, f"change the invisible time of a message of {topic!r}")

    def _fields(self, group: str, topic: str, handle: ReceiptHandle) -> _HandleFields:
        wrap = self.context.namespace.wrap
        return {
            "consumer_group": wrap(group),
            "topic": handle.real_topic(wrap(topic), wrap(group)),
            "queue_id": handle.queue_id,
            "extra_info": handle.extra_info,
            "offset": handle.queue_offset,
            "broker_name": handle.broker_name,
        }

    def _batch_acks(self, group: str, topic: str, handles: Iterable[ReceiptHandle]) -> list[BatchAck]:
        wrap = self.context.namespace.wrap
        bits: dict[ReceiptHandle, int] = {}
        for handle in handles:
            of_pop = handle._replace(queue_offset=0)
            bits[of_pop] = bits.get(of_pop, 0) | 1 << (handle.queue_offset - handle.start_offset)
        return [
            BatchAck(
                consumer_group=wrap(group),
                topic=wrap(topic),
                retry=str(of_pop.topic_type),
                start_offset=of_pop.start_offset,
                queue_id=of_pop.queue_id,
                revive_queue_id=of_pop.revive_queue_id,
                pop_time=of_pop.pop_ms,
                invisible_time=of_pop.invisible_ms,
                bit_set=base64.b64encode(found.to_bytes(found.bit_length() // 8 + 1, "little")).decode(),
            )
            for of_pop, found in bits.items()
        ]

    def _call(self, ending: _Ending) -> RemotingCommand:
        [response] = self._call_each([ending])
        if isinstance(response, MQTemplateError):
            raise response
        return response

    def _call_each(self, endings: Sequence[_Ending]) -> list[RemotingCommand | MQTemplateError]:
        """Send the requests at once, and return the response or the error of each."""

        def create(index: int) -> tuple[str, RemotingCommand]:
            ending = endings[index]
            address = self.context.routes.master(ending.receipt.handle.broker_name)
            self._check_time(ending, address)
            return address, ending.request

        results: list[RemotingCommand | MQTemplateError] = []
        for index, (address, response) in sorted(self.context.invoke_each(range(len(endings)), create).items()):
            operation = endings[index].operation
            if isinstance(response, RemotingCommand) and response.code in _ENDED:
                results.append(_delivered_again(operation, response.remark))
            elif isinstance(response, RemotingCommand) and response.code != ResponseCode.SUCCESS:
                results.append(response_error(response, operation, address))
            else:
                results.append(response)
        return results

    def _check_time(self, ending: _Ending, address: str) -> None:
        """Raise an error if the time of a message is over. A broker of RocketMQ accepts such a change."""
        is_ours = Capability.POP in self.context.instance.announced.get(address, ())
        if not is_ours and ending.receipt.visible_ms <= self.context.clock.steady_ms():
            raise _delivered_again(ending.operation, None)


def _changed(change: _Ending, response: RemotingCommand) -> str:
    """Return the new receipt."""
    header = response.header(headers.ChangeInvisibleTimeResponseHeader)
    handle = change.receipt.handle
    if not header.pop_time:  # RocketMQ's answer for an ordered message that is acknowledged already
        raise _delivered_again(change.operation, None)
    changed = handle._replace(
        start_offset=handle.queue_offset,
        pop_ms=header.pop_time,
        invisible_ms=header.invisible_time,
        revive_queue_id=header.revive_qid,
    )
    return _Receipt(changed, change.visible_ms).text


def _delivered_again(operation: str, remark: str | None) -> InvalidReceiptHandleError:
    return InvalidReceiptHandleError(
        f"{operation}: its invisible time was over, so it is delivered again, and the newer delivery counts"
        f"{f' ({remark})' if remark else ''}. Give the listener a longer invisible_duration, or call message.extend in "
        "time"
    )
