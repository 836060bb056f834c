"""SIGKILLs while Spark listeners write tables: Delta, Iceberg, SQLite and Parquet have each message once.

    python -m bench.spark_exactly_once [--sink NAME] [--kills N] [--messages N] [--seed N]

The listeners are those of `examples/spark_tables.py`. A driver with an embedded broker runs them; the driver or its
JVM, or a Python worker of its tasks, is killed at random moments of a batch, and the driver is started again, until
each of the two kinds was killed N times. Delta and Iceberg need PySpark 4.1, see `bench/peer/packages/spark-tables`.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bench.measure import quiet, report, run, scratch_folder
from bench.peer.fetch import PACKAGES_FOLDER, fetch
from bench.spark_kill import Outcome, close, workers_of
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.message import Message, MessageQueue

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SMALL = {"mapped_file_size_commit_log": 4 << 20, "mapped_file_size_consume_queue": 200_000}
_ROOT = Path(__file__).parents[1]
_BATCH = 200
_EXTENSIONS = "spark.sql.extensions"
_ICEBERG = {
    _EXTENSIONS: "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
    "spark.sql.catalog.lake": "org.apache.iceberg.spark.SparkCatalog",
    "spark.sql.catalog.lake.type": "hadoop",
    "spark.sql.catalog.lake.warehouse": "lake",
}
_DELTA = {
    _EXTENSIONS: "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}


class Sink(NamedTuple):
    """A kind of table: its listener, its settings of Spark, and what creates and reads it."""

    listener: str
    conf: dict[str, str]
    create: Callable[[SparkSession], object]
    numbers: Callable[[SparkSession], list[int]]
    jars: tuple[str, ...] = ()  # starts of the names of its packages
    pyspark: str = ""  # the version that it needs


def _of(table: Any) -> list[int]:
    return [row.number for row in table.select("number").collect()]


def _create_iceberg(spark: SparkSession) -> None:
    columns = "topic string, queueId int, queueOffset bigint, number bigint"
    for name in ("orders", "merged_orders"):
        spark.sql(f"CREATE TABLE IF NOT EXISTS lake.shop.{name} ({columns}) USING iceberg")


def _create_database(_: object) -> None:
    with closing(sqlite3.connect("tables.db")) as database, database:
        database.execute("CREATE TABLE IF NOT EXISTS batches (query TEXT, batch INTEGER, PRIMARY KEY (query, batch))")
        for name in ("orders", "orders_of_a_batch"):
            columns = "topic TEXT, queueId INTEGER, queueOffset INTEGER, number INTEGER"
            database.execute(f"CREATE TABLE IF NOT EXISTS {name} ({columns})")


def _in_database(_: object) -> list[int]:
    with closing(sqlite3.connect("tables.db")) as database:
        return [number for (number,) in database.execute("SELECT number FROM orders")]


def _iceberg(listener: str, table: str) -> Sink:
    return Sink(listener, _ICEBERG, _create_iceberg, lambda spark: _of(spark.table(table)), ("iceberg",), "4.1")


def _nothing(_: object) -> None:
    """A write creates the table."""


SINKS = {
    "delta": Sink(
        "to_delta",
        _DELTA,
        _nothing,
        lambda spark: _of(spark.read.format("delta").load("tables/delta")),
        ("delta", "unitycatalog"),
        "4.1",
    ),
    "iceberg": _iceberg("to_iceberg", "lake.shop.orders"),
    "iceberg-merge": _iceberg("to_iceberg_by_merge", "lake.shop.merged_orders"),
    "jdbc": Sink("to_database", {}, _create_database, _in_database, ("sqlite",)),
    "parquet": Sink("to_parquet", {}, _nothing, lambda spark: _of(spark.read.parquet("tables/parquet"))),
}


def unavailable_reason(name: str) -> str | None:
    """Return why a sink cannot be run here, or None."""
    version = importlib.import_module("pyspark").__version__
    needed = SINKS[name].pyspark
    if needed and not version.startswith(needed):
        return f"{name} needs PySpark {needed}, this is {version}"
    return fetch("spark-tables", "Delta, Iceberg and SQLite's driver") if SINKS[name].jars else None


def _settings(sinks: list[Sink]) -> dict[str, str]:
    """Return the settings of Spark for these sinks."""
    found = {"spark.sql.warehouse.dir": "warehouse", "spark.python.authenticate.socketTimeout": "5m"}
    extensions = {sink.conf[_EXTENSIONS]: None for sink in sinks if _EXTENSIONS in sink.conf}
    for sink in sinks:
        found |= sink.conf
    if extensions:
        found[_EXTENSIONS] = ",".join(extensions)
    packages = tuple(name for sink in sinks for name in sink.jars)
    if packages:
        jars = [path for path in (PACKAGES_FOLDER / "spark-tables").glob("*.jar") if path.name.startswith(packages)]
        found["spark.jars"] = ",".join(str(path.resolve()) for path in sorted(jars))
    return found


def drive(*names: str) -> None:
    """Run the listeners of sinks until their tables have all messages; then write the numbers in them to a file."""
    quiet()
    from mqtemplate.spark import SparkListenerContainer, session

    sinks = [SINKS[name] for name in names]
    examples = importlib.import_module("examples.spark_tables")
    spark = session(master="local[2,4]", short_lived=True, **_settings(sinks))
    jvm = spark._jvm
    assert jvm is not None
    print(jvm.java.lang.ProcessHandle.current().pid(), flush=True)
    for sink in sinks:
        sink.create(spark)
    with EmbeddedBroker("store", EmbeddedSettings(checkpoint_interval_ms=200, **_SMALL)) as broker:
        containers = []
        for sink in sinks:
            has_begun = threading.Event()
            listener = _announced(getattr(examples, sink.listener), has_begun)
            containers.append(SparkListenerContainer(listener, spark, broker, "checkpoints"))
            containers[-1].start()
            # Each query starts Python processes, for which Spark waits 10 s: not all at once.
            while containers[-1].is_running and not has_begun.wait(0.2):
                pass
        for container in containers:
            container.await_idle()
            container.stop()
    found = {name: sink.numbers(spark) for name, sink in zip(names, sinks, strict=True)}
    Path("numbers.json").write_text(json.dumps(found))


def _announced(listener: Any, has_begun: threading.Event) -> Any:
    """Return the listener, which prints a line before and after its work."""

    @functools.wraps(listener)
    def announced(messages: Any, batch: Any) -> Any:
        has_begun.set()
        print("writes", batch.batch_id, flush=True)
        result = listener(messages, batch)
        print("has written", batch.batch_id, flush=True)
        return result

    return announced


def kill_rounds(folder: Path, names: list[str], kills: int, seed: int, *, count: int = 3_000) -> Outcome:
    """Kill driver or JVM, and Python workers, at random moments of batches, *kills* times each; tables a round."""
    chance, outcome = random.Random(seed), Outcome()
    rounds = 0
    while min(outcome.kills[kind] for kind in ("driver", "worker")) < kills:
        place = folder / str(rounds)
        _fill(place / "store", count)
        # Another one is the first each time: a driver may be killed before the others have begun.
        while (code := _run(place, chance.sample(names, len(names)), outcome, kills, chance)) != 0:
            print(f"{dict(outcome.kills)}, a driver ended with {code}", file=sys.stderr, flush=True)
        for numbers in json.loads((place / "numbers.json").read_text()).values():
            outcome.check(numbers, count)
        rounds += 1
    return outcome


def _fill(store: Path, count: int) -> None:
    with EmbeddedBroker(store, EmbeddedSettings(**_SMALL)) as broker:
        for queue_id in range(4):
            numbers = range(queue_id, count, 4)
            for start in range(0, len(numbers), 100):
                messages = [Message("orders", b"%d" % number) for number in numbers[start : start + 100]]
                broker.sends.send_batch(messages, MessageQueue("orders", broker.name, queue_id))


def _run(place: Path, names: list[str], outcome: Outcome, kills: int, chance: random.Random) -> int:
    """Start a driver, and kill it or its workers while it writes. Return its exit code: 0, all is written."""
    code = "import sys; from bench.spark_exactly_once import drive; drive(*sys.argv[1:])"
    path = os.pathsep.join([str(_ROOT), str(_ROOT / "starters"), os.environ.get("PYTHONPATH", "")])
    with (place / "errors.txt").open("a") as errors:
        driver = subprocess.Popen(
            [sys.executable, "-c", code, *names],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=place,
            env={**os.environ, "PYTHONPATH": path},
        )
    lines = _lines(driver)
    jvm = int(next(lines, "0"))
    until = chance.randint(1, 3)  # lines of batches before the first kill: a part of the batches succeeds
    for number, line in enumerate(lines):
        if not line.startswith(("writes", "has written")) or number < until:
            continue
        victims = [kind for kind in ("driver", "worker") if outcome.kills[kind] < kills]
        if victims:
            time.sleep(chance.uniform(0, 0.4))
            _kill(chance.choice(victims), driver, jvm, outcome, chance)
            until = number + chance.randint(1, 6)
    close(driver)
    return driver.returncode


def _lines(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stdout is not None
    for line in process.stdout:
        yield line.strip()


def _kill(kind: str, driver: subprocess.Popen[str], jvm: int, outcome: Outcome, chance: random.Random) -> None:
    workers = workers_of(jvm)
    pids = [driver.pid, jvm] if kind == "driver" else workers
    if not pids:
        return
    try:
        os.kill(chance.choice(pids), signal.SIGKILL)
    except ProcessLookupError:
        return
    outcome.kills[kind] += 1


def main() -> None:
    """Kill, and print what was lost and stored twice."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--sink", choices=[*SINKS, "all"], default="all", help="all: in one driver, at the same time")
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--messages", type=int, default=3_000, help="of a round")
    parser.add_argument("--seed", type=int, default=4_466)
    given = parser.parse_args()
    reasons = {name: unavailable_reason(name) for name in SINKS if given.sink in (name, "all")}
    for reason in filter(None, reasons.values()):
        print(f"not run: {reason}")
    if names := [name for name, reason in reasons.items() if reason is None]:
        with scratch_folder() as folder:
            outcome = kill_rounds(folder.resolve(), names, given.kills, given.seed, count=given.messages)
        print(
            f"{', '.join(names)}: killed {outcome.kills['driver']} drivers or JVMs, {outcome.kills['worker']} workers"
        )
        report("rows lost", len(outcome.lost), "", "0")
        report("rows twice", len(outcome.doubled), "", "0")


if __name__ == "__main__":
    run(main)
