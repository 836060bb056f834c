"""Cancels that race with deliveries through the wire: never both, never neither.

A server in its own process, with `ASYNC_FLUSH`: no race waits for the disk. Client processes send batches of timers,
each message with its own deliver time, and cancel every message at about the moment at which it is due: by its handle
or, each second one, by its key. Each thread shifts its cancels so that about half of them win. Afterwards the bench
reads the whole topic. A message counts as "both" if its cancel was reported and it was delivered, as "neither" if its
cancel was refused and it was not delivered, and as "twice" if it was delivered more than once.

    python -m bench.cancel_race [RACES]
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.measure import quiet, report, run, scratch_folder
from mqtemplate.brokers import RemoteBroker, RemoteSettings
from mqtemplate.message import Message, MessageQueue, Property
from mqtemplate.pending import PendingQuery, ScheduleChangeStatus

_RACES = 100_000
_PROCESSES = 2
_THREADS = 8
_BATCH = 100
_QUEUES = 8
_TOPIC = "race"
_FIRST_DUE_MS = 500  # after the send of a batch
_FIRST_GAP_MS = 20.0  # between the deliver times of a thread's messages
_GAP = 1.3  # times the duration of a cancel, so that a thread is not late
_SHIFT_MS = 0.5
_READ = 32
_TIMEOUT_MS = 60_000


class Racer:
    """One thread's races.

    Attributes:
        outcomes: Key of each message -> status of its cancel.
    """

    def __init__(self, broker: RemoteBroker, name: str) -> None:
        self._broker = broker
        self._name = name
        self._shift_ms = 0.0  # of a cancel after the deliver time
        self._gap_ms = _FIRST_GAP_MS
        self.outcomes: dict[str, str] = {}

    def race(self, count: int) -> None:
        for begin in range(0, count, _BATCH):
            self._race_batch(range(begin, min(begin + _BATCH, count)))

    def _race_batch(self, numbers: range) -> None:
        first_ms = self._broker.clock.now_ms() + _FIRST_DUE_MS
        due_ms = [first_ms + int(index * self._gap_ms) for index in range(len(numbers))]
        keys = [f"{self._name}-{number}" for number in numbers]
        handles = self._send(keys, due_ms)
        cancelling_s = 0.0
        for index, (key, due, handle) in enumerate(zip(keys, due_ms, handles, strict=True)):
            left_s = (due + self._shift_ms) / 1_000 - time.time()
            if left_s > 0:
                time.sleep(left_s)
            start = time.perf_counter()
            is_by_key = index % 2 == 1 or handle is None
            change = (
                self._broker.delayed.cancel(key=key, topic=_TOPIC) if is_by_key else self._broker.delayed.cancel(handle)
            )
            cancelling_s += time.perf_counter() - start
            self._shift_ms += _SHIFT_MS if change.status is ScheduleChangeStatus.CANCELLED else -_SHIFT_MS
            self.outcomes[key] = change.status.name
        self._gap_ms = _GAP * cancelling_s * 1_000 / len(keys)

    def _send(self, keys: list[str], due_ms: list[int]) -> Sequence[str | None]:
        """Send a batch and return the handles. A message that is due when it arrives gets no handle."""
        messages = [
            Message(_TOPIC, b"x", {Property.KEYS: key, Property.TIMER_DELIVER_MS: str(due)})
            for key, due in zip(keys, due_ms, strict=True)
        ]
        handles = (self._broker.sends.send_batch(messages, timeout_ms=_TIMEOUT_MS).handle or "").split(",")
        return handles if len(handles) == len(keys) else [None] * len(keys)


def race(address: str, name: str, count: int) -> None:
    """In a process of its own: race, and print the outcomes."""
    with RemoteBroker(RemoteSettings(name_servers=(address,), request_timeout_ms=_TIMEOUT_MS)) as broker:
        racers = [Racer(broker, f"{name}-{number}") for number in range(_THREADS)]
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(lambda racer: racer.race(count // _THREADS), racers))
    print(json.dumps({key: status for racer in racers for key, status in racer.outcomes.items()}), flush=True)


def delivered(broker: RemoteBroker) -> Counter[str]:
    """Return how often each message is in its topic, once none is pending."""
    while broker.delayed.count_pending(PendingQuery(topic=_TOPIC)).total:
        time.sleep(0.1)
    found: Counter[str] = Counter()
    for queue in broker.queues(_TOPIC):
        found.update(_keys_of(broker, queue))
    return found


def _keys_of(broker: RemoteBroker, queue: MessageQueue) -> list[str]:
    keys: list[str] = []
    offset, end = 0, broker.reader.max_offset(queue)
    while offset < end:
        result = broker.reader.pull(queue, offset, _READ)
        keys += [message.keys or "" for message in result.messages]
        offset = result.next_begin_offset
    return keys


def measure(count: int) -> None:
    with scratch_folder() as folder:
        server, address = _start_server(folder)
        try:
            with RemoteBroker(RemoteSettings(name_servers=(address,))) as broker:
                broker.create_topic(_TOPIC, _QUEUES)
                start = time.perf_counter()
                outcomes = _race_in_processes(address, count)
                seconds = time.perf_counter() - start
                _report(outcomes, delivered(broker), seconds)
        finally:
            server.terminate()
            server.wait()


def _start_server(folder: Path) -> tuple[subprocess.Popen[str], str]:
    """Start a broker process; return it and the address of its name server."""
    settings = "mqtemplate:\n  broker: {flush-disk-type: ASYNC_FLUSH}\n"
    (folder / "application.yml").write_text(settings, encoding="utf-8")
    listen = ("--listen", "127.0.0.1:0", "--name-server", "127.0.0.1:0")
    command = [sys.executable, "-m", "mqtemplate", "broker", "--config", str(folder), "--store", str(folder / "store")]
    server = subprocess.Popen([*command, *listen], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    found = re.search(r"its name server on (\S+),", server.stdout.readline())
    if found is None:
        raise RuntimeError("the server did not start")
    threading.Thread(target=server.stdout.read, daemon=True).start()  # so that its output never blocks it
    return server, found[1]


def _race_in_processes(address: str, count: int) -> dict[str, str]:
    share = str(count // _PROCESSES)
    commands = [
        [sys.executable, "-m", "bench.cancel_race", "--race", address, f"p{n}", share] for n in range(_PROCESSES)
    ]
    racing = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    outcomes: dict[str, str] = {}
    for process in racing:
        printed, _ = process.communicate()
        outcomes |= json.loads(printed)
    return outcomes


def _report(outcomes: dict[str, str], found: Counter[str], seconds: float) -> None:
    cancelled = {key for key, status in outcomes.items() if status == ScheduleChangeStatus.CANCELLED.name}
    refused = {key for key, status in outcomes.items() if status == ScheduleChangeStatus.ALREADY_DELIVERED.name}
    report("races of a cancel and a delivery", len(outcomes), "", "")
    report("  in one second", len(outcomes) / seconds, "/s", "")
    report("  cancelled", len(cancelled), "", "")
    report("  delivered", len(refused), "", "")
    report("  another status", len(outcomes) - len(cancelled) - len(refused), "", "0")
    report("  both: cancelled and delivered", len(cancelled & found.keys()), "", "0")
    report("  neither: refused and not delivered", len(refused - found.keys()), "", "0")
    report("  twice: delivered more than once", sum(count > 1 for count in found.values()), "", "0")


def main() -> None:
    quiet()
    measure(int(sys.argv[1]) if len(sys.argv) > 1 else _RACES)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--race"]:
        quiet()
        race(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        run(main)
