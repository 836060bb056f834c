"""A process that takes part in a group through the remote broker, tells what it does, and can be killed.

python -m tests.conformance.python_member NAME_SERVER GROUP TOPIC
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import structlog

from mqtemplate.broker import ConsumeFromWhere, ConsumerSpec
from mqtemplate.brokers.remote.broker import RemoteBroker
from mqtemplate.brokers.remote.settings import RemoteSettings
from mqtemplate.selectors.tags import TagSelector

__all__ = ["PythonMember"]


class PythonMember:
    """Runs this module as a process of its own, until the block is left."""

    def __init__(self, name_server: str, group: str, topic: str) -> None:
        self._arguments = [name_server, group, topic]
        self._told = threading.Condition()
        self._queues: list[int] = []
        self._bodies: list[bytes] = []

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            told = json.loads(line)
            with self._told:
                if "queues" in told:
                    self._queues = told["queues"]
                else:
                    self._bodies.append(told["body"].encode())
                self._told.notify_all()

    def queues(self, count: int, timeout_ms: int) -> list[int]:
        """The ids of its queues, once they are *count* or the time has passed."""
        return self._wait(lambda: len(self._queues) == count, lambda: self._queues, timeout_ms)

    def handled(self, begins: str, count: int, timeout_ms: int) -> list[bytes]:
        """The bodies it is done with that begin so, once they are *count* or the time has passed."""

        def found() -> list[bytes]:
            return [body for body in self._bodies if body.startswith(begins.encode())]

        return self._wait(lambda: len(found()) >= count, found, timeout_ms)

    def _wait(self, holds: Callable[[], bool], value: Callable[[], list[Any]], timeout_ms: int) -> list[Any]:
        with self._told:
            self._told.wait_for(holds, timeout_ms / 1_000)
            return list(value())

    def kill(self) -> None:
        """SIGKILL, as a crash."""
        self._process.kill()
        self._process.wait()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.kill()
        self._reader.join()
        self._process.communicate()


def _tell(**what: object) -> None:
    print(json.dumps(what), flush=True)


def _end_with_standard_input() -> None:
    """So that it does not outlive who started it."""
    sys.stdin.read()
    os._exit(0)


def main() -> None:
    name_server, group, topic = sys.argv[1:]
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    # as short as those of the Java members in these tests, for the same reason
    settings = RemoteSettings(
        name_servers=(name_server,),
        rebalance_interval_ms=1_000,
        poll_name_server_interval_ms=1_000,
        heartbeat_broker_interval_ms=1_000,
        persist_consumer_offset_interval_ms=200,
    )
    spec = ConsumerSpec(
        group=group,
        subscriptions={topic: TagSelector()},
        consume_from_where=ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET,
    )
    known: list[int] = []
    with RemoteBroker(settings) as broker:
        member = broker.subscribe(spec)
        while True:
            for message in member.poll(32, 100):
                _tell(body=message.body.decode())
                member.commit(message.message_queue, message.queue_offset + 1)
            queues = sorted(queue.queue_id for queue in member.assignment() if queue.topic == topic)
            if queues != known:
                known = queues
                _tell(queues=queues)


if __name__ == "__main__":
    threading.Thread(target=_end_with_standard_input, daemon=True).start()
    main()
