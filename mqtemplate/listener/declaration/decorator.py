"""``@message_listener`` and its attributes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Annotated, Any, TypedDict, TypeVar, Unpack

from mqtemplate.broker import ConsumeFromWhere, MessageModel
from mqtemplate.callables import load_name
from mqtemplate.calls.middlewares import read_middlewares
from mqtemplate.durations import Duration
from mqtemplate.listener.declaration.attributes import (
    Attribute,
    ListenerDecorator,
    ListenerSpec,
    as_written,
    choice,
    duration,
    exceptions,
    flag,
    number,
    text,
)
from mqtemplate.listener.declaration.settings import (
    SCHEDULE_FORMS,
    Backoff,
    ConsumeMode,
    MessageRequestMode,
    read_schedule,
)
from mqtemplate.listener.declaration.tags import has_tag_methods
from mqtemplate.selectors.tags import SelectorType

LISTENER_ATTRIBUTE = "__mqtemplate_listener__"
"""Attribute of a decorated object that holds its tuple of `ListenerSpec`."""

SPARK_LISTENER_ATTRIBUTE = "__mqtemplate_spark_listener__"
"""The same of ``@spark_listener``. It is here so that applications without Spark can look for it."""

ExceptionTypes = type[BaseException] | str | Sequence[type[BaseException] | str]
"""One class of exceptions or several, or their dotted names."""

_Target = TypeVar("_Target", bound=Callable[..., object])


def _epoch_ms(value: int | str) -> int | None:
    """Return epoch milliseconds; None for an empty text. RocketMQ's form is local time: ``yyyyMMddHHmmss``."""
    digits = str(value)
    if len(digits) == len("yyyyMMddHHmmss"):
        return int(datetime.strptime(digits, "%Y%m%d%H%M%S").astimezone().timestamp()) * 1_000
    return int(digits) if digits else None


_LIMIT = "a whole number from 1 to 100000, or None"
_RATE = "a number of messages and a time, such as '10/s', '600/m' or '100/h', or a number a second"
_SECONDS = {"s": 1, "m": 60, "h": 3_600}


def read_limit(value: Any) -> int | None:
    """Return a limit; None for None and an empty text.

    Raises:
        ValueError: It is not a whole number from 1 to 100,000.
    """
    if value in (None, ""):
        return None
    from mqtemplate.key_limits import MAX_IN_FLIGHT_PER_KEY

    limit: int = number(None, 1, MAX_IN_FLIGHT_PER_KEY).read(value)
    return limit


def read_rate(value: Any) -> float | None:
    """Return a number a second; None for None and an empty text.

    Raises:
        ValueError: It is not a number above 0 with a time, or is above 10,000,000 a second.
    """
    if value in (None, ""):
        return None
    if isinstance(value, bool):
        raise ValueError(value)
    from mqtemplate.key_limits import MAX_RATE

    count, _, unit = str(value).partition("/")
    rate = float(count) / _SECONDS[unit.strip() or "s"]
    if not 0 < rate <= MAX_RATE:
        raise ValueError(value)
    return rate


_AWAIT_TERMINATION = "${rocketmq.consumer.await-termination-millis-when-shutdown:30000}"
_INVISIBLE = "${mqtemplate.listener.invisible-duration:1m}"
_MIDDLEWARES = "objects, classes, or dotted names of these, such as 'shop.audit.Audit'"
_TIMESTAMP = Attribute("", "epoch milliseconds or yyyyMMddHHmmss (local time)", _epoch_ms)


class ListenerAttributes(TypedDict, total=False):
    """Attributes of ``@message_listener``: type, default, allowed values and meaning.

    Each text may hold placeholders ``${key:default}``. Each number or choice may be given as such a text. They are
    replaced when the application starts. Source: rocketmq-spring, ``@RocketMQMessageListener``.
    """

    selector_type: Annotated[SelectorType | str, choice(SelectorType.TAG)]
    """``TAG``, or ``SQL92``: *selector_expression* is a condition over the properties of a message."""
    selector_expression: Annotated[str, text("*")]
    """Tags joined by two bars, ``*`` for all messages; or an SQL92 expression."""
    message_model: Annotated[MessageModel | str, choice(MessageModel.CLUSTERING)]
    """``CLUSTERING``: the members of the group share the messages. ``BROADCASTING``: each member gets all messages,
    and messages that fail are not retried."""
    instance_name: Annotated[str, text("DEFAULT")]
    """In a broadcasting group, the member whose progress this listener continues."""
    consume_from_where: Annotated[ConsumeFromWhere | str, choice(ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET)]
    """Where a group starts in a queue that it never read."""
    consume_timestamp: Annotated[int | str, _TIMESTAMP]
    """Epoch milliseconds, or ``yyyyMMddHHmmss`` of the local time; by default half an hour ago."""

    pull_batch_size: Annotated[int | str, number(32, 1, 1_024)]
    """Maximum number of messages in one fetch."""
    pull_interval: Annotated[Duration, duration(0, 0, 65_535)]
    """Milliseconds, or a duration such as ``"1s"``, between two fetches."""

    consume_mode: Annotated[ConsumeMode | str, choice(ConsumeMode.CONCURRENTLY)]
    """``CONCURRENTLY``, or ``ORDERLY``: one message of each queue after the other."""
    request_mode: Annotated[MessageRequestMode | str, choice(MessageRequestMode.PULL)]
    """``PULL``, or ``POP``: each message is acknowledged by itself, more members than queues help, and a slow handler
    keeps only its own message."""
    invisible_duration: Annotated[Duration, duration(_INVISIBLE, 1_000, 12 * 3_600_000)]
    """Milliseconds, or a duration such as ``"1m"``: by POP, the time for which other members do not see a message. It
    is renewed while the message waits for a handler or is handled; `MessageExt.extend` requests more."""
    fair_by: Annotated[str, text("")]
    """Name of a property, such as ``tenant``, or ``hash_key``: its values take turns, so that a key with many messages
    does not keep the handlers from those of the others. Not with ``ORDERLY``."""
    max_in_flight_per_key: Annotated[int | str | None, Attribute(None, _LIMIT, read_limit)]
    """Most messages of one key of *fair_by* that are handled at the same time; None: no limit. By ``PULL`` in this
    member, by ``POP`` in all members of the group."""
    max_rate_per_key: Annotated[str | float | None, Attribute(None, _RATE, read_rate)]
    """Most messages of one key of *fair_by* whose handling begins in a time: ``"10/s"``, ``"600/m"``, ``"100/h"``, or a
    number a second; None: no limit. It counts as *max_in_flight_per_key* does."""
    consume_thread_number: Annotated[int | str, number(20, 1, 1_000)]
    """Maximum number of handlers that run at the same time."""
    consume_thread_max: Annotated[int | str, number(64, 1, 1_000)]
    """Maximum number of threads. Above *consume_thread_number*, a thread starts only to replace a hanging one."""
    consume_timeout: Annotated[Duration, duration(15, 1, 60 * 24 * 7, unit_ms=60_000)]
    """Minutes, or a duration such as ``"90s"``, after which a handler counts as hanging. Its concurrent messages
    are sent back to the broker."""
    consume_message_batch_max_size: Annotated[int | str, number(1, 1, 1_024)]
    """Maximum number of messages in one call of a batch handler (``list[T]``); 1 means *pull_batch_size*. Any other
    handler gets one message."""
    reply_timeout: Annotated[Duration, duration(3_000, 1)]
    """Milliseconds, or a duration, for sending one reply. A handler of single messages that returns a value
    replies with it to a message that was sent by ``send_and_receive``."""
    batch: Annotated[bool | None, as_written(None)]
    """True: a ``list[...]`` payload means several messages. False: it means one message with a JSON list as its body.
    None: several messages, if the annotation names the type of the items."""

    middlewares: Annotated[Sequence[object] | str, Attribute((), _MIDDLEWARES, read_middlewares)]
    """Middlewares around each call of the handler, the outermost first, inside of the shared middlewares: objects,
    classes that the application builds, or dotted names of these."""

    retry: Annotated[Sequence[Duration] | Backoff | str | None, Attribute(None, SCHEDULE_FORMS, read_schedule, 1_000)]
    """Delays before the retries: ``["5s", "1m", "1h"]``, or a `Backoff`. After the last retry the message goes to the
    dead letter topic. None: ``mqtemplate.listener.retry``, and without it 10 s, 30 s, 1 m, … 2 h as in RocketMQ."""
    retry_for: Annotated[ExceptionTypes, exceptions()]
    """Only these exceptions are retried; any other goes to the dead letter topic at once. Empty: all are retried."""
    not_retry_for: Annotated[ExceptionTypes, exceptions()]
    """These exceptions are not retried, and go to the dead letter topic at once."""
    max_reconsume_times: Annotated[int | str, number(-1, -1, 10_000)]
    """Number of retries before the dead letter topic; -1 means the number in *retry*, without it 16, or unlimited if
    ``ORDERLY``. With more retries than delays in *retry*, the last delay repeats."""
    delay_level_when_next_consume: Annotated[int | str, number(0, -1, 1_000)]
    """Delay level of a retry; 0: the delays of *retry*, -1: no retry but the dead letter topic."""
    suspend_current_queue_time_millis: Annotated[Duration, duration(1_000, 10, 30_000)]
    """Milliseconds, or a duration, before an ``ORDERLY`` queue is retried after a failure, unless *retry* says
    otherwise."""

    error_handler: Annotated[Callable[..., object] | str | None, as_written(None)]
    """Function ``(error, message)``, or the name of a method of the listener class, that is called when the handler
    raised or its result could not be sent; a batch handler's gets the list of messages. It is inside of middlewares.
    It may return ``ConsumeStatus.CONSUME_SUCCESS`` (the message is done) or ``RECONSUME_LATER``, raise `RetryLater`,
    `DeadLetter` or another error, or return None: as if it were not there."""
    converter: Annotated[object, Attribute(None, "a converter, or a class of converters", read_converter)]
    """Converter of this listener's bodies and replies: an object, its class (built by the application), or the dotted
    name of one. None: the converter of the application."""
    content_type: Annotated[str, text("")]
    """Content type of bodies that name none, and of replies."""
    charset: Annotated[str, text("")]
    """Encoding of text in bodies and replies; empty for the encoding of the converter, UTF-8."""

    id: Annotated[str, text("")]
    """Name in logs and errors; by default the name of the class or function."""
    enabled: Annotated[bool | str, flag(True)]
    """False: the listener is left out."""
    auto_startup: Annotated[bool | str, flag(True)]
    """False: the application must call ``start()`` of the listener's container."""
    await_termination_millis_when_shutdown: Annotated[Duration, duration(_AWAIT_TERMINATION, 0, 3_600_000)]
    """Milliseconds, or a duration, for which a stop waits for running handlers and fetched messages. The times of
    several listeners pass together."""

    broker: Annotated[str, text("")]
    """Name of a further template of the application (``rocketmq.templates.<name>``): the listener reads from its
    broker."""
    name_server: Annotated[str, text("${rocketmq.name-server:}")]
    """Address of the cluster to read from, as ``rocketmq.name-server``; by default the cluster of the application."""

    # For a cluster that the listener itself names. On the application's cluster they must equal its values, and the
    # embedded broker refuses them with a reason.
    access_key: Annotated[str, text("${rocketmq.consumer.access-key:}")]
    secret_key: Annotated[str, text("${rocketmq.consumer.secret-key:}")]
    tls_enable: Annotated[bool | str, flag("false")]
    namespace: Annotated[str, text("")]
    namespace_v2: Annotated[str, text("")]

    enable_msg_trace: Annotated[bool | str, flag("${rocketmq.consumer.enable-msg-trace:false}")]
    """True: write a record into the trace topic before and after each call of the handler."""
    customized_trace_topic: Annotated[str, text("${rocketmq.consumer.customized-trace-topic:}")]
    """Topic of the traces; by default RocketMQ's own."""
    access_channel: Annotated[str, text("${rocketmq.access-channel:}")]
    """``LOCAL``, or ``CLOUD`` for a cluster of a cloud provider: its traces go to a topic for each region."""


MESSAGE_LISTENER = ListenerDecorator(
    "@message_listener",
    LISTENER_ATTRIBUTE,
    "on_message",
    "def on_message(self, message: str) -> None: ...",
    callable,
    ListenerAttributes,
    has_tag_methods,
)


def message_listener(
    topic: str | Sequence[str], consumer_group: str | None = None, **attributes: Unpack[ListenerAttributes]
) -> Callable[[_Target], _Target]:
    """Make a function, or a class with ``on_message``, a listener for messages of one or several topics.

    The object is returned unchanged: a test calls it like any other. Several decorators on one object make several
    listeners. The first parameter of the handler is the payload, converted to its annotated type.

    Args:
        attributes: See `ListenerAttributes`.

    Raises:
        ListenerError: The object cannot be a listener, or *consumer_group* is missing.
        TypeError: An attribute has an unknown name.
    """
    return MESSAGE_LISTENER.note(topic, consumer_group, attributes)


def is_itself_marked(component: object) -> bool:
    """Return True for a function, a partial or an object that a decorator marked itself, so that it is the handler."""
    return not inspect.isclass(component) and bool(listener_specs(component))


def listener_specs(target: object) -> tuple[ListenerSpec, ...]:
    """Return the specs noted on this very class or function; specs of a base class do not count."""
    return MESSAGE_LISTENER.specs(target)


def read_converter(value: Any) -> Any:
    """Return a converter, or a class of converters; a text is the dotted name of one.

    Raises:
        ValueError, AttributeError: It is neither.
    """
    if isinstance(value, str):
        value = load_name(value) if value.strip() else None
    if value is not None and not all(callable(getattr(value, name, None)) for name in ("to_body", "from_body")):
        raise ValueError(value)
    return value
