"""A process that fills a folder with the embedded broker, tells what it sent, and closes the broker or dies.

python -m tests.conformance.writer FOLDER PORT closed|killed
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from mqtemplate.broker import ConsumerSpec
from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.message import HostAddress, Message, MessageQueue
from mqtemplate.pending import ScheduleChangeStatus
from mqtemplate.selectors.tags import TagSelector
from mqtemplate.store import FlushDiskType
from tests.conformance.story import BATCHES, BIG, IPV6, LATER, LONG_TOPIC, ORDERS, READERS, Sent, send, settings

__all__ = ["Written", "write"]


class Written(NamedTuple):
    """What is in the folder.

    Attributes:
        stored: Messages that did not wait.
        delivered: Messages that waited, and were handed over before the process ended.
        waiting: Messages that still wait.
        done: How many messages of the first queue of `ORDERS` the group `READERS` is done with.
    """

    stored: list[Sent]
    delivered: list[Sent]
    waiting: list[Sent]
    done: int


def write(folder: Path, port: int, how: str) -> Written:
    """Run this module as a process of its own on *folder*."""
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
    told = json.loads(process.stdout.splitlines()[-1])
    lists = {name: [Sent(*row)._replace(body=row[3].encode()) for row in told[name]] for name in Written._fields[:3]}
    return Written(**lists, done=told["done"])


def _fill(folder: Path, port: int) -> tuple[EmbeddedBroker, Written]:
    stored = _store_with_ipv6_hosts(folder, port)
    broker = EmbeddedBroker(folder, settings(port, flush_disk_type=FlushDiskType.SYNC_FLUSH))
    broker.start()
    stored += [_order(broker, number, number % 4) for number in range(40)]
    stored += [send(broker, Message(LONG_TOPIC, b"long %d" % number, {"KEYS": f"long-{number}"})) for number in (0, 1)]
    stored += _batch(broker)
    stored += [send(broker, Message(BIG, b"%02d" % number * 20_000, {"KEYS": f"big-{number}"})) for number in range(40)]
    broker.commit_offset(READERS, MessageQueue(ORDERS, broker.name, 0), 4)
    delivered = [
        _delayed(broker, "level 1 before the end", level=1),
        _delayed(broker, "timer before the end", delay_ms=700),
    ]
    _await_in_topic(broker, LATER, len(delivered))
    # in the first tenth of a slot that is open when the process ends
    delivered.append(_delayed(broker, "timer of an open slot", delay_ms=1_100 - broker.clock.now_ms() % 1_000))
    _await_in_topic(broker, LATER, 1)
    broker.store.take_checkpoint()
    waiting = [
        _delayed(broker, "level 1", level=1),
        _delayed(broker, "level 3", level=3),
        _delayed(broker, "level 3 again", level=3),
        *(_delayed(broker, f"timer {delay_ms}", delay_ms=delay_ms) for delay_ms in (300, 1_500, 1_600, 2_000, 3_210)),
        _delayed(broker, "timer beyond the window", delay_ms=(8 * 1_000) + 777),
        _delayed(broker, "timer beyond two windows", delay_ms=13 * 1_000),
    ]
    _cancel_some(broker)
    waiting += _reschedule_some(broker)
    return broker, Written(stored, delivered, waiting, 4)


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


_LEVEL_MS = (0, 1_000, 2_000, 12_000, 7_200_000)


def _delayed(broker: EmbeddedBroker, text: str, level: int = 0, delay_ms: int = 0) -> Sent:
    option = {"DELAY": str(level)} if level else {"TIMER_DELAY_MS": str(delay_ms)}
    message = Message(LATER, text.encode(), {"TAGS": "late", "KEYS": text.replace(" ", "-"), **option})
    return send(broker, message, delay_ms=_LEVEL_MS[level] or delay_ms)


def _cancel_some(broker: EmbeddedBroker) -> None:
    """Send messages that wait for some seconds, and take them back."""
    for text, option in (("level", {"level": 3}), ("timer", {"delay_ms": 9_100}), ("far timer", {"delay_ms": 16_000})):
        sent = _delayed(broker, f"cancelled {text}", **option)
        assert broker.cancel(key=sent.keys, topic=LATER).status is ScheduleChangeStatus.CANCELLED


def _reschedule_some(broker: EmbeddedBroker) -> list[Sent]:
    """Send messages that would wait for hours, and let them come sooner."""
    rescheduled = []
    for text, option in (("level", {"level": 4}), ("timer", {"delay_ms": 7_000_000})):
        sent = _delayed(broker, f"rescheduled {text}", **option)
        due_ms = broker.clock.now_ms() + 10_500
        assert (
            broker.reschedule(deliver_ms=due_ms, key=sent.keys, topic=LATER).status is ScheduleChangeStatus.RESCHEDULED
        )
        rescheduled.append(sent._replace(due_ms=due_ms))
    return rescheduled


def _await_in_topic(broker: EmbeddedBroker, topic: str, count: int) -> None:
    watcher = broker.subscribe(ConsumerSpec(group="watcher", subscriptions={topic: TagSelector()}))
    while count > 0:
        messages = watcher.poll(32, 1_000)
        for message in messages:
            watcher.commit(message.message_queue, message.queue_offset + 1)
        count -= len(messages)
    watcher.close()


def main() -> None:
    folder, port, how = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    broker, written = _fill(folder, port)
    if how == "closed":
        broker.close()
    told = written._asdict()
    for name in Written._fields[:3]:
        told[name] = [sent._replace(body=sent.body.decode()) for sent in told[name]]
    print("\n" + json.dumps(told), flush=True)
    os.kill(os.getpid(), signal.SIGKILL if how == "killed" else 0)


if __name__ == "__main__":
    main()
