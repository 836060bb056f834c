"""A recorded run of a broker on the virtual clock, and the state of a broker as a value that can be compared."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from mqtemplate.broker import ConsumerSpec
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import VirtualClock
from mqtemplate.message import Message, MessageQueue, Property
from mqtemplate.pending import PendingQuery, ScheduleChangeStatus
from mqtemplate.selectors.tags import TagSelector
from mqtemplate.services import Service
from mqtemplate.testing import Harness

GROUP, TOPIC = "billing", "orders"


def small_settings(file_size: int = 16_384) -> EmbeddedSettings:
    """Return settings with files that are full after some messages."""
    return EmbeddedSettings(
        mapped_file_size_commit_log=file_size,
        mapped_file_size_consume_queue=2_000,
        max_message_size=2_000,
        max_hash_slot_num=50,
        max_index_num=200,
        flush_consumer_offset_interval_ms=100,
        default_topic_queue_nums=2,
    )


@dataclass
class State:
    """The messages of a broker by their keys.

    Attributes:
        delivered: Keys of the messages in the topic, in order.
        pending: Key -> deliver time.
        committed: Queue id -> committed offset of the group.
    """

    delivered: list[str] = field(default_factory=list)
    pending: dict[str, int] = field(default_factory=dict)
    committed: dict[int, int] = field(default_factory=dict)


def state_of(broker: EmbeddedBroker) -> State:
    """Return the state of a broker."""
    state = State()
    stored = []
    for queue_id in range(broker.topics.queue_count(TOPIC)):
        queue = MessageQueue(TOPIC, broker.name, queue_id)
        first = broker.reader.min_offset(queue)
        last = broker.reader.max_offset(queue)
        units = [broker.store.consume_queue(TOPIC, queue_id).unit(at) for at in range(first, last)]
        stored += [(unit.physical_offset, unit.size) for unit in units]
        committed = broker.groups.committed_offset(GROUP, queue)
        if committed is not None:
            state.committed[queue_id] = committed
    for physical_offset, size in sorted(stored):
        record = broker.store.read(physical_offset, size)
        state.delivered.append(record.body.decode())
    page = broker.delayed.pending(PendingQuery(topic=TOPIC), 10_000)
    state.pending = {str(each.keys): each.deliver_ms for each in page.messages}
    return state


class RecordedRun:
    """Sends, delays, cancels, reschedules, releases and commits at random moments, the same for the same seed.

    Args:
        open_broker: Returns the broker, which the run starts.
        services: Further services to step.

    Attributes:
        history: Time -> state after all work of that millisecond.
    """

    def __init__(self, broker: EmbeddedBroker, clock: VirtualClock, seed: int, *services: Service) -> None:
        self.broker, self.clock = broker, clock
        self.harness = Harness(broker, *services)
        self._random = random.Random(seed)
        self._count = 0
        self.history: dict[int, State] = {}

    def run(self, steps: int, on_step: Callable[[], None] = lambda: None) -> None:
        """Do random actions, with random times between them."""
        consumer = self.broker.groups.subscribe(ConsumerSpec(group=GROUP, subscriptions={TOPIC: TagSelector()}))
        actions = [self._send, self._send_level, self._send_timer, self._send_timer, self._cancel, self._reschedule]
        for _ in range(steps):
            self.harness.advance("1ms")  # the millisecond of the last state is over
            self._random.choice(actions)()
            if self._random.random() < 0.2:
                for queue in self.broker.queues(TOPIC):
                    consumer.commit(queue, self.broker.reader.max_offset(queue))
            self.harness.advance(f"{self._random.choice([1, 7, 90, 400, 3_000, 20_000])}ms")
            self.history[self.clock.now_ms()] = state_of(self.broker)
            on_step()
        consumer.close()

    def _message(self, **properties: str) -> Message:
        self._count += 1
        key = f"order-{self._count}"
        return Message(TOPIC, key.encode(), {Property.KEYS: key, **properties})

    def _send(self) -> None:
        self.broker.sends.send(self._message())

    def _send_level(self) -> None:
        self.broker.sends.send(self._message(**{Property.DELAY: str(self._random.choice([1, 2, 3, 4, 5, 6]))}))

    def _send_timer(self) -> None:
        delay_ms = self._random.choice([50, 1_234, 30_000, 500_000])
        self.broker.sends.send(self._message(**{Property.TIMER_DELAY_MS: str(delay_ms)}))

    def _cancel(self) -> None:
        if (key := self._pending_key()) is not None:
            result = self.broker.delayed.cancel(key=key, topic=TOPIC)
            assert result.status is ScheduleChangeStatus.CANCELLED

    def _reschedule(self) -> None:
        if (key := self._pending_key()) is not None:
            delay_ms = self._random.choice([10, 2_000, 100_000])
            self.broker.delayed.reschedule(key=key, topic=TOPIC, deliver_ms=self.clock.now_ms() + delay_ms)

    def _pending_key(self) -> str | None:
        keys = sorted(state_of(self.broker).pending)
        return self._random.choice(keys) if keys else None


def opened_state(path: Path, now_ms: int) -> State:
    """Return the state of a store directory, which is opened while the clock stands still."""
    with EmbeddedBroker(path, small_settings(), VirtualClock(now_ms)) as broker:
        return state_of(broker)
