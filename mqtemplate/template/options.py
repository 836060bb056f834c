"""Destinations ``topic`` and ``topic:tag``, and the options that every sending verb has."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias, TypedDict, TypeVar, Unpack, cast

from mqtemplate.durations import Duration, with_unit
from mqtemplate.errors import DestinationError, MessageError
from mqtemplate.hashes import queue_number
from mqtemplate.message import Message, MessageQueue, Property, property_text
from mqtemplate.pending import OnPending
from mqtemplate.selectors.tags import tag_problem
from mqtemplate.topics import check_topic
from mqtemplate.user_code import did_you_mean, shown

_Verb = TypeVar("_Verb", bound=Callable[..., object])

MessageQueueSelector: TypeAlias = Callable[[Sequence[MessageQueue], Message, str], MessageQueue]
"""Selects the queue for a message with a hash key: (queues of the topic, message, hash key) -> one of the queues."""


class Destination(NamedTuple):
    """A parsed destination.

    Attributes:
        properties: Message properties that the tag sets. Messages share them: copy before a change.
    """

    topic: str
    tag: str | None
    properties: dict[str, str]


def parse_destination(destination: str) -> Destination:
    """Parse ``"topic"`` or ``"topic:tag"``; the first colon separates them, so a tag may contain colons.

    Raises:
        DestinationError: It is not text, a part is empty, or a part is not a legal name.
    """
    if not isinstance(destination, str):
        raise _not_text(destination)
    return _parse(destination)


@lru_cache(maxsize=4_096)
def _parse(destination: str) -> Destination:
    topic, colon, tag = destination.partition(":")
    if not topic:
        raise DestinationError(f"destination {shown(destination)} has no topic; give 'topic' or 'topic:tag'")
    check_topic(topic)
    if not colon:
        return Destination(topic, None, {})
    _check_tag(destination, topic, tag)
    return Destination(topic, tag, {Property.TAGS: tag})


def _check_tag(destination: str, topic: str, tag: str) -> None:
    """Refuse a tag that no selector expression can name: no consumer could select the message."""
    if not tag:
        raise DestinationError(f"destination {destination!r} has an empty tag; without a tag write {topic!r}")
    if (problem := tag_problem(tag)) is not None:
        raise DestinationError(f"destination {shown(destination)}: {problem}")


def _not_text(destination: object) -> DestinationError:
    return DestinationError(
        f"the destination must be text, 'topic' or 'topic:tag', got {type(destination).__name__}; "
        "the order of arguments is (destination, payload, timeout, delay_level)"
    )


def hash_key_text(hash_key: object) -> str:
    """Return a hash key as text, as ``keys`` does: ``7`` is ``"7"``.

    Raises:
        MessageError: It is empty, or not one value.
    """
    text = property_text("hash_key", hash_key)
    if not text:
        raise MessageError("hash_key is empty, which would send all such messages to one queue; pass None for no order")
    return text


def select_queue_by_hash(queues: Sequence[MessageQueue], message: Message, hash_key: str) -> MessageQueue:
    """Return the queue that a Java client selects for this key; see `queue_number`."""
    return queues[queue_number(hash_key, len(queues))]


# --- options ----------------------------------------------------------------------------------------


class SendOptions(TypedDict, total=False):
    """Options of the sending verbs, by name. Each has one meaning on every verb, for one message and for a list."""

    delay: Duration | None
    """Time to wait before the delivery, of any length: ``"3h"`` or a timedelta. The broker's clock counts it. A number
    is seconds, with a `UnitWarning`."""

    deliver_at: datetime | int | None
    """Time of the delivery: an aware datetime, or epoch milliseconds."""

    hash_key: str | int | None
    """Messages with equal keys go to one queue, in the order in which they were sent. It becomes the property
    ``__SHARDINGKEY``, which topics of RocketMQ's type FIFO require."""

    keys: str | int | Sequence[str]
    """Business keys by which the message can be found. A text is one key, or several separated by blanks; a number is
    one key."""

    headers: Mapping[str, object] | None
    """``KEYS``, ``TAGS``, ``FLAG``, ``WAIT_STORE_MSG_OK``, ``DELAY`` and ``TIMER_…``, with or without the prefix
    ``rocketmq_``. Any other name becomes a user property of the message."""

    queue: MessageQueue | None
    """A queue of the topic. Without it, and without *hash_key*, the queues take turns."""

    pending_key: str | int | None
    """With a delay: at most one message of the topic is pending under this key. A number is its text."""

    on_pending: OnPending | str | None
    """What happens if a message is pending under *pending_key*: ``"replace"`` (the default), ``"keep"``,
    ``"postpone"`` or ``"refuse"``; see `OnPending`."""

    no_later_than: Duration | None
    """With ``on_pending="postpone"``: the delivery is at most this long after the first send: ``"2h"`` or a
    timedelta."""

    on_pending_strict: bool
    """Refuse the send if the broker does not decide about *pending_key* in one step: a RocketMQ cluster needs two."""


SEND_OPTIONS = frozenset(SendOptions.__annotations__)
PENDING_KEY_OPTIONS = frozenset({"pending_key", "on_pending", "no_later_than", "on_pending_strict"})
QUEUE_OPTIONS = frozenset({"hash_key", "queue"})
"""Options that select the queue."""


def shows_send_options(verb: _Verb) -> _Verb:
    """Name the options of `SendOptions` in the signature of a verb, in place of its ``**options``.

    ``help()``, IPython and notebooks read this signature. Editors with a type checker read the annotation.
    """
    signature = inspect.signature(verb)
    own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    cast("Any", verb).__signature__ = signature.replace(parameters=[*own, *_OPTION_PARAMETERS])
    return verb


def _option_parameters() -> Iterator[inspect.Parameter]:
    for name, kind in SendOptions.__annotations__.items():
        annotation = getattr(kind, "__forward_arg__", kind)
        default = None if "None" in str(annotation) else False if "bool" in str(annotation) else ()
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


_OPTION_PARAMETERS = tuple(_option_parameters())


class Send:
    """Message to be sent later, by who gets this object. Arguments as `RocketMQTemplate.sync_send`.

    A handler returns it, or a list of them: it is sent after the handler has succeeded and before the message of the
    handler is committed. Delivery is at least once: if the process dies between the two, the handler runs again and so
    does the send. `RocketMQTemplate.cancel` and `RocketMQTemplate.reschedule` take them as ``then``, and
    `RocketMQTemplate.send_if` sends them under a condition.

    Attributes:
        options: Options of the send by name.
    """

    __slots__ = ("delay_level", "destination", "options", "payload")

    @shows_send_options
    def __init__(self, destination: str, payload: object, delay_level: int = 0, **options: Unpack[SendOptions]) -> None:
        check_options("Send", options)
        self.destination = destination
        self.payload = payload
        self.delay_level = delay_level
        self.options = with_units(options)

    def __repr__(self) -> str:
        return f"Send({self.destination!r}, {self.payload!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Send) and self._fields() == other._fields()

    __hash__ = None  # type: ignore[assignment]  # payloads need not be hashable

    def _fields(self) -> tuple[object, ...]:
        return self.destination, self.payload, self.delay_level, self.options


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raise `TypeError` if one of the options of *name* is not an option of the sending verbs."""
    unknown = options.keys() - SEND_OPTIONS
    if unknown:
        known = ", ".join(sorted(SEND_OPTIONS))
        raise TypeError(f"{name} has no option {min(unknown)!r}; it has delay_level, {known}")


def with_units(options: SendOptions) -> SendOptions:
    """Return options for a later send: a delay without a unit draws its warning where it is written."""
    if "delay" in options:
        options["delay"] = with_unit("delay", options["delay"])
    return options


def unknown_option(verb: Callable[..., object], given: Iterable[str], known: Iterable[str]) -> TypeError:
    """Return the error for a call with an option that the verb does not have; it names the nearest known option.

    Args:
        known: Names that the verb takes as ``**options``; the names of its own parameters are added.
    """
    parameters = inspect.signature(verb).parameters.values()
    known = sorted(known)
    other = ("self", *known)
    names = [each.name for each in parameters if each.name not in other and each.kind is not each.VAR_KEYWORD]
    names += known
    name = min(set(given) - set(names))
    hint = did_you_mean(name, names, f"it has {', '.join(names)}")
    return TypeError(f"{verb.__name__}() has no option {name!r}; {hint}")
