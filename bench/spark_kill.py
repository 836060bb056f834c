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
from collections.abc import Callable
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


def write_tasks(port: str, partition: str, batches: str, rows: str) -> None:
    """Write one partition of each batch, as the tasks of a query do. A repeated process starts at the first batch."""
    quiet()
    import pyarrow as pa

    from mqtemplate.message import SendSequence
    from mqtemplate.spark.sink.options import SinkOptions
    from mqtemplate.spark.sink.writer import publish

    options = SinkOptions.parse({"nameServer": f"127.0.0.1:{port}", "topic": TARGET, "sendTimeoutMs": "60000"})
    for batch in range(int(batches)):
        first = (batch * _PARTITIONS + int(partition)) * int(rows)
        numbers = range(first, first + int(rows))
        parts = (
            pa.RecordBatch.from_pydict({"body": [str(number) for number in numbers[start : start + _ROWS_AT_ONCE]]})
            for start in range(0, len(numbers), _ROWS_AT_ONCE)
        )
        # Each partition is an application of its own here: the tasks of a batch do not wait for each other.
        publish(parts, options, SendSequence(f"query-{partition}", batch, int(partition)))


def sink_kill_rounds(folder: Path, port: int, kills: int, seed: int, batches: int = 20, rows: int = 1_000) -> Outcome:
    """Kill writers and the server at random moments until they have written everything."""
    chance, outcome = random.Random(seed), Outcome()
    server = _start(serve, folder, port)
    _await_line(server)
    arguments = [[port, partition, batches, rows] for partition in range(_PARTITIONS)]
    writers = [_start(write_tasks, *each) for each in arguments]
    deadline = time.monotonic() + _TIMEOUT_S
    while any(writer.poll() != 0 for writer in writers):
        assert time.monotonic() < deadline, "the writers did not finish"
        time.sleep(chance.uniform(0.02, 0.4))
        if sum(outcome.kills.values()) < kills:
            victim = chance.randrange(_PARTITIONS + 1)
            if victim == _PARTITIONS:
                _kill(server)
                outcome.kills["server"] += 1
                server = _start(serve, folder, port)
                _await_line(server)
            elif writers[victim].poll() is None:
                _kill(writers[victim])
                outcome.kills["executor"] += 1
        for partition, writer in enumerate(writers):
            if writer.poll() not in (None, 0):
                _close(writer)
                writers[partition] = _start(write_tasks, *arguments[partition])
    _kill(server)
    for writer in writers:
        _close(writer)
    with EmbeddedBroker(folder, EmbeddedSettings(**_SMALL)) as broker:
        outcome.check(_numbers(broker, TARGET), _PARTITIONS * batches * rows)
    return outcome


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
    """Kill driver, JVM and Python workers at random moments of the query until it has copied everything."""
    chance, outcome = random.Random(seed), Outcome()
    with EmbeddedBroker(folder / "store", EmbeddedSettings(**_SMALL)) as broker:
        for queue in broker.queues(SOURCE):
            numbers = range(queue.queue_id, count, 4)
            for start in range(0, len(numbers), 100):
                messages = [Message(SOURCE, b"%d" % number) for number in numbers[start : start + 100]]
                broker.send_batch(messages, MessageQueue(SOURCE, broker.name, queue.queue_id))
    driver = _start(copy_and_listen, folder)
    while (exit_code := driver.poll()) != 0:
        if exit_code is not None:
            _close(driver)
            driver = _start(copy_and_listen, folder)
        if sum(outcome.kills.values()) < kills:
            jvm = int(_await_line(driver) or 0)
            time.sleep(chance.uniform(0.5, 8))
            victim = chance.choice(["driver", "jvm", "executor"])
            if _kill_one(victim, driver, jvm, chance):
                outcome.kills[victim] += 1
        driver.wait(_TIMEOUT_S)
    _close(driver)
    with EmbeddedBroker(folder / "store", EmbeddedSettings(**_SMALL)) as broker:
        outcome.check(_numbers(broker, TARGET), count)
    handled = [json.loads(path.read_text()) for path in (folder / "batches").iterdir() if not path.suffix]
    outcome.check([number for batch in handled for number in batch], count)
    return outcome


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
        (folder / "sink").mkdir()
        (folder / "query").mkdir()
        for name, outcome in (
            ("tasks of the sink, our server", sink_kill_rounds(folder / "sink", port, 3 * number, seed, 200)),
            ("query and listener, embedded", query_kill_rounds(folder / "query", 3 * number, seed)),
        ):
            killed = ", ".join(f"{count} {victim}" for victim, count in sorted(outcome.kills.items()))
            print(f"{name}: killed {killed or 'nothing'}", flush=True)
            report(f"{name}: rows lost", len(outcome.lost), "", "0")
            report(f"{name}: rows stored twice", len(outcome.doubled), "", "0")


if __name__ == "__main__":
    run(main)
