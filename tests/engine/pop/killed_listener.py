"""A child process of the test of kills: a listener that receives by POP, and prints what is confirmed.

python -m tests.engine.pop.killed_listener FOLDER FIRST COUNT MODE
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from mqtemplate import MessageExt, MessageRequestMode
from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.brokers.embedded.broker import EmbeddedPop
from mqtemplate.clock import SystemClock
from mqtemplate.converter import JsonMessageConverter
from mqtemplate.engine.engine import Engine
from mqtemplate.errors import MQTemplateError
from mqtemplate.listener import ListenerRegistry, message_listener
from mqtemplate.message import Message
from mqtemplate.store.settings import FlushDiskType
from tests.engine.pop.consumer import GROUP, TOPIC
from tests.engine.pop.killed_consumer import say, settings


class ReportingPop(EmbeddedPop):
    """POP that prints which messages are acknowledged, as the broker has confirmed it to the listener.

    Attributes:
        bodies: Receipt handle -> body of the messages that were handled.
        unacked: The process sends no further message while eight are not acknowledged.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.bodies: dict[str, int] = {}
        self.unacked = threading.Semaphore(8)

    def ack_all(self, group: str, topic: str, receipts: Sequence[str]) -> list[MQTemplateError | None]:
        results = super().ack_all(group, topic, receipts)
        for receipt, error in zip(receipts, results, strict=True):
            say("acked", self.bodies.pop(receipt), error)
            self.unacked.release()
        return results


def listen_until_killed(folder: Path, first: int, count: int, mode: FlushDiskType) -> None:
    """Send the messages *first* to *count* while a listener handles them with four threads."""
    with EmbeddedBroker(folder, settings(mode), SystemClock()) as broker:
        broker._pop = pop = ReportingPop(broker.engine)

        @message_listener(
            TOPIC,
            GROUP,
            request_mode=MessageRequestMode.POP,
            consume_from_where="CONSUME_FROM_FIRST_OFFSET",
            consume_thread_number=4,
            invisible_duration="1s",
        )
        def handle(message: MessageExt) -> None:
            body = int(message.body)
            say("received", body)
            pop.bodies[message.invisible_time.receipt] = body  # type: ignore[union-attr]
            say("acking", body)

        registry = ListenerRegistry(broker, JsonMessageConverter())
        registry.register(handle)
        registry.start()
        for number in range(first, count):
            pop.unacked.acquire()
            broker.sends.send(Message(TOPIC, str(number).encode()))
            say("sent", number)
        registry.stop()


if __name__ == "__main__":
    listen_until_killed(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), FlushDiskType[sys.argv[4]])
