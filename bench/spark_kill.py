"""SIGKILLs while Spark writes to topics: each row is stored once, on the embedded broker and on our server.

Three parts. In the first, writer processes run the sink's own code for tasks, as executors do, and a server process
stores the rows; at random moments a writer or the server is killed. In the second, a streaming query of Spark copies
one topic to another through the sink, and a listener appends the numbers that it got to a file for each
``(query_id, batch_id)``; the driver (which owns the embedded broker), its JVM or one of its Python workers is killed.
The third is the second on our server, which is killed, too.

    python -m bench.spark_kill [KILLS] [SEED] [PART]

KILLS of each kind, 50 by default; PART is ``sink``, ``embedded`` or ``server``, by default all of them.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from bench.measure import quiet, report, run, scratch_folder
from bench.peer.rocketmq import free_port
from mqtemplate.broker import Broker
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings, RemoteBroker, RemoteSettings
from mqtemplate.message import HostAddress, Message, MessageQueue
from mqtemplate.server import BrokerServerSettings, LocalCluster
from mqtemplate.testing import messages_in

SOURCE, TARGET = "source", "target"
_SMALL = {"mapped_file_size_commit_log": 4 << 20, "mapped_file_size_consume_queue": 200_000}
_PARTITIONS, _ROWS_AT_ONCE = 2, 200
_TIMEOUT_S = 600
_VICTIMS = ("driver", "jvm", "executor")


@dataclass
class Outcome:
    """Result of all rounds: kills by victim, the rows, and the numbers of those that are missing or stored twice."""

    kills: Counter[str] = field(default_factory=Counter)
    rows: int = 0
    lost: list[int] = field(default_factory=list)
    doubled: list[int] = field(default_factory=list)

    def check(self, numbers: list[int], count: int) -> None:
        """Compare the stored numbers with 0..count-1."""
        found = Counter(numbers)
        self.rows += len(numbers)
        self.lost += [number for number in range(count) if not found[number]]
        self.doubled += [number for number, times in found.items() if times > 1]


# --- the sink's tasks, without Spark ----------------------------------------------------------------


def serve(folder: str, port: str) -> None:
    """Run a server until it is killed."""
    quiet()
    address = HostAddress("127.0.0.1", int(port))
    engine = EmbeddedBroker(folder, EmbeddedSettings(listen_host=address, checkpoint_interval_ms=200, **_SMALL))
    with LocalCluster(engine, BrokerServerSettings(listen=address)):
        print("serving", flush=True)
        signal.pause()


def write_tasks(port: str, progress: str, partition: str, batches: str, rows: str) -> None:
    """Write one partition of each batch, as tasks do. A repeated process repeats the unfinished batch."""
    quiet()
    import pyarrow as pa

    from mqtemplate.message import SendSequence
    from mqtemplate.spark.sink.options import SinkOptions
    from mqtemplate.spark.sink.writer import publish

    finished = Path(progress, f"finished-{partition}")
    options = SinkOptions.parse({"nameServer": f"127.0.0.1:{port}", "topic": TARGET, "sendTimeoutMs": "60000"})
    for batch in range(int(finished.read_text()) if finished.exists() else 0, int(batches)):
        first = (batch * _PARTITIONS + int(partition)) * int(rows)
        numbers = range(first, first + int(rows))
        parts = (
            pa.RecordBatch.from_pydict({"body": [str(number) for number in numbers[start : start + _ROWS_AT_ONCE]]})
            for start in range(0, len(numbers), _ROWS_AT_ONCE)
        )
        # Each partition is an application of its own here: the tasks of a batch do not wait for each other.
        publish(parts, options, SendSequence(f"query-{partition}", batch, int(partition)))
        fresh = finished.with_suffix(".new")
        fresh.write_text(str(batch + 1))
        fresh.replace(finished)
        print("published", flush=True)


def sink_kill_rounds(folder: Path, port: int, kills: int, seed: int, batches: int = 60, rows: int = 1_000) -> Outcome:
    """Kill writers and the server while they publish, *kills* times each; a topic of *batches* a round."""
    chance, outcome = random.Random(seed), Outcome()
    rounds = 0
    while _remaining(outcome, ("executor", "server"), kills):
        place = folder / str(rounds)
        (place / "progress").mkdir(parents=True)
        _publish_round(place, port, outcome, kills, chance, (batches, rows))
        rounds += 1
    return outcome


def _publish_round(
    place: Path, port: int, outcome: Outcome, kills: int, chance: random.Random, size: tuple[int, int]
) -> None:
    """Publish batches in spite of the kills, and check what was stored."""

    def writer(partition: int) -> subprocess.Popen[str]:
        return _start(write_tasks, port, place / "progress", partition, *size)

    store = place / "store"
    server = _serving(store, port)
    writers = [writer(partition) for partition in range(_PARTITIONS)]
    deadline = time.monotonic() + _TIMEOUT_S
    while any(each.poll() != 0 for each in writers):
        assert time.monotonic() < deadline, "the writers did not finish"
        victims = _remaining(outcome, ("executor", "server"), kills)
        if victims:
            _await_line(writers[chance.randrange(_PARTITIONS)])  # it publishes, or has ended
        time.sleep(chance.uniform(0.0, 0.5))
        victim = chance.choice(victims) if victims else None
        if victim is not None:
            deadline = time.monotonic() + _TIMEOUT_S  # it guards against a writer that hangs; kills take their time
        partition = chance.randrange(_PARTITIONS)
        if victim == "server":
            _kill(server)
            outcome.kills["server"] += 1
            server = _serving(store, port)
        elif victim == "executor" and writers[partition].poll() is None:
            _kill(writers[partition])
            outcome.kills["executor"] += 1
        for number, each in enumerate(writers):
            if each.poll() not in (None, 0):
                close(each)
                writers[number] = writer(number)
    _kill(server)
    for each in writers:
        close(each)
    with EmbeddedBroker(store, EmbeddedSettings(**_SMALL)) as broker:
        outcome.check(_numbers(broker, TARGET), _PARTITIONS * size[0] * size[1])


def _serving(store: Path, port: int) -> subprocess.Popen[str]:
    server = _start(serve, store, port)
    _await_line(server)
    return server


def _remaining(outcome: Outcome, victims: Sequence[str], kills: int) -> list[str]:
    return [victim for victim in victims if outcome.kills[victim] < kills]


# --- a query of Spark -------------------------------------------------------------------------------


def copy_and_listen(folder: str, address: str = "") -> None:
    """Copy a topic through the sink, and let a listener note the numbers of its batches; end when all is copied.

    Args:
        address: Our server; without it this process opens the folder.
    """
    quiet()
    if address:
        with RemoteBroker(RemoteSettings(name_servers=(address,))) as client:
            _copy_and_listen(Path(folder), client, {"nameServer": address})
    else:
        store = Path(folder, "store")
        with EmbeddedBroker(store, EmbeddedSettings(checkpoint_interval_ms=200, **_SMALL)) as broker:
            _copy_and_listen(Path(folder), broker, {"store": str(store)})


def _copy_and_listen(root: Path, broker: Broker, place: dict[str, str]) -> None:
    from mqtemplate.spark import AVAILABLE_NOW, SparkBatch, SparkListenerContainer, session, spark_listener

    @spark_listener(SOURCE, "counting", trigger=AVAILABLE_NOW, max_offsets_per_trigger=500)
    def count(messages: object, batch: SparkBatch) -> None:
        numbers = sorted(int(row.body) for row in messages.select("body").collect())  # type: ignore[attr-defined]
        target = root / "batches" / f"{batch.query_id}-{batch.batch_id}"
        target.with_suffix(".new").write_text(json.dumps(numbers))
        target.with_suffix(".new").replace(target)

    (root / "batches").mkdir(exist_ok=True)
    spark = session(master="local[2]", short_lived=True)
    jvm = spark._jvm
    assert jvm is not None
    print(jvm.java.lang.ProcessHandle.current().pid(), flush=True)
    container = SparkListenerContainer(count, spark, broker, root / "checkpoints")
    container.start()
    query = (
        spark.readStream.format("mqtemplate")
        .options(**place, topic=SOURCE, maxOffsetsPerTrigger=500)
        .load()
        .select("body")
        .writeStream.format("mqtemplate")
        .options(**place, topic=TARGET, checkpointLocation=str(root / "copy"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    container.await_idle()
    container.stop()


def query_kill_rounds(folder: Path, kills: int, seed: int, count: int = 10_000, port: int | None = None) -> Outcome:
    """Kill driver, JVM and Python workers at random moments of the query, *kills* times each; a topic a round.

    Args:
        port: For our server, which is killed as well; None: the driver owns an embedded broker.
    """
    chance, outcome = random.Random(seed), Outcome()
    rounds = 0
    while _remaining(outcome, _victims(port), kills):
        _copy_round(folder / str(rounds), outcome, kills, chance, count, port)
        rounds += 1
        print(f"after {rounds} rounds of the query: {outcome}", file=sys.stderr, flush=True)
    return outcome


def _victims(port: int | None) -> Sequence[str]:
    return _VICTIMS if port is None else (*_VICTIMS, "server")


def _copy_round(
    folder: Path, outcome: Outcome, kills: int, chance: random.Random, count: int, port: int | None
) -> None:
    """Copy a topic of *count* messages in spite of the kills, and check the copy and the listener's batches."""
    with EmbeddedBroker(folder / "store", EmbeddedSettings(**_SMALL)) as broker:
        for queue in broker.queues(SOURCE):
            numbers = range(queue.queue_id, count, 4)
            for start in range(0, len(numbers), 100):
                messages = [Message(SOURCE, b"%d" % number) for number in numbers[start : start + 100]]
                broker.sends.send_batch(messages, MessageQueue(SOURCE, broker.name, queue.queue_id))
    with _ServerOfRound(folder / "store", port) as server:
        while _run_driver(folder, outcome, kills, chance, server) != 0:
            pass
    with EmbeddedBroker(folder / "store", EmbeddedSettings(**_SMALL)) as broker:
        outcome.check(_numbers(broker, TARGET), count)
    handled = [json.loads(path.read_text()) for path in (folder / "batches").iterdir() if not path.suffix]
    outcome.check([number for batch in handled for number in batch], count)


class _ServerOfRound:
    """Our server in a process of its own, if there is a port for it."""

    def __init__(self, store: Path, port: int | None) -> None:
        self._store, self.port = store, port
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        if self.port is not None:
            self._process = _serving(self._store, self.port)
        return self

    def restart(self) -> None:
        """Kill the server, and start it again."""
        assert self._process is not None
        _kill(self._process)
        self._process = _serving(self._store, self.port or 0)

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            _kill(self._process)


def _run_driver(folder: Path, outcome: Outcome, kills: int, chance: random.Random, server: _ServerOfRound) -> int:
    """Start a driver and kill it, its JVM, its workers or the server until it ends. Return its exit code."""
    driver = _start(copy_and_listen, folder, *([] if server.port is None else [f"127.0.0.1:{server.port}"]))
    jvm = int(_await_line(driver) or 0)
    progress = _Progress(folder)
    deadline = time.monotonic() + _TIMEOUT_S
    while driver.poll() is None:
        assert time.monotonic() < deadline, "the driver did not end"
        time.sleep(0.02)
        if not (victims := _remaining(outcome, _victims(server.port), kills)) or not progress.has_grown():
            continue
        time.sleep(chance.uniform(0, 1))
        victim = chance.choice(victims)
        if victim == "server":
            server.restart()
            outcome.kills[victim] += 1
        elif _kill_one(victim, driver, jvm, chance):
            outcome.kills[victim] += 1
    close(driver)
    return driver.returncode


class _Progress:
    """Batches that both queries have finished: a kill before the first one hits a start of Spark only."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known = self._count()

    def _count(self) -> int:
        finished = (*self._folder.glob("batches/*"), *self._folder.glob("copy/commits/[0-9]*"))
        return len([path for path in finished if not path.suffix])

    def has_grown(self) -> bool:
        """Return True if a batch was finished since the last call that returned True."""
        known, self._known = self._known, max(self._known, self._count())
        return self._known > known


def _kill_one(victim: str, driver: subprocess.Popen[str], jvm: int, chance: random.Random) -> bool:
    """Kill the driver, its JVM or a Python worker of the JVM. The driver ends with its JVM."""
    workers = workers_of(jvm)
    pid = {"driver": driver.pid, "jvm": jvm}.get(victim) or (chance.choice(workers) if workers else None)
    if pid is None or driver.poll() is not None:
        return False
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def workers_of(jvm: int) -> list[int]:
    """Return the Python workers of a JVM, which processes of it start."""
    return children_of(children_of([jvm]))


def children_of(parents: list[int]) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
        if int(fields[1]) in parents:
            found.append(int(path.parent.name))
    return found


# --- processes --------------------------------------------------------------------------------------


def _start(work: Callable[..., None], *arguments: object) -> subprocess.Popen[str]:
    code = f"import sys; from bench.spark_kill import {work.__name__} as work; work(*sys.argv[1:])"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def _await_line(process: subprocess.Popen[str]) -> str:
    """Return the next line that a process prints; empty if it has ended, perhaps just before it was to be killed."""
    assert process.stdout is not None
    return "" if process.stdout.closed else process.stdout.readline().strip()


def _kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    close(process)


def close(process: subprocess.Popen[str]) -> None:
    """Wait until a process has ended."""
    process.wait(_TIMEOUT_S)
    assert process.stdout is not None
    process.stdout.close()


def _numbers(broker: EmbeddedBroker, topic: str) -> list[int]:
    return [int(message.body) for message in messages_in(broker, topic)]


def main() -> None:
    """Run the parts and print what was lost and stored twice."""
    number, seed = (int(text) for text in [*sys.argv[1:3], *("50", "4466")[len(sys.argv[1:3]) :]])
    wanted = sys.argv[3:] or ["sink", "embedded", "server"]
    port = free_port()
    with scratch_folder() as folder:
        parts: dict[str, tuple[str, Callable[[], Outcome]]] = {
            "sink": ("tasks of the sink, our server", lambda: sink_kill_rounds(folder / "sink", port, number, seed)),
            "embedded": ("query and listener, embedded", lambda: query_kill_rounds(folder / "query", number, seed)),
            "server": (
                "query and listener, our server",
                lambda: query_kill_rounds(folder / "server", number, seed, port=port),
            ),
        }
        for name, part in (parts[name] for name in wanted):
            outcome = part()
            killed = ", ".join(f"{count} {victim}" for victim, count in sorted(outcome.kills.items()))
            print(f"{name}: killed {killed or 'nothing'}", flush=True)
            report(f"{name}: rows lost", len(outcome.lost), "", "0")
            report(f"{name}: rows stored twice", len(outcome.doubled), "", "0")


if __name__ == "__main__":
    run(main)
