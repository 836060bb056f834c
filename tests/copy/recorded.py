"""A recorded run of a broker on the virtual clock, and the state of a broker as a value that can be compared."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from mqtemplate.broker import ConsumerSpec, ReceivedMessage
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import VirtualClock
from mqtemplate.message import Message, MessageQueue, Property
from mqtemplate.pending import PendingQuery, ScheduleChangeStatus
from mqtemplate.results import HalfMessage, TransactionState
from mqtemplate.selectors.tags import TagSelector
from mqtemplate.services import Service
from mqtemplate.testing import Harness
from mqtemplate.topics import RETRY_TOPIC_PREFIX

GROUP, POP_GROUP, PRODUCERS, TOPIC = "billing", "shipping", "shop", "orders"


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
        in_flight: Key of a message that a member of the POP group has -> time from which it is delivered again, and
            number of its deliveries.
        done: Queue id -> committed offset of the POP group: all before it are acknowledged, or have a copy for a retry.
        retries: Keys of the messages in the retry topic of the POP group, in order.
        half: Keys of the half messages whose transactions are open.
    """

    delivered: list[str] = field(default_factory=list)
    pending: dict[str, int] = field(default_factory=dict)
    committed: dict[int, int] = field(default_factory=dict)
    in_flight: dict[str, tuple[int, int]] = field(default_factory=dict)
    done: dict[int, int] = field(default_factory=dict)
    retries: list[str] = field(default_factory=list)
    half: list[str] = field(default_factory=list)


def state_of(broker: EmbeddedBroker) -> State:
    """Return the state of a broker."""
    state = State(delivered=_bodies(broker, TOPIC))
    for queue_id in range(broker.topics.queue_count(TOPIC)):
        queue = MessageQueue(TOPIC, broker.name, queue_id)
        for group, offsets in ((GROUP, state.committed), (POP_GROUP, state.done)):
            committed = broker.groups.committed_offset(group, queue)
            if committed is not None:
                offsets[queue_id] = committed
    page = broker.delayed.pending(PendingQuery(topic=TOPIC), 10_000)
    state.pending = {str(each.keys): each.deliver_ms for each in page.messages}
    deliveries = broker.engine.pop.deliveries(POP_GROUP)
    if deliveries is not None:
        state.in_flight = {str(each.keys): (each.until_ms, each.attempt) for each in deliveries.messages}
    for topic in sorted(broker.topics.names()):
        if topic.startswith(RETRY_TOPIC_PREFIX):
            state.retries += _bodies(broker, topic)
    transactions = broker.engine.transactions
    halves = [transactions._read(queue_offset) for queue_offset in transactions._open]
    state.half = sorted(record.body.decode() for record in halves if record is not None)
    return state


def _bodies(broker: EmbeddedBroker, topic: str) -> list[str]:
    """Return the bodies of the messages in a topic, in the order in which they were stored."""
    stored = []
    for queue_id in range(broker.topics.queue_count(topic)):
        queue = MessageQueue(topic, broker.name, queue_id)
        span = range(broker.reader.min_offset(queue), broker.reader.max_offset(queue))
        units = [broker.store.consume_queue(topic, queue_id).unit(at) for at in span]
        stored += [(unit.physical_offset, unit.size) for unit in units]
    return [broker.store.read(physical_offset, size).body.decode() for physical_offset, size in sorted(stored)]


class RecordedRun:
    """Sends, delays, cancels, reschedules, releases and commits at random moments, the same for the same seed.

    A group that reads by POP receives and acknowledges meanwhile, or lets deliveries expire. Transactions begin, and
    are committed, rolled back or left open.

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
        self._received: list[tuple[ReceivedMessage, int]] = []
        self._halves: list[HalfMessage] = []
        self.history: dict[int, State] = {}

    def run(self, steps: int, on_step: Callable[[], None] = lambda: None) -> None:
        """Do random actions, with random times between them."""
        consumer = self.broker.groups.subscribe(ConsumerSpec(group=GROUP, subscriptions={TOPIC: TagSelector()}))
        member = self.broker.pop.join(ConsumerSpec(group=POP_GROUP, subscriptions={TOPIC: TagSelector()}))
        actions = [self._send, self._send_level, self._send_timer, self._send_timer, self._cancel, self._reschedule]
        actions += [self._receive, self._receive, self._acknowledge, self._begin_transaction, self._end_transaction]
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
        member.close()

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

    def _receive(self) -> None:
        invisible_ms = self._random.choice([5_000, 60_000])
        found = self.broker.pop.receive(POP_GROUP, TOPIC, 2, invisible_ms, 0, None)
        self._received += [(each, self.clock.now_ms() + invisible_ms) for each in found]

    def _acknowledge(self) -> None:
        self._received = [each for each in self._received if each[1] > self.clock.now_ms()]
        if self._received:
            message, _ = self._received.pop(self._random.randrange(len(self._received)))
            self.broker.pop.ack(POP_GROUP, message.message.topic, message.receipt)

    def _begin_transaction(self) -> None:
        self._halves.append(self.broker.sends.send_half(self._message(), PRODUCERS))

    def _end_transaction(self) -> None:
        if self._halves:
            half = self._halves.pop(self._random.randrange(len(self._halves)))
            state = self._random.choice([TransactionState.COMMIT, TransactionState.ROLLBACK])
            self.broker.transactions.end_transaction(half, state)

    def _pending_key(self) -> str | None:
        keys = sorted(state_of(self.broker).pending)
        return self._random.choice(keys) if keys else None


def opened_state(path: Path, now_ms: int) -> State:
    """Return the state of a store directory, which is opened while the clock stands still."""
    with EmbeddedBroker(path, small_settings(), VirtualClock(now_ms)) as broker:
        return state_of(broker)
