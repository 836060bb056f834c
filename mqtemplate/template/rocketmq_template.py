"""The template: what an application sends with, and receives with when it asks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import datetime, timedelta
from time import monotonic
from types import TracebackType
from typing import Any, Self, TypeVar, overload

from mqtemplate.broker import Broker, ConsumeFromWhere, MessageModel
from mqtemplate.converter import JsonMessageConverter, MessageConverter
from mqtemplate.errors import (
    ConfigurationError,
    DestinationError,
    MessageError,
    MQTemplateError,
    SendTimeoutError,
)
from mqtemplate.message import Message, MessageQueue
from mqtemplate.results import SendResult
from mqtemplate.selectors.tags import SelectorType
from mqtemplate.template.callbacks import report_to
from mqtemplate.template.destination import MessageQueueSelector, check_hash_key, select_queue_by_hash
from mqtemplate.template.headers import Extras, make_extras
from mqtemplate.template.lite_pull import LitePullConsumer, PullSettings
from mqtemplate.template.outbound import MessageFactory
from mqtemplate.template.requests import RequestVerbs
from mqtemplate.template.spring_names import SpringNames
from mqtemplate.template.transactions import TransactionListeners, TransactionVerbs
from mqtemplate.template.waiting_verbs import WaitingVerbs

T = TypeVar("T")

_NOT_GIVEN: Any = object()


class RocketMQTemplate(SpringNames, TransactionVerbs, RequestVerbs, WaitingVerbs):
    """Sends payloads of any kind, at once or later, and receives on request.

    It may be used from many threads. It knows the port only, so the same calls work over every broker.
    The names of rocketmq-spring work too: `mqtemplate.template.spring_names`.

    Args:
        broker: Where to; started and closed by who made it.
        converter: Payload <-> body; bytes, text and JSON by default.
        send_message_timeout: Milliseconds for a call that names no timeout.
        max_message_size: Bytes a body may have here, where the broker would take more.
        default_destination: For ``convert_and_send`` with a payload alone.
        message_queue_selector: Chooses the queue for a ``hash_key``; a Java client's choice by default.
        producer_group: Whom the broker asks what became of transactions.
        consumer_group: As whom ``receive`` reads.
        consumer_topic: What ``receive`` reads.
        selector_type: How *selector_expression* is to be read.
        selector_expression: Which messages of it: ``*``, tags as ``a || b``, or by SQL92.
        message_model: Whether the group's members share the messages out or each get all.
        consume_from_where: Where a new group begins.
    """

    def __init__(
        self,
        broker: Broker,
        *,
        converter: MessageConverter | None = None,
        send_message_timeout: int = 3_000,
        max_message_size: int | None = None,
        default_destination: str | None = None,
        message_queue_selector: MessageQueueSelector = select_queue_by_hash,
        producer_group: str | None = None,
        consumer_group: str | None = None,
        consumer_topic: str | None = None,
        selector_type: SelectorType = SelectorType.TAG,
        selector_expression: str = "*",
        message_model: MessageModel = MessageModel.CLUSTERING,
        consume_from_where: ConsumeFromWhere = ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET,
    ) -> None:
        self.broker = broker
        self.converter: MessageConverter = JsonMessageConverter() if converter is None else converter
        self.send_message_timeout = _check_timeout(send_message_timeout)
        self.default_destination = default_destination
        self.message_queue_selector = message_queue_selector
        self._messages = MessageFactory(self.converter, broker.clock, max_message_size)
        self._now_ms = broker.clock.now_ms
        self._transactions = TransactionListeners(broker, self.converter, producer_group)
        self._pull: LitePullConsumer | None = None
        if consumer_group is not None and consumer_topic is not None:
            settings = PullSettings(
                group=consumer_group,
                topic=consumer_topic,
                selector_type=selector_type,
                selector_expression=selector_expression,
                message_model=message_model,
                consume_from_where=consume_from_where,
            )
            self._pull = LitePullConsumer(broker, settings, self.converter)

    # --- sending -------------------------------------------------------------------------------

    def sync_send(
        self,
        destination: str,
        payload: object,
        timeout: int | None = None,
        delay_level: int = 0,
        *,
        delay: timedelta | float | None = None,
        deliver_at: datetime | int | None = None,
        hash_key: str | None = None,
        keys: str | Sequence[str] = (),
        headers: Mapping[str, object] | None = None,
        queue: MessageQueue | None = None,
    ) -> SendResult:
        """Send, and wait until the broker has it.

        Args:
            destination: ``"topic"`` or ``"topic:tag"``.
            payload: Anything the converter takes. A list is a batch: its items are messages of their own, stored
                together, in one queue and in this order, and all get the same options. An item (or the payload) may
                be a `Message`, with properties of its own. To send one JSON array pass a tuple.
            timeout: Milliseconds for the whole call, retries included.
            delay_level: 0 for now, or a position in the broker's level table (1 = 1s … 18 = 2h by default).
            delay: How long to wait, any length; a number is seconds. Counted by the broker's clock.
            deliver_at: When to deliver: an aware datetime, or epoch milliseconds.
            hash_key: Messages with equal keys go to one queue, in the order sent.
            keys: Business keys, to find the message by; a text is one, or several separated by blanks.
            headers: ``KEYS``, ``TAGS``, ``FLAG``, ``WAIT_STORE_MSG_OK``, ``DELAY`` and ``TIMER_…`` with or without
                the prefix ``rocketmq_``; every other name is a property of yours.
            queue: This queue of the topic, instead of one by turns.

        Raises:
            MessageError: The message itself cannot be sent (`DestinationError`, `ConversionError`, `DelayError`);
                a retry cannot help.
            SendTimeoutError: No answer in time; the broker may have stored it all the same.
            SendError: The broker did not take it; a retry may help.
        """
        extras = make_extras(delay_level, delay, deliver_at, keys, headers, self._now_ms)
        limit = self.send_message_timeout if timeout is None else _check_timeout(timeout)
        if isinstance(payload, list) or hash_key is not None or queue is not None:
            messages, queue, limit = self._prepare(destination, payload, extras, hash_key, queue, limit)
            if isinstance(payload, list):
                return self.broker.send_batch(messages, queue, limit)
            return self.broker.send(messages[0], queue, limit)
        return self.broker.send(self._messages.one(destination, payload, extras), None, limit)

    def async_send(
        self,
        destination: str,
        payload: object,
        timeout: int | None = None,
        delay_level: int = 0,
        *,
        delay: timedelta | float | None = None,
        deliver_at: datetime | int | None = None,
        hash_key: str | None = None,
        keys: str | Sequence[str] = (),
        headers: Mapping[str, object] | None = None,
        queue: MessageQueue | None = None,
        on_success: Callable[[SendResult], object] | None = None,
        on_error: Callable[[BaseException], object] | None = None,
    ) -> Future[SendResult]:
        """Send without waiting; ``asyncio.wrap_future`` makes the answer awaitable. Arguments as `sync_send`.

        Args:
            on_success: Called with the result, in whichever thread brings it. What it raises is logged.
            on_error: Called with what went wrong instead. Without it a failure beside *on_success* is logged.

        Raises:
            MessageError: At once, for what is wrong with the call. What the broker says comes with the future.
        """
        extras = make_extras(delay_level, delay, deliver_at, keys, headers, self._now_ms)
        limit = self.send_message_timeout if timeout is None else _check_timeout(timeout)
        try:
            messages, queue, limit = self._prepare(destination, payload, extras, hash_key, queue, limit)
            future = self.broker.send_async(messages, queue, limit)
        except MessageError:
            raise
        except MQTemplateError as exc:
            future = Future()
            future.set_exception(exc)
        if on_success is not None or on_error is not None:
            future.add_done_callback(report_to(on_success, on_error, destination, "send"))
        return future

    def send_one_way(
        self,
        destination: str,
        payload: object,
        *,
        delay_level: int = 0,
        delay: timedelta | float | None = None,
        deliver_at: datetime | int | None = None,
        hash_key: str | None = None,
        keys: str | Sequence[str] = (),
        headers: Mapping[str, object] | None = None,
        queue: MessageQueue | None = None,
    ) -> None:
        """Hand over and ask for no answer: the fastest way over a network, and one that may lose messages.

        Arguments as `sync_send`. A list goes message by message; with *hash_key* or *queue* it stays in one queue.
        """
        extras = make_extras(delay_level, delay, deliver_at, keys, headers, self._now_ms)
        messages, queue, _ = self._prepare(destination, payload, extras, hash_key, queue, self.send_message_timeout)
        for message in messages:
            self.broker.send_one_way(message, queue)

    @overload
    def convert_and_send(
        self,
        destination: object,
        *,
        headers: Mapping[str, object] | None = None,
        post_processor: Callable[[Message], Message] | None = None,
    ) -> SendResult: ...

    @overload
    def convert_and_send(
        self,
        destination: str,
        payload: object,
        headers: Mapping[str, object] | None = None,
        post_processor: Callable[[Message], Message] | None = None,
    ) -> SendResult: ...

    def convert_and_send(
        self,
        destination: Any,
        payload: object = _NOT_GIVEN,
        headers: Mapping[str, object] | None = None,
        post_processor: Callable[[Message], Message] | None = None,
    ) -> SendResult:
        """Send a payload with headers, to a destination or, given a payload alone, to the default one.

        Args:
            post_processor: Gets the finished message and returns the one to send, the same or another.
        """
        if payload is _NOT_GIVEN:
            destination, payload = self._default_destination(), destination
        if post_processor is None:
            return self.sync_send(destination, payload, headers=headers)
        if isinstance(payload, list):
            raise MessageError("a post_processor takes one message, got a list; send the batch with sync_send")
        extras = make_extras(0, None, None, (), headers, self._now_ms)
        message = post_processor(self._messages.one(destination, payload, extras))
        if not isinstance(message, Message):
            raise MessageError(f"the post_processor must return a Message, it returned {type(message).__name__}")
        return self.sync_send(destination, message)

    # --- receiving -----------------------------------------------------------------------------

    def receive(self, target_type: type[T], max_count: int = 32, timeout: int = 3_000) -> list[T]:
        """Up to *max_count* messages of the consumer group, waiting up to *timeout* ms for the first.

        At least once: what a call returned is confirmed by the next call, or by `close`; a program that ends without
        either gets it again. `mqtemplate.template.lite_pull` says more.

        Args:
            target_type: What each message shall be; `MessageExt` for the whole of it. A body that is none goes to
                the group's dead letters.

        Raises:
            ConfigurationError: The template was given no group or no topic.
        """
        if self._pull is None:
            raise ConfigurationError(
                "receive needs to know as whom and what: give the template consumer_group and consumer_topic, "
                "in application.yml rocketmq.pull-consumer.group and rocketmq.pull-consumer.topic"
            )
        if type(max_count) is not int or max_count < 1:
            raise MessageError(f"max_count must be a whole number from 1 on, got {max_count!r}")
        return self._pull.receive(target_type, max_count, 0 if timeout == 0 else _check_timeout(timeout))

    def close(self) -> None:
        """Confirm what was received, leave the group, and answer for no transaction any more.

        The broker stays open: who made it closes it.
        """
        self._transactions.close()
        if self._pull is not None:
            self._pull.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # --- what the verbs share ------------------------------------------------------------------

    def _single_message(
        self,
        destination: str,
        payload: object,
        timeout: int | None,
        delay_level: int,
        delay: timedelta | float | None,
        deliver_at: datetime | int | None,
        hash_key: str | None,
        keys: str | Sequence[str],
        headers: Mapping[str, object] | None,
        queue: MessageQueue | None,
    ) -> tuple[Message, MessageQueue | None, int]:
        """One message made of the arguments of a verb, its queue, and the milliseconds that are left."""
        extras = make_extras(delay_level, delay, deliver_at, keys, headers, self._now_ms)
        limit = self.send_message_timeout if timeout is None else _check_timeout(timeout)
        [message], queue, limit = self._prepare(destination, payload, extras, hash_key, queue, limit)
        return message, queue, limit

    def _prepare(
        self,
        destination: str,
        payload: object,
        extras: Extras,
        hash_key: str | None,
        queue: MessageQueue | None,
        timeout_ms: int,
    ) -> tuple[list[Message], MessageQueue | None, int]:
        """The messages, their queue, and the milliseconds that are left after the work of finding both."""
        started = monotonic()
        if isinstance(payload, list):
            messages = self._messages.batch(destination, payload, extras)
        else:
            messages = [self._messages.one(destination, payload, extras)]
        if hash_key is not None or queue is not None:
            queue = self._choose_queue(messages[0], hash_key, queue)
        left_ms = timeout_ms - int((monotonic() - started) * 1_000)
        if left_ms <= 0:
            raise SendTimeoutError(
                f"the timeout of {timeout_ms} ms was over before the message reached the broker; nothing was sent"
            )
        return messages, queue, left_ms

    def _choose_queue(self, message: Message, hash_key: str | None, queue: MessageQueue | None) -> MessageQueue:
        if queue is not None:
            if hash_key is not None:
                raise MessageError("hash_key and queue both choose the queue; pass one of them")
            if queue.topic != message.topic:
                raise DestinationError(
                    f"the queue is one of topic {queue.topic!r}, the destination says {message.topic!r}"
                )
            return queue
        assert hash_key is not None
        check_hash_key(hash_key)
        return self.message_queue_selector(self.broker.queues(message.topic), message, hash_key)

    def _default_destination(self) -> str:
        if self.default_destination is None:
            raise DestinationError(
                "convert_and_send with a payload alone needs a default: give the template default_destination, "
                "or call convert_and_send(destination, payload)"
            )
        return self.default_destination


def _check_timeout(timeout: int) -> int:
    if type(timeout) is not int or timeout < 1:
        raise MessageError(f"timeout must be a whole number of milliseconds from 1 on, got {timeout!r}")
    return timeout
