"""A process that writes a store with the embedded broker, prints what it sent, and closes the broker or crashes.

python -m tests.conformance.embedded_writer FOLDER PORT closed|killed
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import structlog

from mqtemplate.broker import ConsumerSpec
from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import SystemClock
from mqtemplate.message import HostAddress, Message, MessageQueue, SendSequence
from mqtemplate.pending import ScheduleChangeStatus
from mqtemplate.selectors.tags import TagSelector
from mqtemplate.store.settings import FlushDiskType
from tests.conformance.store_contents import (
    BATCHES,
    BIG,
    DELAYED,
    IPV6,
    LONG_TOPIC,
    NUMBERED,
    ORDERS,
    READERS,
    Sent,
    send,
    send_delayed,
    settings,
)


class Written(NamedTuple):
    """The contents of a store.

    Attributes:
        stored: Messages without a delay.
        delivered: Delayed messages that were delivered before the process ended.
        pending: Delayed messages that are pending.
        consumed: Number of messages of the first queue of `ORDERS` that the group `READERS` consumed.
    """

    stored: list[Sent]
    delivered: list[Sent]
    pending: list[Sent]
    consumed: int


def write(folder: Path, port: int, how: str) -> Written:
    """Run this module in a process that writes to *folder*."""
    process = subprocess.run(
        [sys.executable, "-m", __name__, str(folder), str(port), how],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=60,
        check=False,
    )
    expected = -signal.SIGKILL if how == "killed" else 0
    assert process.returncode == expected, process.stderr
    printed = json.loads(process.stdout.splitlines()[-1])
    lists = {name: [Sent(*row)._replace(body=row[3].encode()) for row in printed[name]] for name in Written._fields[:3]}
    return Written(**lists, consumed=printed["consumed"])


class StoppableClock(SystemClock):
    """The wall clock until it is stopped. Then nothing becomes due, however busy the machine is."""

    def __init__(self) -> None:
        self._stopped_ms: int | None = None

    def stop(self) -> None:
        self._stopped_ms = super().now_ms()

    def now_ms(self) -> int:
        return super().now_ms() if self._stopped_ms is None else self._stopped_ms

    def seconds_until(self, due_ms: int) -> float:
        return super().seconds_until(due_ms) if self._stopped_ms is None else (due_ms - self._stopped_ms) / 1_000


def _fill(folder: Path, port: int) -> tuple[EmbeddedBroker, Written]:
    stored = _store_with_ipv6_hosts(folder, port)
    clock = StoppableClock()
    broker = EmbeddedBroker(folder, settings(port, flush_disk_type=FlushDiskType.SYNC_FLUSH), clock)
    broker.start()
    stored += [_order(broker, number, number % 4) for number in range(40)]
    stored += [send(broker, Message(LONG_TOPIC, b"long %d" % number, {"KEYS": f"long-{number}"})) for number in (0, 1)]
    stored += _batch(broker)
    stored += [send(broker, Message(BIG, b"%02d" % number * 20_000, {"KEYS": f"big-{number}"})) for number in range(40)]
    _send_numbered(broker)
    broker.commit_offset(READERS, MessageQueue(ORDERS, broker.name, 0), 4)
    delivered = [
        send_delayed(broker, "level 1 before the end", level=1),
        send_delayed(broker, "timer before the end", delay_ms=700),
    ]
    _wait_for_messages(broker, DELAYED, len(delivered))
    # The message is due in the first tenth of a slot, and the process ends within the same slot.
    to_next_slot = 1_100 - broker.clock.now_ms() % 1_000
    delivered.append(send_delayed(broker, "timer of an open slot", delay_ms=to_next_slot))
    _wait_for_messages(broker, DELAYED, 1)
    broker.store.take_checkpoint()
    clock.stop()  # a message that is delivered after the checkpoint is delivered again by RocketMQ
    pending = [
        send_delayed(broker, "level 1", level=1),
        send_delayed(broker, "level 3", level=3),
        send_delayed(broker, "level 3 again", level=3),
        *(send_delayed(broker, f"timer {each}", delay_ms=each) for each in (300, 1_500, 1_600, 2_000, 3_210)),
        send_delayed(broker, "timer beyond the window", delay_ms=5_777),
        send_delayed(broker, "timer beyond two windows", delay_ms=9_000),
    ]
    _cancel_some(broker)
    pending += _reschedule_some(broker)
    return broker, Written(stored, delivered, pending, 4)


def _store_with_ipv6_hosts(folder: Path, port: int) -> list[Sent]:
    with EmbeddedBroker(folder, settings(port, listen_host=HostAddress("::1", port))) as broker:
        return [send(broker, Message(IPV6, b"six %d" % number, {"KEYS": f"six-{number}"})) for number in range(3)]


def _order(broker: EmbeddedBroker, number: int, queue_id: int) -> Sent:
    properties = {"TAGS": "paid" if number % 2 else "öffen", "KEYS": f"order-{number}", "user": f"héllo {number}"}
    return send(broker, Message(ORDERS, f"örder {number}".encode(), properties, flag=number), queue_id)


def _batch(broker: EmbeddedBroker) -> list[Sent]:
    messages = [Message(BATCHES, b"in batch %d" % number, {"KEYS": f"batch-{number}"}) for number in range(10)]
    result = broker.send_batch(messages)
    queue = result.message_queue
    ids = zip(messages, result.msg_id.split(","), result.offset_msg_id.split(","), strict=True)
    return [
        Sent(BATCHES, queue.queue_id, result.queue_offset + at, message.body, None, message.keys, own, offset)
        for at, (message, own, offset) in enumerate(ids)
    ]


def _send_numbered(broker: EmbeddedBroker) -> None:
    """Send messages by a sequenced send, and repeat it: each is stored once."""
    queue = broker.queues(NUMBERED)[0]
    messages = [(Message(NUMBERED, b"numbered %d" % number), queue) for number in range(5)]
    for _ in range(2):
        broker.send_sequenced(messages, SendSequence("a-query", 7, 0))


def _cancel_some(broker: EmbeddedBroker) -> None:
    """Send delayed messages, and cancel them."""
    for text, option in (("level", {"level": 3}), ("timer", {"delay_ms": 6_100}), ("far timer", {"delay_ms": 11_000})):
        sent = send_delayed(broker, f"cancelled {text}", **option)
        assert broker.cancel(key=sent.keys, topic=DELAYED).status is ScheduleChangeStatus.CANCELLED


def _reschedule_some(broker: EmbeddedBroker) -> list[Sent]:
    """Send delayed messages, and reschedule them: to a time beyond the roll window, or to one within it."""
    rescheduled = []
    for text, option, new_delay_ms in (
        ("level", {"level": 4}, 7_500),
        ("timer to later", {"delay_ms": 1_500}, 7_500),
        ("timer to sooner", {"delay_ms": 7_000_000}, 1_500),
    ):
        sent = send_delayed(broker, f"rescheduled {text}", **option)
        due_ms = broker.clock.now_ms() + new_delay_ms
        change = broker.reschedule(deliver_ms=due_ms, key=sent.keys, topic=DELAYED)
        assert change.status is ScheduleChangeStatus.RESCHEDULED
        rescheduled.append(sent._replace(due_ms=due_ms))
    return rescheduled


def _wait_for_messages(broker: EmbeddedBroker, topic: str, count: int) -> None:
    consumer = broker.subscribe(ConsumerSpec(group="watcher", subscriptions={topic: TagSelector()}))
    while count > 0:
        messages = consumer.poll(32, 1_000)
        for message in messages:
            consumer.commit(message.message_queue, message.queue_offset + 1)
        count -= len(messages)
    consumer.close()


def main() -> None:
    folder, port, how = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    # The result has standard output alone: its threads may log while it is printed.
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    broker, written = _fill(folder, port)
    if how == "closed":
        broker.close()
    printed = written._asdict()
    for name in Written._fields[:3]:
        printed[name] = [sent._replace(body=sent.body.decode()) for sent in printed[name]]
    print("\n" + json.dumps(printed), flush=True)
    os.kill(os.getpid(), signal.SIGKILL if how == "killed" else 0)


if __name__ == "__main__":
    main()
