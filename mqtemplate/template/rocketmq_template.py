"""The template: the class with which an application sends messages, and receives them on request."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from time import monotonic
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, overload
from weakref import WeakSet

from mqtemplate.broker import Broker, ConsumeFromWhere, MessageModel, QueuedMessage
from mqtemplate.calls.handling import Observation
from mqtemplate.calls.middlewares import middleware_sends
from mqtemplate.calls.send import ASYNC, BATCH, HALF, ONE_WAY, REQUEST, SEND, SendCall, SendKind, SendPipeline
from mqtemplate.converter import JsonMessageConverter, MessageConverter
from mqtemplate.durations import SHORT_TIMEOUT_MS, Duration, format_ms, timeout_option_ms
from mqtemplate.errors import (
    ConfigurationError,
    DestinationError,
    MessageError,
    MQTemplateError,
    SendTimeoutError,
)
from mqtemplate.futures import AwaitableFuture, refuse_on_handler_loop
from mqtemplate.message import Message, MessageQueue, Property, SelectedQueue, property_text
from mqtemplate.results import SendResult, TransactionSendResult
from mqtemplate.selectors.tags import SelectorType
from mqtemplate.template.asynchronous import Background, TemplateRequests, add_callbacks, awaitable, awaitable_overloads
from mqtemplate.template.delays import ChangeableOutbox, PendingVerbs, check_count
from mqtemplate.template.options import (
    QUEUE_OPTIONS,
    SEND_OPTIONS,
    MessageQueueSelector,
    Send,
    SendOptions,
    hash_key_text,
    select_queue_by_hash,
    shows_send_options,
    unknown_option,
)
from mqtemplate.template.outbound import NO_EXTRAS, Extras, MessageFactory, read_options
from mqtemplate.template.receiving import LitePullConsumer, PullSettings, Receipt, ReceiveFuture, Subscription
from mqtemplate.template.spring_names import SpringNames
from mqtemplate.template.transactions import TemplateTransactions
from mqtemplate.user_code import shown

T = TypeVar("T")

_NOT_GIVEN: Any = object()
_MAX_TIMEOUT_MS = 2**31 - 1  # an ``int``, as in RocketMQ: ``ClientConfig.sendMsgTimeout``


class RocketMQTemplate(SpringNames, PendingVerbs):
    """Sender of payloads of any type, at once or delayed, and receiver of messages on request.

    Threads may share it. It uses the interface `mqtemplate.broker.Broker` only: the same calls work with every broker.
    The method names of rocketmq-spring work too: `mqtemplate.template.spring_names`.

    Args:
        broker: The broker to use. Its creator starts and closes it.
        converter: Converts payloads to bodies and back: bytes, text and JSON by default.
        send_message_timeout: ``"3s"``, a timedelta, or milliseconds: for a call without a timeout of its own.
        max_message_size: Largest body in bytes, if it is to be smaller than the broker's limit.
        default_destination: Destination of ``convert_and_send`` with a payload alone.
        message_queue_selector: Selects the queue for a ``hash_key``; by default as a Java client does.
        callback_executor: Runs the callbacks of asynchronous sends and requests; by default the thread that receives
            the result. The template does not shut it down.
        producer_group: Producer group whose transactions the broker checks here.
        consumer_group: Consumer group of ``receive``.
        consumer_topic: Topic of ``receive``.
        selector_type: Language of *selector_expression*.
        selector_expression: Messages that ``receive`` selects: ``*``, tags as ``a || b``, or SQL92.
        message_model: ``CLUSTERING``: each message goes to one member of the group. ``BROADCASTING``: to all members.
        consume_from_where: Start of a new consumer group.
        middlewares: Middlewares around each send, the outermost first.
        observation: Measures or traces the sends; None: nothing does.
    """

    def __init__(
        self,
        broker: Broker,
        *,
        converter: MessageConverter | None = None,
        send_message_timeout: Duration = 3_000,
        max_message_size: int | None = None,
        default_destination: str | None = None,
        message_queue_selector: MessageQueueSelector = select_queue_by_hash,
        callback_executor: Executor | None = None,
        producer_group: str | None = None,
        consumer_group: str | None = None,
        consumer_topic: str | None = None,
        selector_type: SelectorType = SelectorType.TAG,
        selector_expression: str = "*",
        message_model: MessageModel = MessageModel.CLUSTERING,
        consume_from_where: ConsumeFromWhere = ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET,
        middlewares: Iterable[object] = (),
        observation: Observation | None = None,
    ) -> None:
        self.broker = broker
        observation = Observation() if observation is None else observation
        wrappers = (middleware_sends(middlewares), observation.sends(broker.clock))
        self._sends = SendPipeline(broker, wrappers)
        self.converter: MessageConverter = JsonMessageConverter() if converter is None else converter
        self.send_message_timeout = _check_timeout(send_message_timeout, "send_message_timeout")
        self.default_destination = default_destination
        self.message_queue_selector = message_queue_selector
        self.callback_executor = callback_executor
        self._now_ms = broker.clock.now_ms
        # On a virtual clock a call takes no time, so that no result depends on the machine.
        self._monotonic_s: Callable[[], float] = (lambda: 0.0) if broker.clock.is_virtual else monotonic
        self._max_message_size = max_message_size
        self._messages = MessageFactory(self.converter, self._now_ms, max_message_size)
        self._outboxes: dict[Hashable, ChangeableOutbox] = {}
        self._background = Background(is_virtual=broker.clock.is_virtual)
        self._requests = TemplateRequests(self._sends, broker.clock, self.converter)
        self._transactions = TemplateTransactions(broker, self._sends, observation, self.converter, producer_group)
        self._subscriptions: WeakSet[Subscription[Any]] = WeakSet()
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

    def __repr__(self) -> str:
        return f"{type(self).__name__}(broker={self.broker.name!r}, converter={self.converter!r})"

    @property
    def charset(self) -> str:
        """Encoding of text that the template sends. It can be set, if the converter has ``with_charset``."""
        return str(getattr(self._messages.converter, "charset", "utf-8"))

    @charset.setter
    def charset(self, charset: str) -> None:
        with_charset = getattr(self.converter, "with_charset", None)
        if with_charset is None:
            raise ConfigurationError(
                f"{self.converter!r} writes text in one encoding only; give the template a converter that has "
                "with_charset, such as JsonMessageConverter"
            )
        self._messages = MessageFactory(with_charset(charset), self._now_ms, self._max_message_size)

    # --- sending -------------------------------------------------------------------------------

    @shows_send_options
    def sync_send(
        self,
        destination: str,
        payload: object,
        timeout: Duration | None = None,
        delay_level: int = 0,
        **options: Unpack[SendOptions],
    ) -> SendResult:
        """Send, and wait until the broker has stored the message.

        Args:
            destination: ``"topic"`` or ``"topic:tag"``.
            payload: Any type that the converter takes. A list is a batch: each item is a message of its own, all are
                stored together, in one queue and in this order, and all get the same options. An item (or the payload)
                may be a `Message`, with properties of its own. To send one JSON array pass a tuple.
            timeout: ``"3s"``, a timedelta, or milliseconds: for the whole call, retries included.
            delay_level: 0 for no delay, or a position in the broker's level table (1 = 1s … 18 = 2h by default).
            options: *delay*, *deliver_at*, *hash_key*, *keys*, *headers*, *queue*; see `SendOptions`.

        Raises:
            MessageError: The message itself cannot be sent (`DestinationError`, `ConversionError`, `DelayError`);
                a retry cannot help.
            SendTimeoutError: No answer in time; the broker may have stored the message all the same.
            SendError: The broker did not store the message; a retry may help.
        """
        extras = self._extras("sync_send", delay_level, options)
        timeout_ms = self.send_message_timeout if timeout is None else _check_timeout(timeout)
        is_batch = isinstance(payload, list)
        if is_batch or not QUEUE_OPTIONS.isdisjoint(options):
            kind = BATCH if is_batch else SEND
            return self._sends.call(  # type: ignore[no-any-return]
                self._prepared(kind, destination, payload, extras, options, timeout_ms)
            )
        return self._sends.send(self._messages.one(destination, payload, extras), None, timeout_ms)

    @shows_send_options
    def async_send(
        self,
        destination: str,
        payload: object,
        timeout: Duration | None = None,
        delay_level: int = 0,
        *,
        on_success: Callable[[SendResult], object] | None = None,
        on_error: Callable[[BaseException], object] | None = None,
        **options: Unpack[SendOptions],
    ) -> AwaitableFuture[SendResult]:
        """Send without waiting: ``result = await template.async_send(...)``. Other arguments as `sync_send`.

        Args:
            on_success: Called with the result, in the thread that receives it. An exception in it is logged.
            on_error: Called with the error of a failed send. Without it, a failure beside *on_success* is logged.

        Raises:
            MessageError: At once, for an invalid call. Errors of the broker are in the future.
        """
        try:
            call = self._call(ASYNC, "async_send", destination, payload, timeout, delay_level, options)
            future: AwaitableFuture[SendResult] = self._sends.call(call)
        except MessageError:
            raise
        except MQTemplateError as exc:
            future = AwaitableFuture()
            future.set_exception(exc)
        executor = self.callback_executor
        add_callbacks(future, on_success, on_error, kind="send", destination=destination, executor=executor)
        return future

    @shows_send_options
    def send_one_way(
        self, destination: str, payload: object, *, delay_level: int = 0, **options: Unpack[SendOptions]
    ) -> None:
        """Send without an answer from the broker: the fastest way over a network, and messages may be lost.

        Arguments as `sync_send`. The messages of a list are sent one by one; *hash_key* or *queue* keeps them in one
        queue.
        """
        call = self._call(ONE_WAY, "send_one_way", destination, payload, None, delay_level, options)
        if len(call.messages) == 1:
            self._sends.call(call)
            return
        for message in call.messages:
            self._sends.call(call.replace(messages=[message]))

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
        """Send a payload with headers. Without a destination, the payload goes to the default destination.

        Args:
            post_processor: Gets the finished message and returns the message to send, the same or another one.
        """
        if payload is _NOT_GIVEN:
            destination, payload = self._default_destination(), destination
        if post_processor is None:
            return self.sync_send(destination, payload, headers=headers)
        if isinstance(payload, list):
            raise MessageError("a post_processor takes one message, got a list; send the batch with sync_send")
        extras = self._extras("sync_send", 0, {"headers": headers})
        message = post_processor(self._messages.one(destination, payload, extras))
        if not isinstance(message, Message):
            raise MessageError(f"the post_processor must return a Message, it returned {type(message).__name__}")
        return self.sync_send(destination, message)

    async_convert_and_send = awaitable_overloads(convert_and_send)

    # --- requests ------------------------------------------------------------------------------

    @shows_send_options
    def send_and_receive(
        self,
        destination: str,
        payload: object,
        reply_type: type[T],
        timeout: Duration | None = None,
        delay_level: int = 0,
        **options: Unpack[SendOptions],
    ) -> T:
        """Send a request, and wait for the reply: the value that a listener of the topic returned.

        Args:
            reply_type: Type of the reply; `MessageExt` for the whole message.
            timeout: ``"3s"``, a timedelta, or milliseconds: until the reply must arrive, a delay included.

        Other arguments as `sync_send`.

        Raises:
            RequestTimeoutError: No reply arrived in time.
            ConversionError: The reply cannot be converted to *reply_type*; if no body can, nothing was sent.
            EventLoopBlockedError: The call is in a coroutine on the event loop of ``async def`` handlers.
            MessageError, SendError: As `sync_send`.
        """
        refuse_on_handler_loop("send_and_receive", "await template.async_send_and_receive(...)")
        return self.async_send_and_receive(destination, payload, reply_type, timeout, delay_level, **options).result()

    @shows_send_options
    def async_send_and_receive(
        self,
        destination: str,
        payload: object,
        reply_type: type[T],
        timeout: Duration | None = None,
        delay_level: int = 0,
        *,
        on_success: Callable[[T], object] | None = None,
        on_error: Callable[[BaseException], object] | None = None,
        **options: Unpack[SendOptions],
    ) -> AwaitableFuture[T]:
        """Send a request without waiting: ``reply = await template.async_send_and_receive(...)``.

        Other arguments as `send_and_receive`.

        Args:
            on_success: Called with the reply, in the thread that receives it. An exception in it is logged.
            on_error: Called with the error of a failed request. Without it, a failure beside *on_success* is logged.

        Raises:
            MessageError: At once, for an invalid call.
        """
        if isinstance(payload, list):
            raise MessageError("a request is one message, got a list; pass a tuple to send one JSON array")
        verb = "async_send_and_receive"
        call = self._call(REQUEST, verb, destination, payload, timeout, delay_level, options)
        answer = self._requests.send(call, reply_type)
        executor = self.callback_executor
        add_callbacks(answer, on_success, on_error, kind="request", destination=destination, executor=executor)
        return answer

    # --- transactions --------------------------------------------------------------------------

    def add_transaction_listener(self, listener: object) -> None:
        """Register an object of a class marked ``@transaction_listener`` for its transactions.

        An application does this for the classes that it is given.

        Raises:
            ListenerError: It is not a transaction listener, or its destination has a listener already.
            ConfigurationError: The template has no producer group.
        """
        self._transactions.add(listener)

    @shows_send_options
    def send_in_transaction(
        self,
        destination: str,
        payload: object,
        arg: object = None,
        timeout: Duration | None = None,
        delay_level: int = 0,
        *,
        cancels: str | None = None,
        **options: Unpack[SendOptions],
    ) -> TransactionSendResult:
        """Send a message that is delivered if the local transaction commits, and dropped if it rolls back.

        The broker first stores the message invisibly. Then the listener's ``execute_local_transaction`` runs in this
        thread, with the message and *arg*. Then the broker gets the transaction's state. If it is ``UNKNOWN``, or is
        lost on the way, the broker calls ``check_local_transaction`` later. An exception in the listener is logged and
        counts as ``UNKNOWN``.

        A delay counts from the commit. The other arguments, and the errors before the broker has the message, are those
        of `sync_send`; a list is refused.

        Args:
            cancels: Handle of a pending message. The commit cancels it, and delivers this message only if it was
                pending until then: both in one step of the broker. A rollback leaves it as it is.

        Returns:
            The result with ``local_transaction_state``. The state is ``ROLLBACK``, without a call of the listener, if
            the broker cannot guarantee that the message is stored (`SendResult.send_status`).
        """
        if isinstance(payload, list):
            raise MessageError("a transaction has one message, got a list; pass a tuple to send one JSON array")
        verb = "send_in_transaction"
        call = self._call(HALF, verb, destination, payload, timeout, delay_level, options)
        if cancels is not None:
            call.messages[0].properties[Property.CANCELS] = property_text("cancels", cancels)
        return self._transactions.send(call, destination, arg)

    async_send_in_transaction = awaitable(send_in_transaction)
    """The same in another thread: returns a future that threads and coroutines can wait for."""

    # --- receiving -----------------------------------------------------------------------------

    def receive(self, target_type: type[T], max_count: int = 32, timeout: Duration = 3_000) -> list[T]:
        """Return up to *max_count* messages of the consumer group; wait up to *timeout* for the first.

        Delivery is at least once: the next call, or `close`, commits the messages of this one. If the program ends
        without either, the group receives them again. See `mqtemplate.template.receiving`.

        Args:
            target_type: Type of each payload; `MessageExt` for the whole message. A body that cannot be converted goes
                to the group's dead-letter topic.

        Raises:
            ConversionError: No body can become *target_type*; no message was taken.
            ConfigurationError: The template has no consumer group or no topic.
        """
        return self._pull_consumer(max_count).receive(target_type, max_count, _check_wait(timeout))

    def async_receive(
        self, target_type: type[T], max_count: int = 32, timeout: Duration = 3_000
    ) -> AwaitableFuture[list[T]]:
        """Do `receive` without blocking: ``orders = await template.async_receive(Order)``.

        If the task that awaits it is cancelled, no message is lost: the next call receives them again.
        """
        pull, wait_ms, receipt = self._pull_consumer(max_count), _check_wait(timeout), Receipt()
        future: AwaitableFuture[list[T]] = ReceiveFuture(lambda: pull.abandon(receipt))
        return self._background.run(lambda: pull.receive(target_type, max_count, wait_ms, receipt), future)

    def _pull_consumer(self, max_count: int) -> LitePullConsumer:
        if self._pull is None:
            raise ConfigurationError(
                "receive needs a consumer group and a topic: give the template consumer_group and consumer_topic, "
                "in application.yml rocketmq.pull-consumer.group and rocketmq.pull-consumer.topic"
            )
        check_count(max_count)
        return self._pull

    def subscribe(
        self,
        topic: str,
        target_type: type[T],
        consumer_group: str,
        *,
        selector_type: SelectorType = SelectorType.TAG,
        selector_expression: str = "*",
        message_model: MessageModel = MessageModel.CLUSTERING,
        consume_from_where: ConsumeFromWhere = ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET,
    ) -> Subscription[T]:
        """Return the messages of a group, for ``async with`` and ``async for``.

        A message is committed when the loop takes the next one, or ``async with`` ends without an error. See
        `Subscription`.

        Args:
            target_type: Type of each payload; `MessageExt` for the whole message.
            selector_expression: Messages to select: ``*``, tags as ``a || b``, or SQL92.
            consume_from_where: Start of a new group.

        Raises:
            ConversionError: No body can become *target_type*.
            SelectorError: *selector_expression* is invalid.
            DestinationError: *topic* is not a legal name.
        """
        settings = PullSettings(
            group=consumer_group,
            topic=topic,
            selector_type=selector_type,
            selector_expression=selector_expression,
            message_model=message_model,
            consume_from_where=consume_from_where,
        )
        settings.spec()  # an invalid call raises here, not in the loop
        subscription = Subscription(
            self.broker, settings, target_type, self.converter, on_close=self._subscriptions.discard
        )
        self._subscriptions.add(subscription)
        return subscription

    def close(self) -> None:
        """Commit what was received, leave all consumer groups, and answer no more transaction checks.

        The broker stays open: its creator closes it.
        """
        self._transactions.close()
        for subscription in tuple(self._subscriptions):
            subscription.close()
        if self._pull is not None:
            self._pull.close()
        self._background.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # --- preparation, which the verbs share ----------------------------------------------------

    def _extras(self, verb: str, delay_level: int, options: SendOptions) -> Extras:
        """Return the properties and the flag that the options of a call set."""
        if not options and not delay_level:
            return NO_EXTRAS
        if not options.keys() <= SEND_OPTIONS:
            raise unknown_option(getattr(RocketMQTemplate, verb), options, SEND_OPTIONS)
        return read_options(delay_level, options, self._now_ms)

    def _call(
        self,
        kind: SendKind,
        verb: str,
        destination: str,
        payload: object,
        timeout: Duration | None,
        delay_level: int,
        options: SendOptions,
    ) -> SendCall:
        """Return one call as a value."""
        extras = self._extras(verb, delay_level, options)
        timeout_ms = self.send_message_timeout if timeout is None else _check_timeout(timeout)
        return self._prepared(kind, destination, payload, extras, options, timeout_ms)

    def _prepared(
        self, kind: SendKind, destination: str, payload: object, extras: Extras, options: SendOptions, timeout_ms: int
    ) -> SendCall:
        """Return the call with its messages, their queue, and the timeout that is left after finding both."""
        started = self._monotonic_s()
        if isinstance(payload, list):
            messages = self._messages.batch(destination, payload, extras)
        else:
            messages = [self._messages.one(destination, payload, extras)]
        queue = self._selected_queue(messages, options) if options else None
        left_ms = timeout_ms - int((self._monotonic_s() - started) * 1_000)
        if left_ms <= 0:
            raise SendTimeoutError(
                f"the timeout of {format_ms(timeout_ms)} was over before the message reached the broker; "
                "nothing was sent"
            )
        return SendCall(kind, messages, queue, left_ms, self.broker.clock)

    def _queued(self, sends: Sequence[Send]) -> list[QueuedMessage]:
        found: list[QueuedMessage] = []
        for each in sends:
            if not isinstance(each, Send):
                raise MessageError(f"the messages must be Send objects, got {type(each).__name__} {shown(each)}")
            if isinstance(each.payload, list):
                raise MessageError("a Send here is one message, got a list; give one Send for each item")
            extras = read_options(each.delay_level, each.options, self._now_ms)
            if Property.PENDING_KEY in extras.properties:
                raise MessageError("a Send that is stored together with a change has no pending_key; remove it")
            message = self._messages.one(each.destination, each.payload, extras)
            found.append((message, self._selected_queue([message], each.options)))
        return found

    def _selected_queue(self, messages: Sequence[Message], options: SendOptions) -> MessageQueue | None:
        """Return the queue that the caller chose; None if the broker selects it. A key may select another one later."""
        hash_key, queue, message = options.get("hash_key"), options.get("queue"), messages[0]
        if hash_key is None:
            if queue is not None:
                _check_queue(queue)
            if queue is not None and queue.topic != message.topic:
                raise DestinationError(
                    f"the queue belongs to topic {queue.topic!r}, the destination to topic {message.topic!r}"
                )
            return queue
        if queue is not None:
            raise MessageError("hash_key and queue both choose the queue; pass one of them")
        key = hash_key_text(hash_key)
        for each in messages:
            each.properties[Property.SHARDING_KEY] = key

        def select() -> MessageQueue:
            return self.message_queue_selector(self.broker.queues(message.topic), message, key)

        return SelectedQueue(select)

    def _default_destination(self) -> str:
        if self.default_destination is None:
            raise DestinationError(
                "convert_and_send with a payload alone needs a default: give the template default_destination, "
                "or call convert_and_send(destination, payload)"
            )
        return self.default_destination


def _check_queue(queue: object) -> None:
    if not isinstance(queue, MessageQueue):
        raise MessageError(f"queue must be a MessageQueue, got {type(queue).__name__} {shown(queue)}")
    if type(queue.queue_id) is not int or not 0 <= queue.queue_id < 2**31:
        raise MessageError(f"queue_id of a MessageQueue must be 0 or more, got {shown(queue.queue_id)}")


def _check_wait(timeout: Duration) -> int:
    return 0 if timeout == 0 else _check_timeout(timeout)


def _check_timeout(timeout: Duration, name: str = "timeout") -> int:
    if type(timeout) is int and SHORT_TIMEOUT_MS <= timeout <= _MAX_TIMEOUT_MS:
        return timeout
    timeout_ms = timeout_option_ms(name, timeout, MessageError)
    if timeout_ms < 1:
        raise MessageError(f"{name} must be 1 ms or longer, got {shown(timeout)}")
    if timeout_ms > _MAX_TIMEOUT_MS:
        raise MessageError(f"{name} must be at most {format_ms(_MAX_TIMEOUT_MS)}, got {shown(timeout)}")
    return timeout_ms
