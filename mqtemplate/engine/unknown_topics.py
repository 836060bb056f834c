"""Topics that do not exist yet: a first message creates them, unless a typing error is more likely."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mqtemplate.errors import DestinationError
from mqtemplate.event_log import EventLogger
from mqtemplate.topics import DLQ_TOPIC_PREFIX, RETRY_TOPIC_PREFIX, nearest_topic


class UnknownTopics:
    """Check of a topic that does not exist, before it is created.

    A topic is known if a listener of the application reads it, or the configuration names it. The retry and dead letter
    topics of groups are known.

    Args:
        auto_create: False: an unknown topic is refused. True: its creation is logged.
    """

    def __init__(self, log: EventLogger, *, auto_create: bool, known: Iterable[str] = ()) -> None:
        self._log = log
        self._auto_create = auto_create
        self._known = frozenset(known)

    def expect(self, topics: Iterable[str]) -> None:
        """Note topics that the application reads."""
        self._known = self._known.union(topics)

    def check(self, topic: str, existing: Callable[[], Iterable[str]], reason: str) -> None:
        """Log that a topic is created by its first use, unless it is known.

        Args:
            existing: Returns the names of the topics that exist, for the most similar one.
            reason: Of the creation, for the log.

        Raises:
            DestinationError: Unknown topics must not be created.
        """
        if topic in self._known or topic.startswith((RETRY_TOPIC_PREFIX, DLQ_TOPIC_PREFIX)):
            return
        nearest = self.nearest(topic, existing)
        if not self._auto_create:
            meant = f"did you mean {nearest!r}? " if nearest else ""
            raise DestinationError(
                f"topic {topic!r} does not exist, no listener of the application reads it, and "
                f"mqtemplate.broker.auto-create-topic-enable is false; {meant}Add it to mqtemplate.broker.topics, or "
                "create it by Broker.create_topic"
            )
        self._log.info("topic.created", topic=topic, reason=reason, **({"nearest": nearest} if nearest else {}))

    def nearest(self, topic: str, existing: Callable[[], Iterable[str]]) -> str | None:
        """Return the known or existing topic whose name is most similar; None if none is similar."""
        return nearest_topic(topic, self._known.union(existing()))
