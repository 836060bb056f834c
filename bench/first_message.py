"""Time from the first send to a new topic until its handler runs, and of the first request until its reply arrives.

On the server, one application sends and another one listens. The listeners subscribe to topics that do not exist: each
first message creates its topic.

    python -m bench.first_message [ROUNDS]
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from pathlib import Path

from bench.measure import percentile, report, run, scratch_folder
from mqtemplate import MQApplication, RocketMQTemplate, message_listener

_ROUNDS = 20
_TIMEOUT_MS = 30_000
_QUIET = {"mqtemplate.logging.enabled": False}


class Arrivals:
    """The time at which the message of each topic was handled."""

    def __init__(self) -> None:
        self._at: dict[str, float] = {}
        self._changed = threading.Condition()

    def add(self, topic: str) -> None:
        with self._changed:
            self._at[topic] = time.perf_counter()
            self._changed.notify_all()

    def wait(self, topic: str) -> float:
        with self._changed:
            if not self._changed.wait_for(lambda: topic in self._at, _TIMEOUT_MS / 1_000):
                raise RuntimeError(f"no message of {topic} arrived")
            return self._at[topic]


def listeners(arrivals: Arrivals, rounds: int) -> list[object]:
    """Return a listener for each topic: of messages, and of requests that it replies to."""

    def create(number: int) -> list[object]:
        @message_listener(topic=f"message-{number}", consumer_group=f"message-group-{number}", id=f"m{number}")
        def on_message(body: str) -> None:
            arrivals.add(body)

        @message_listener(topic=f"request-{number}", consumer_group=f"request-group-{number}", id=f"r{number}")
        def on_request(body: str) -> str:
            return body

        return [on_message, on_request]

    return [listener for number in range(rounds) for listener in create(number)]


def measure(name: str, template: RocketMQTemplate, arrivals: Arrivals, rounds: int) -> None:
    messages, requests = [], []
    for number in range(rounds):
        topic = f"message-{number}"
        start = time.perf_counter()
        template.sync_send(topic, topic, timeout=_TIMEOUT_MS)
        messages.append((arrivals.wait(topic) - start) * 1_000)
        start = time.perf_counter()
        template.send_and_receive(f"request-{number}", "hello", reply_type=str, timeout=_TIMEOUT_MS)
        requests.append((time.perf_counter() - start) * 1_000)
    for what, spans in (("first message to a new topic", messages), ("first request to a new topic", requests)):
        report(f"{what}, {name}, p50", percentile(spans, 0.5), "ms", "< 50 ms")
        report(f"{what}, {name}, max", max(spans), "ms", "none")


def measure_embedded(folder: Path, rounds: int) -> None:
    arrivals = Arrivals()
    settings = {"rocketmq.name-server": f"embedded:{folder}/embedded", "rocketmq.producer.group": "bench", **_QUIET}
    with MQApplication(*listeners(arrivals, rounds), config_folder=folder, settings=settings) as app:
        measure("embedded", app.template, arrivals, rounds)


def measure_server(folder: Path, rounds: int) -> None:
    arrivals = Arrivals()
    server, address = _start_server(folder)
    settings = {"rocketmq.name-server": address, "rocketmq.producer.group": "bench", **_QUIET}
    try:
        with (
            MQApplication(*listeners(arrivals, rounds), config_folder=folder, settings=settings),
            MQApplication(config_folder=folder, settings=settings) as sender,
        ):
            measure("our server", sender.template, arrivals, rounds)
    finally:
        server.terminate()
        server.wait()


def _start_server(folder: Path) -> tuple[subprocess.Popen[str], str]:
    """Start a broker process; return it and the address of its name server."""
    listen = ("--listen", "127.0.0.1:0", "--name-server", "127.0.0.1:0")
    command = [sys.executable, "-m", "mqtemplate", "broker", "--config", str(folder), "--store", str(folder / "store")]
    server = subprocess.Popen([*command, *listen], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert server.stdout is not None
    found = re.search(r"its name server on (\S+),", server.stdout.readline())
    if found is None:
        raise RuntimeError("the server did not start")
    threading.Thread(target=server.stdout.read, daemon=True).start()  # so that its output never blocks it
    return server, found[1]


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else _ROUNDS
    with scratch_folder() as folder:
        measure_embedded(folder, rounds)
        measure_server(folder, rounds)


if __name__ == "__main__":
    run(main)
