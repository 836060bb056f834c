"""SIGKILLs while Spark writes to topics: each row is stored once, on the embedded broker and on our server.

Two parts. In the first, writer processes run the sink's own code for tasks, as executors do, and a server process
stores the rows; at random moments a writer or the server is killed. In the second, a streaming query of Spark copies
one topic to another through the sink, and a listener appends the numbers that it got to a file for each
``(query_id, batch_id)``; the driver (which owns the embedded broker), its JVM or one of its Python workers is killed.

    python -m bench.spark_kill [KILLS] [SEED]      KILLS of each kind; 50 by default
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.measure import quiet, report, run, scratch_folder
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
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
    """Result of all rounds: kills by victim, and the numbers of rows that are missing or stored twice."""

    kills: Counter[str] = field(default_factory=Counter)
    lost: list[int] = field(default_factory=list)
    doubled: list[int] = field(default_factory=list)

    def check(self, numbers: list[int], count: int) -> None:
        """Compare the stored numbers with 0..count-1."""
        found = Counter(numbers)
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
                _close(each)
                writers[number] = writer(number)
    _kill(server)
    for each in writers:
        _close(each)
    with EmbeddedBroker(store, EmbeddedSettings(**_SMALL)) as broker:
        outcome.check(_numbers(broker, TARGET), _PARTITIONS * size[0] * size[1])


def _serving(store: Path, port: int) -> subprocess.Popen[str]:
    server = _start(serve, store, port)
    _await_line(server)
    return server


def _remaining(outcome: Outcome, victims: Sequence[str], kills: int) -> list[str]:
    return [victim for victim in victims if outcome.kills[victim] < kills]


# --- a query of Spark -------------------------------------------------------------------------------


def copy_and_listen(folder: str) -> None:
    """Copy a topic through the sink, and let a listener note the numbers of its batches; end when all is copied."""
    quiet()
    from mqtemplate.spark import AVAILABLE_NOW, SparkBatch, SparkListenerContainer, session, spark_listener

    root = Path(folder)

    @spark_listener(SOURCE, "counting", trigger=AVAILABLE_NOW, max_offsets_per_trigger=500)
    def count(messages: object, batch: SparkBatch) -> None:
        numbers = sorted(int(row.body) for row in messages.select("body").collect())  # type: ignore[attr-defined]
        target = root / "batches" / f"{batch.query_id}-{batch.batch_id}"
        target.with_suffix(".new").write_text(json.dumps(numbers))
        target.with_suffix(".new").replace(target)

    (root / "batches").mkdir(exist_ok=True)
    with EmbeddedBroker(root / "store", EmbeddedSettings(checkpoint_interval_ms=200, **_SMALL)) as broker:
        spark = session(master="local[2]", short_lived=True)
        jvm = spark._jvm
        assert jvm is not None
        print(jvm.java.lang.ProcessHandle.current().pid(), flush=True)
        container = SparkListenerContainer(count, spark, broker, root / "checkpoints")
        container.start()
        messages = spark.readStream.format("mqtemplate").options(store=str(broker.path), topic=SOURCE)
        query = (
            messages.option("maxOffsetsPerTrigger", 500)
            .load()
            .select("body")
            .writeStream.format("mqtemplate")
            .options(store=str(broker.path), topic=TARGET, checkpointLocation=str(root / "copy"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        container.await_idle()
        container.stop()


def query_kill_rounds(folder: Path, kills: int, seed: int, count: int = 20_000) -> Outcome:
    """Kill driver, JVM and Python workers at random moments of the query, *kills* times each; a topic a round."""
    chance, outcome = random.Random(seed), Outcome()
    rounds = 0
    while _remaining(outcome, _VICTIMS, kills):
        _copy_round(folder / str(rounds), outcome, kills, chance, count)
        rounds += 1
    return outcome


def _copy_round(folder: Path, outcome: Outcome, kills: int, chance: random.Random, count: int) -> None:
    """Copy a topic of *count* messages in spite of the kills, and check the copy and the listener's batches."""
    with EmbeddedBroker(folder / "store", EmbeddedSettings(**_SMALL)) as broker:
        for queue in broker.queues(SOURCE):
            numbers = range(queue.queue_id, count, 4)
            for start in range(0, len(numbers), 100):
                messages = [Message(SOURCE, b"%d" % number) for number in numbers[start : start + 100]]
                broker.send_batch(messages, MessageQueue(SOURCE, broker.name, queue.queue_id))
    while _run_driver(folder, outcome, kills, chance) != 0:
        pass
    with EmbeddedBroker(folder / "store", EmbeddedSettings(**_SMALL)) as broker:
        outcome.check(_numbers(broker, TARGET), count)
    handled = [json.loads(path.read_text()) for path in (folder / "batches").iterdir() if not path.suffix]
    outcome.check([number for batch in handled for number in batch], count)


def _run_driver(folder: Path, outcome: Outcome, kills: int, chance: random.Random) -> int:
    """Start a driver and kill it, its JVM or its workers until it ends. Return its exit code."""
    driver = _start(copy_and_listen, folder)
    jvm = int(_await_line(driver) or 0)
    deadline = time.monotonic() + _TIMEOUT_S
    while driver.poll() is None:
        assert time.monotonic() < deadline, "the driver did not end"
        time.sleep(chance.uniform(0.2, 5))
        if victims := _remaining(outcome, _VICTIMS, kills):
            victim = chance.choice(victims)
            if _kill_one(victim, driver, jvm, chance):
                outcome.kills[victim] += 1
    _close(driver)
    return driver.returncode


def _kill_one(victim: str, driver: subprocess.Popen[str], jvm: int, chance: random.Random) -> bool:
    """Kill the driver, its JVM or a Python worker of the JVM. The driver ends with its JVM."""
    workers = _children(_children([jvm]))
    pid = {"driver": driver.pid, "jvm": jvm}.get(victim) or (chance.choice(workers) if workers else None)
    if pid is None or driver.poll() is not None:
        return False
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _children(parents: list[int]) -> list[int]:
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
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    _close(process)


def _close(process: subprocess.Popen[str]) -> None:
    process.wait(_TIMEOUT_S)
    assert process.stdout is not None
    process.stdout.close()


def _numbers(broker: EmbeddedBroker, topic: str) -> list[int]:
    return [int(message.body) for message in messages_in(broker, topic)]


def main() -> None:
    """Run both parts and print what was lost and stored twice."""
    number, seed = (int(text) for text in [*sys.argv[1:], *("50", "4466")[len(sys.argv) - 1 :]])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with scratch_folder() as folder:
        parts: dict[str, Callable[[], Outcome]] = {
            "tasks of the sink, our server": lambda: sink_kill_rounds(folder / "sink", port, number, seed),
            "query and listener, embedded": lambda: query_kill_rounds(folder / "query", number, seed),
        }
        for name, part in parts.items():
            outcome = part()
            killed = ", ".join(f"{count} {victim}" for victim, count in sorted(outcome.kills.items()))
            print(f"{name}: killed {killed or 'nothing'}", flush=True)
            report(f"{name}: rows lost", len(outcome.lost), "", "0")
            report(f"{name}: rows stored twice", len(outcome.doubled), "", "0")


if __name__ == "__main__":
    run(main)
