"""The first message of a fresh process, and of a new topic: from the send until the handler runs, or the reply arrives.

A fresh process imports the library, creates an application and a listener, sends a message and handles it. Its
processor time counts from its first line to the handler. Celery, Dramatiq and FastStream do the same, each with the
broker in memory that it has for tests, which neither stores nor retries. All take turns, and the least counts.

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
from bench.peer.fresh_process import fresh_processes, install_peers, peers_python
from mqtemplate import MQApplication, RocketMQTemplate, message_listener

_ROUNDS = 20
_TIMEOUT_MS = 30_000
_QUIET = {"mqtemplate.logging.enabled": False}


# --- a fresh process ------------------------------------------------------------------------------


_TURNS = 7
_CLOCK = """
import sys, threading, time
start, handled = (time.process_time(), time.perf_counter()), threading.Event()
def finish():
    print(time.process_time() - start[0], time.perf_counter() - start[1])
    handled.set()
"""
_OWN_PROGRAM = """
from mqtemplate import MQApplication, message_listener

@message_listener("orders", "billing")
def bill(body: str) -> None:
    finish()

with MQApplication(bill, environment={}, settings={"rocketmq.name-server": sys.argv[1]}) as app:
    app.template.sync_send("orders", "o-1")
    handled.wait(60)
"""
_PEER_PROGRAMS = {
    "FastStream (TestNatsBroker)": """
import asyncio
from faststream import FastStream
from faststream.nats import NatsBroker, TestNatsBroker

broker = NatsBroker()
app = FastStream(broker)

@broker.subscriber("orders")
async def bill(body: str) -> None:
    finish()

async def main():
    async with TestNatsBroker(broker) as test:
        await test.publish("o-1", "orders")

asyncio.run(main())
""",
    "Celery (memory://, a worker in a thread)": """
from celery import Celery
from celery.contrib.testing.worker import start_worker

app = Celery("bench", broker="memory://", backend="cache+memory://")

@app.task
def bill(body: str) -> None:
    finish()

with start_worker(app, perform_ping_check=False, pool="solo"):
    bill.delay("o-1")
    handled.wait(60)
""",
    "Dramatiq (StubBroker)": """
import dramatiq
from dramatiq.brokers.stub import StubBroker

broker = StubBroker()
dramatiq.set_broker(broker)

@dramatiq.actor
def bill(body: str) -> None:
    finish()

worker = dramatiq.Worker(broker)
worker.start()
bill.send("o-1")
handled.wait(60)
worker.stop()
""",
}


def measure_fresh_processes(folder: Path) -> None:
    """Measure the first message of a process, and the ones of the peers beside it."""
    programs = {
        "embedded, in memory": (sys.executable, _OWN_PROGRAM, "embedded:memory"),
        "embedded, a new folder": (sys.executable, _OWN_PROGRAM, ""),
    }
    if problem := install_peers():
        print(f"The peers are missing: {problem}")
    else:
        programs |= {name: (peers_python(), code, "") for name, code in _PEER_PROGRAMS.items()}
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in programs}
    with fresh_processes() as processes:
        for turn in range(_TURNS + 1):  # the first turn writes the bytecode and is not counted
            for name, (python, code, argument) in programs.items():
                given = argument or f"embedded:{folder.absolute()}/fresh-{turn}"
                processor_s, elapsed_s = map(float, processes.output_of(python, _CLOCK + code, given).split()[:2])
                results[name].append((processor_s, elapsed_s))
    for name, rounds in results.items():
        target = "0.6 s" if name.startswith("embedded") else "-"
        report(f"first message of a process, {name}", min(cpu for cpu, _ in rounds[1:]), "s CPU", target)
        report("    elapsed", min(elapsed for _, elapsed in rounds[1:]), "s", "-")


# --- a new topic ----------------------------------------------------------------------------------


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
        measure_fresh_processes(folder)
        measure_embedded(folder, rounds)
        measure_server(folder, rounds)


if __name__ == "__main__":
    run(main)
