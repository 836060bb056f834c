"""``@spark_listener``: it notes which messages a function wants in batches, and does nothing else."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from mqtemplate.errors import DestinationError, ListenerError, UnsupportedError
from mqtemplate.selectors.tags import TagSelector
from mqtemplate.spark.offsets import QueueRange
from mqtemplate.topics import check_topic

SPARK_LISTENER_ATTRIBUTE = "__mqtemplate_spark_listener__"
"""Where a decorated object keeps its tuple of `SparkListenerSpec`."""

AVAILABLE_NOW = "available-now"
"""As *trigger*: take what is there at the start, in as many batches as it needs, and end."""

_Target = TypeVar("_Target", bound=Callable[..., object])
_INTERVAL = re.compile(r"\d+(\.\d+)?\s*(milli)?(second|minute|hour)s?", re.IGNORECASE)
_LATER = {
    "redeliver": "giving a batch back through the retry topic",
    "dlq": "sending a batch to the dead letter topic",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkBatch:
    """What a listener is told beside its DataFrame.

    A batch may come more than once: again after a failure, and again after a restart that fell between its work and
    Spark's note of it. Batch id and content stay the same, so whoever writes "replace what this batch wrote", keyed by
    ``(query_id, batch_id)``, has each message once.

    Attributes:
        query_id: The same for the life of the checkpoint.
        attempt: 1, 2, … within one run.
        ranges: The offsets covered; the DataFrame has fewer rows where tags select.
        is_replay: The batch was begun before a restart and may have been worked on.
        topic: The topics, joined by commas.
    """

    query_id: str
    batch_id: int
    attempt: int
    ranges: tuple[QueueRange, ...]
    is_replay: bool
    topic: str
    consumer_group: str

    @property
    def message_count(self) -> int:
        """Messages covered, before tags select."""
        return sum(map(len, self.ranges))


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkListenerSpec:
    """The attributes of one ``@spark_listener``, as written; texts may hold ``${key:default}``.

    Attributes:
        topics: One or several.
        consumer_group: Under whose name the progress shows on the broker. It may have no other listener.
        selector_expression: Tags joined by two bars; ``*`` for all.
        payload: A pydantic model or dataclass: the DataFrame gets a column ``payload`` with the JSON body read into it.
        bad_records: What a body that is no JSON makes of ``payload``: ``null`` (its fields are null) or ``fail``.
        trigger: How often to look for messages: a span, ``"5 seconds"``, or `AVAILABLE_NOW`.
        max_offsets_per_trigger: Messages in a batch at most, before tags select.
        min_partitions: Cut a batch into at least so many tasks; None to let its size decide.
        include_properties: Have the columns ``properties`` and ``msgId``, which cost most to build.
        fail_on_data_loss: End the query where messages are gone that it should read; else go on behind them.
        max_attempts: How often a batch is tried before *on_failure*.
        retry_delay: Seconds before the second attempt; doubled before each further one.
        on_failure: ``stop``: the query ends, and a restart takes the same batch again.
        checkpoint: The folder for the query's progress; by default one named by group and topics.
    """

    topics: tuple[str, ...]
    consumer_group: str
    selector_expression: str = "*"
    payload: type | None = None
    bad_records: str = "null"
    trigger: timedelta | str = timedelta(seconds=1)
    max_offsets_per_trigger: int | str = 100_000
    min_partitions: int | None = None
    include_properties: bool = True
    fail_on_data_loss: bool = True
    max_attempts: int | str = 3
    retry_delay: float = 1.0
    on_failure: str = "stop"
    checkpoint: str | None = None

    def resolved(self, listener: str, resolve: Callable[[str], str]) -> SparkListenerSpec:
        """The same with placeholders filled in and everything checked.

        Args:
            listener: Its name, for messages.

        Raises:
            ListenerError: An attribute cannot be what it says.
            UnsupportedError: It asks for what is not there yet.
        """
        spec = dataclasses.replace(
            self,
            topics=tuple(name.strip() for topic in self.topics for name in resolve(topic).split(",")),
            consumer_group=resolve(self.consumer_group).strip(),
            selector_expression=resolve(self.selector_expression),
            trigger=resolve(self.trigger).strip() if isinstance(self.trigger, str) else self.trigger,
            max_offsets_per_trigger=_number(listener, "max_offsets_per_trigger", self.max_offsets_per_trigger, resolve),
            max_attempts=_number(listener, "max_attempts", self.max_attempts, resolve),
            on_failure=resolve(self.on_failure).strip(),
            checkpoint=None if self.checkpoint is None else resolve(self.checkpoint),
        )
        spec._check(listener)
        return spec

    def _check(self, listener: str) -> None:
        try:
            for name in (*self.topics, self.consumer_group):
                check_topic(name)  # the group becomes part of topic names
            TagSelector(self.selector_expression)
        except (DestinationError, ListenerError) as exc:
            raise ListenerError(f"Spark listener {listener}: {exc}") from exc
        if self.on_failure in _LATER or self.bad_records == "dlq":
            wanted = "on_failure", self.on_failure, _LATER.get(self.on_failure, "")
            attribute, value, what = wanted if wanted[2] else ("bad_records", "dlq", _LATER["dlq"])
            raise UnsupportedError(
                f"Spark listener {listener}: {attribute}={value!r}: {what} comes in a later release; "
                "catch the error in the listener and send the rows on by the template"
            )
        _one_of(listener, "on_failure", self.on_failure, ("stop",))
        _one_of(listener, "bad_records", self.bad_records, ("null", "fail"))
        if isinstance(self.trigger, str) and self.trigger != AVAILABLE_NOW and not _INTERVAL.fullmatch(self.trigger):
            raise ListenerError(
                f"Spark listener {listener}: trigger must be a timedelta, a text such as '5 seconds', "
                f"or {AVAILABLE_NOW!r}, got {self.trigger!r}"
            )


def spark_listener(
    topic: str | Sequence[str],
    consumer_group: str,
    *,
    selector_expression: str = "*",
    payload: type | None = None,
    bad_records: str = "null",
    trigger: timedelta | str = timedelta(seconds=1),
    max_offsets_per_trigger: int | str = 100_000,
    min_partitions: int | None = None,
    include_properties: bool = True,
    fail_on_data_loss: bool = True,
    max_attempts: int | str = 3,
    retry_delay: float = 1.0,
    on_failure: str = "stop",
    checkpoint: str | None = None,
) -> Callable[[_Target], _Target]:
    """Give a function, or a class with ``on_batch``, the messages of a topic as DataFrames.

    It is called with ``(DataFrame, SparkBatch)``; `SparkListenerSpec` tells each attribute. The object is returned
    unchanged: a test calls it like any other.

    Raises:
        ListenerError: The object cannot be a listener.
    """
    attributes: dict[str, Any] = dict(locals())
    attributes["topics"] = _topics(attributes.pop("topic"))
    spec = SparkListenerSpec(**attributes)

    def note(target: _Target) -> _Target:
        _check_target(target)
        # The lowest decorator runs first; readers expect the order they see.
        setattr(target, SPARK_LISTENER_ATTRIBUTE, (spec, *spark_listener_specs(target)))
        return target

    return note


def spark_listener_specs(target: object) -> tuple[SparkListenerSpec, ...]:
    """What the decorators noted on this very class or function; for an object, on its class."""
    holder = target if inspect.isclass(target) or inspect.isroutine(target) else type(target)
    noted: tuple[SparkListenerSpec, ...] = vars(holder).get(SPARK_LISTENER_ATTRIBUTE, ())
    return noted


def refuse_shared_groups(spark_groups: Iterable[str], native_groups: Iterable[str]) -> None:
    """Refuse groups that would have two who move one progress.

    Args:
        spark_groups: The group of each Spark listener.
        native_groups: The groups of the listeners that get single messages.

    Raises:
        ListenerError: A group is in both, or twice among the first.
    """
    taken = dict.fromkeys(native_groups, "a message listener")
    for group in spark_groups:
        if group in taken:
            raise ListenerError(
                f"consumer group {group!r} has a Spark listener and {taken[group]}; both would move one progress, and "
                "each miss what the other took: give the Spark listener a group of its own"
            )
        taken[group] = "another Spark listener"


def _topics(topic: str | Sequence[str]) -> tuple[str, ...]:
    topics = (topic,) if isinstance(topic, str) else tuple(topic)
    if not topics or not all(str(name).strip() for name in topics):
        raise ListenerError(f"@spark_listener: topic must be a name or a list of names, got {topic!r}")
    return topics


def _check_target(target: object) -> None:
    name = getattr(target, "__qualname__", repr(target))
    if inspect.isclass(target):
        if not callable(getattr(target, "on_batch", None)):
            raise ListenerError(
                f"@spark_listener: class {name} has no method on_batch; "
                "write 'def on_batch(self, messages: DataFrame, batch: SparkBatch) -> None: ...'"
            )
    elif not inspect.isroutine(target):
        raise ListenerError(f"@spark_listener: {name} is neither a function nor a class with on_batch")


def _number(listener: str, attribute: str, given: int | str, resolve: Callable[[str], str]) -> int:
    value = resolve(given).strip() if isinstance(given, str) else given
    try:
        number = int(value)
    except ValueError:
        number = 0
    if isinstance(value, bool | float) or number < 1:
        raise ListenerError(f"Spark listener {listener}: {attribute} must be a whole number above 0, got {value!r}")
    return number


def _one_of(listener: str, attribute: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ListenerError(
            f"Spark listener {listener}: {attribute} must be {' or '.join(map(repr, allowed))}, got {value!r}"
        )
