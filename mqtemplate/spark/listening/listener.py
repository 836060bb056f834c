"""``@spark_listener`` and its attributes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, TypedDict, TypeVar, Unpack

from mqtemplate.durations import ALLOWED, Duration, duration_ms, is_duration_text
from mqtemplate.errors import ListenerError
from mqtemplate.listener.declaration import attributes as declared
from mqtemplate.listener.declaration.attributes import Attribute, ListenerDecorator, ListenerSpec, Resolve
from mqtemplate.listener.declaration.decorator import SPARK_LISTENER_ATTRIBUTE
from mqtemplate.listener.declaration.resolution import resolve_group, resolve_topics
from mqtemplate.selectors.tags import tag_selector
from mqtemplate.spark.records.offsets import QueueRange

AVAILABLE_NOW = "available-now"
"""As *trigger*: handle the messages that are there at the start, in as many batches as needed, and end."""

_Target = TypeVar("_Target", bound=Callable[..., object])
_INTERVAL = re.compile(r"\d+(\.\d+)?\s*(milli)?(second|minute|hour)s?", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkBatch:
    """Description of a batch, passed to the listener with its DataFrame.

    A batch may be delivered more than once: after a failure, and after a restart between the listener's work and
    Spark's commit of the batch. Its id and its messages stay the same. So a listener that replaces the output of
    ``(query_id, batch_id)`` writes each message once.

    Attributes:
        query_id: Id of the query; it stays the same as long as the checkpoint exists.
        attempt: 1, 2, … within one run.
        ranges: Offsets of the batch. The DataFrame has fewer rows if tags are selected.
        is_replay: True if the batch was started before a restart, so its work may be done already.
        topic: Topics, joined by commas.
    """

    query_id: str
    batch_id: int
    attempt: int
    ranges: tuple[QueueRange, ...]
    is_replay: bool
    topic: str
    consumer_group: str

    def write_options(self, name: str = "") -> dict[str, str]:
        """Return the options that identify a write of this batch to a topic: a repeated batch writes its rows once.

        ``sums.write.format("mqtemplate").mode("append").options(**batch.write_options(), …).save()``

        Args:
            name: Name of the write, without spaces, if the listener has several.
        """
        return {"txnAppId": f"{self.query_id}/{name}", "txnVersion": str(self.batch_id)}

    @property
    def message_count(self) -> int:
        """Number of messages in the ranges, before tags are selected."""
        return sum(map(len, self.ranges))


def _one_of(*words: str) -> Attribute:
    """Return an attribute that takes one of these words; the first is the default."""
    known = {word: word for word in words}
    allowed = ", ".join(map(repr, words[:-1])) + f" or {words[-1]!r}"
    return Attribute(words[0], allowed, known.__getitem__)


def _trigger(value: timedelta | str) -> timedelta | str:
    if isinstance(value, timedelta) or value == AVAILABLE_NOW or _INTERVAL.fullmatch(value):
        return value
    if is_duration_text(value):
        return timedelta(milliseconds=duration_ms(value))
    raise ValueError(value)


def _delay(default: str | None) -> Attribute:
    """Return an attribute that takes a duration; None is a value only if it is the default."""

    def read(value: Duration | None) -> int | None:
        return None if value is None and default is None else duration_ms(value, 1_000)

    return Attribute(default, ALLOWED, read, 1_000)


def _restarts() -> Attribute:
    """Return an attribute that takes a number of restarts, or None."""
    number = declared.number(None, 0)
    return Attribute(None, number.allowed, lambda value: None if value is None else number.read(value))


_TRIGGER = Attribute(
    timedelta(seconds=1), f"'5s', a timedelta, an interval of Spark such as '5 seconds', or {AVAILABLE_NOW!r}", _trigger
)


class SparkListenerAttributes(TypedDict, total=False):
    """Attributes of ``@spark_listener``: type, default, allowed values and meaning.

    Each text may hold placeholders ``${key:default}``, which are replaced when the container is created.
    """

    selector_expression: Annotated[str, declared.text("*")]
    """Tags joined by two bars; ``*`` for all messages."""
    payload: Annotated[type | Callable[..., object] | None, declared.as_written(None)]
    """A pydantic model or dataclass: the DataFrame gets a column ``payload`` with the JSON body as a struct. Or a
    function from the column ``body`` to that column, such as ``lambda body: from_avro(body, schema)``."""
    bad_records: Annotated[str, _one_of("null", "fail", "dlq")]
    """``payload`` of a body that cannot be read: ``null`` (its fields are null), ``fail`` the batch, or send only such
    rows to the dead-letter topic (``dlq``)."""
    trigger: Annotated[timedelta | str, _TRIGGER]
    """Time between two batches: ``"5s"``, a timedelta, Spark's ``"5 seconds"``, or `AVAILABLE_NOW`."""
    max_offsets_per_trigger: Annotated[int | str, declared.number(100_000, 1)]
    """Maximum number of messages in a batch, before tags are selected."""
    min_partitions: Annotated[int | None, declared.as_written(None)]
    """Minimum number of tasks for a batch; None: its size decides."""
    include_properties: Annotated[bool | str, declared.flag(True)]
    """False leaves out the columns ``properties`` and ``msgId``, which take most time to build."""
    fail_on_data_loss: Annotated[bool | str, declared.flag(True)]
    """True: the query ends if messages that it should read are gone. False: it continues after them."""
    max_attempts: Annotated[int | str, declared.number(3, 1)]
    """Number of calls for one batch before *on_failure*."""
    retry_delay: Annotated[Duration, _delay("1s")]
    """Time before the second attempt, ``"1s"`` or a timedelta; doubled before each further one."""
    on_failure: Annotated[str, _one_of("stop", "redeliver", "dlq")]
    """After the last attempt: ``stop`` ends the query, and a restart handles the same batch again. ``redeliver`` sends
    the rows through the retry topic and goes on. ``dlq`` sends them to the dead-letter topic and goes on."""
    max_redeliveries: Annotated[int | str, declared.number(16, 0)]
    """Retries of a row that was sent back, before it goes to the dead-letter topic."""
    redelivery_delay: Annotated[Duration | None, _delay(None)]
    """Delay of such a retry; None: the broker's retry delays, from 10 s to 2 h."""
    max_restarts: Annotated[int | str | None, _restarts()]
    """Restarts of a query that ended with an error, without a successful batch in between. None: as many as it takes
    while the broker or the cluster cannot be reached, and none after another error."""
    restart_delay: Annotated[Duration, _delay("10s")]
    """Time before the first restart, ``"10s"`` or a timedelta; doubled before each further one, up to 5 minutes."""
    checkpoint: Annotated[str | None, declared.as_written(None)]
    """Folder for the progress of the query; by default one named by group and topics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkListenerSettings:
    """Resolved attributes of a Spark listener. The delays are milliseconds."""

    topics: tuple[str, ...]
    consumer_group: str
    selector_expression: str
    payload: type | Callable[..., object] | None
    bad_records: str
    trigger: timedelta | str
    max_offsets_per_trigger: int
    min_partitions: int | None
    include_properties: bool
    fail_on_data_loss: bool
    max_attempts: int
    retry_delay: int
    on_failure: str
    max_redeliveries: int
    redelivery_delay: int | None
    max_restarts: int | None
    restart_delay: int
    checkpoint: str | None


_SPARK_LISTENER = ListenerDecorator(
    "@spark_listener",
    SPARK_LISTENER_ATTRIBUTE,
    "on_batch",
    "def on_batch(self, messages: DataFrame, batch: SparkBatch) -> DataFrame | None: ...",
    inspect.isroutine,
    SparkListenerAttributes,
)


def spark_listener(
    topic: str | Sequence[str], consumer_group: str | None = None, **attributes: Unpack[SparkListenerAttributes]
) -> Callable[[_Target], _Target]:
    """Make a function, or a class with ``on_batch``, a listener for batches of messages as DataFrames.

    It is called with ``(DataFrame, SparkBatch)``. It may return a DataFrame of rows that failed: only those are sent
    back. The object is returned unchanged: a test calls it like any other.

    Args:
        consumer_group: Group under which the broker shows the progress. It may have no other listener.
        attributes: See `SparkListenerAttributes`.

    Raises:
        ListenerError: The object cannot be a listener, or *consumer_group* is missing.
        TypeError: An attribute has an unknown name.
    """
    return _SPARK_LISTENER.note(topic, consumer_group, attributes)


def spark_listener_specs(target: object) -> tuple[ListenerSpec, ...]:
    """Return the specs noted on this very class or function; for another object, the specs of its class."""
    return _SPARK_LISTENER.specs(target if inspect.isclass(target) or inspect.isroutine(target) else type(target))


def resolve_spark_spec(spec: ListenerSpec, name: str, resolve: Resolve) -> SparkListenerSettings:
    """Return the resolved settings of a spec.

    Args:
        name: Name of the listener, for errors.

    Raises:
        ListenerError: The value of an attribute is not allowed.
    """
    listener = f"Spark listener {name}"
    values = _SPARK_LISTENER.read(listener, spec, resolve)
    topics, group = resolve_topics(listener, spec, resolve), resolve_group(listener, spec, resolve)
    try:
        tag_selector(values["selector_expression"])
    except ListenerError as exc:
        raise ListenerError(f"{listener}: {exc}") from exc
    return SparkListenerSettings(topics=topics, consumer_group=group, **values)


def refuse_shared_groups(spark_groups: Iterable[str], message_groups: Iterable[str]) -> None:
    """Refuse a group with a Spark listener and another listener.

    Args:
        spark_groups: Group of each Spark listener.
        message_groups: Groups of the message listeners.

    Raises:
        ListenerError: A group is in both, or twice among the first.
    """
    taken = dict.fromkeys(message_groups, "a message listener")
    for group in spark_groups:
        if group in taken:
            raise ListenerError(
                f"consumer group {group!r} has a Spark listener and {taken[group]}, which would both commit its "
                "offsets and miss messages of the other; give the Spark listener a group of its own"
            )
        taken[group] = "another Spark listener"
