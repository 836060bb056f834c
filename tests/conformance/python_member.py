"""A process with a consumer of the remote broker. It prints its queues and the consumed messages, and can be killed.

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
from mqtemplate.brokers.remote.cluster.settings import RemoteSettings
from mqtemplate.selectors.tags import TagSelector


class PythonMember:
    """Process that runs this module until the end of the block."""

    def __init__(self, name_server: str, group: str, topic: str) -> None:
        self._arguments = [name_server, group, topic]
        self._changed = threading.Condition()
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
            printed = json.loads(line)
            with self._changed:
                if "queues" in printed:
                    self._queues = printed["queues"]
                else:
                    self._bodies.append(printed["body"].encode())
                self._changed.notify_all()

    def queues(self, count: int, timeout_ms: int) -> list[int]:
        """Return the IDs of the assigned queues when there are *count* of them, or after the timeout."""
        return self._wait(lambda: len(self._queues) == count, lambda: self._queues, timeout_ms)

    def handled(self, prefix: str, count: int, timeout_ms: int) -> list[bytes]:
        """Return the consumed bodies with *prefix* when there are *count* of them, or after the timeout."""

        def found() -> list[bytes]:
            return [body for body in self._bodies if body.startswith(prefix.encode())]

        return self._wait(lambda: len(found()) >= count, found, timeout_ms)

    def _wait(self, condition: Callable[[], bool], value: Callable[[], list[Any]], timeout_ms: int) -> list[Any]:
        with self._changed:
            self._changed.wait_for(condition, timeout_ms / 1_000)
            return list(value())

    def kill(self) -> None:
        """Kill the process with SIGKILL, as in a crash."""
        self._process.kill()
        self._process.wait()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.kill()
        self._reader.join()
        self._process.communicate()


def _print(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def _exit_with_standard_input() -> None:
    """Exit when standard input is closed, so that this process ends with its parent."""
    sys.stdin.read()
    os._exit(0)


def main() -> None:
    name_server, group, topic = sys.argv[1:]
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    # The same short intervals as the Java members have: the default is 20 s or 30 s.
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
    printed: list[int] = []
    with RemoteBroker(settings) as broker:
        consumer = broker.groups.subscribe(spec)
        while True:
            for message in consumer.poll(32, 100):
                _print(body=message.body.decode())
                consumer.commit(message.message_queue, message.queue_offset + 1)
            queues = sorted(queue.queue_id for queue in consumer.assignment() if queue.topic == topic)
            if queues != printed:
                printed = queues
                _print(queues=queues)


if __name__ == "__main__":
    threading.Thread(target=_exit_with_standard_input, daemon=True).start()
    main()
