"""A child process of the test of kills: it sends, receives and acknowledges messages, and prints what is confirmed.

python -m tests.engine.pop.killed_consumer FOLDER FIRST COUNT MODE
"""

from __future__ import annotations

import os
import random
import sys
import threading
from pathlib import Path

from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import SystemClock
from mqtemplate.engine.pop.pop import PopRequest
from mqtemplate.message import Message
from mqtemplate.store.settings import FlushDiskType
from tests.engine.pop.consumer import GROUP, TOPIC


def settings(mode: FlushDiskType) -> EmbeddedSettings:
    """Return settings with small files and frequent checkpoints."""
    return EmbeddedSettings(
        flush_disk_type=mode,
        default_topic_queue_nums=2,
        mapped_file_size_commit_log=1 << 20,
        mapped_file_size_consume_queue=20_000,
        checkpoint_interval_ms=200,
        flush_consumer_offset_interval_ms=200,
    )


def consume_until_killed(folder: Path, first: int, count: int, mode: FlushDiskType) -> None:
    """Send the messages *first* to *count*, and acknowledge about two thirds of those that are delivered."""
    chance = random.Random(first)
    with EmbeddedBroker(folder, settings(mode), SystemClock()) as broker:
        pop = broker.engine.pop
        request = PopRequest(group=GROUP, topic=TOPIC, max_count=8, invisible_ms=200, from_last=False)
        for number in range(first, count):
            broker.sends.send(Message(TOPIC, str(number).encode()))
            say("sent", number)
            for message in pop.pop(request).messages:
                body = int(message.record.body)
                say("received", body)
                if chance.random() < 0.66:
                    say("acking", body)
                    pop.ack(GROUP, TOPIC, message.handle, lambda error, body=body: say("acked", body, error))  # type: ignore[misc]
        done = threading.Event()
        pop.journal.confirm(lambda error: done.set())
        done.wait()


def say(action: str, number: int, error: Exception | None = None) -> None:
    """Print one action that cannot be undone any more."""
    if error is None:
        os.write(1, f"{action} {number}\n".encode())


if __name__ == "__main__":
    consume_until_killed(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), FlushDiskType[sys.argv[4]])
