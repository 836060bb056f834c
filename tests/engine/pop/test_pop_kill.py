"""A process that is killed while it receives and acknowledges messages."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import VirtualClock
from mqtemplate.engine.pop.pop import PopRequest
from mqtemplate.store.settings import FlushDiskType
from mqtemplate.testing import Harness
from tests.engine.pop.consumer import GROUP, TOPIC, ignore
from tests.engine.pop.killed_consumer import settings

ROOT = Path(__file__).parents[3]


class Kills:
    """Messages that were sent and acknowledged by several killed processes.

    Attributes:
        acking: Messages that a process began to acknowledge: it may have been killed before it printed the result.
    """

    def __init__(self, folder: Path, mode: FlushDiskType, module: str) -> None:
        self.folder = folder
        self.mode = mode
        self.module = module
        self.sent: set[int] = set()
        self.acking: set[int] = set()
        self.acked: set[int] = set()
        self.received_after_ack: list[int] = []
        self.count = 0

    def run(self, count: int, kill_after: int | None) -> None:
        """Run one process, and kill it after this number of lines."""
        first = str(max(self.sent, default=0) + 10)  # the killed process may have stored one more than it printed
        command = [sys.executable, "-m", f"tests.engine.pop.{self.module}", str(self.folder), first, str(count)]
        child = subprocess.Popen(
            [*command, self.mode.name],
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert child.stdout is not None
        acked_before = set(self.acked)
        for number, line in enumerate(child.stdout):
            action, body = line.decode().split()
            if action == "received" and int(body) in acked_before:
                self.received_after_ack.append(int(body))
            elif action != "received":
                {"sent": self.sent, "acking": self.acking, "acked": self.acked}[action].add(int(body))
            if number == kill_after:
                child.send_signal(signal.SIGKILL)
                self.count += 1
        child.stdout.close()
        child.wait()


def remaining(folder: Path, mode: FlushDiskType, now_ms: int) -> list[int]:
    """Receive and acknowledge all that is left."""
    clock = VirtualClock(now_ms)
    found: list[int] = []
    request = PopRequest(group=GROUP, topic=TOPIC, from_last=False)
    with EmbeddedBroker(folder, settings(mode), clock) as broker:
        harness = Harness(broker)
        for _ in range(3):
            harness.advance("1h")
            while messages := broker.engine.pop.pop(request).messages:
                for message in messages:
                    found.append(int(message.record.body))
                    broker.engine.pop.ack(GROUP, TOPIC, message.handle, ignore)
    return found


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("mode", list(FlushDiskType))
@pytest.mark.parametrize("module", ["killed_consumer", "killed_listener"])
def test_kills_lose_no_message_and_no_acknowledgement(tmp_path: Path, mode: FlushDiskType, module: str) -> None:
    """Five SIGKILLs at random moments, one store directory.

    A message that a listener had handled, and whose acknowledgement was not confirmed, may come again.
    """
    chance = random.Random(43)
    kills = Kills(tmp_path / "store", mode, module)
    for _ in range(5):
        kills.run(100_000, chance.randrange(80, 200))
    kills.run(max(kills.sent) + 30, None)

    found = remaining(kills.folder, mode, int(kills.folder.stat().st_mtime * 1_000) + 3_600_000)

    assert kills.count == 5
    assert len(kills.acked) > 100
    assert kills.received_after_ack == []
    assert kills.acked.isdisjoint(found)
    assert kills.sent <= kills.acking | set(found)
    assert len(kills.acking - kills.acked) < 100
