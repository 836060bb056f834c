"""SIGKILLs while Spark writes tables: Delta, Iceberg, PostgreSQL and Parquet have each message once.

    python -m bench.spark_exactly_once [--sink NAME] [--kills N] [--minutes N] [--messages N] [--seed N]

The listeners and the stream are those of `examples/spark_tables.py`. A driver with an embedded broker runs them on two
executors, which are processes of their own. At random moments the driver or its JVM is killed, or an executor or one of
its Python workers; a new driver starts when the JVM of the old one has ended. A kill counts for each table with a batch
that is planned and not committed at that moment. Delta and Iceberg need PySpark 4.1, see `bench/peer/packages`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bench.measure import quiet, report, run, scratch_folder
from bench.peer.fetch import PACKAGES_FOLDER, fetch
from bench.spark_kill import Outcome, children_of, close
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.message import Message, MessageQueue
from mqtemplate.spark.listening.checkpoint import QueryCheckpoint
from tests.outbox.postgres import binaries, postgres_server
from tests.waiting import Patience, eventually

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SMALL = {"mapped_file_size_commit_log": 4 << 20, "mapped_file_size_consume_queue": 200_000}
_ROOT = Path(__file__).parents[1]
_MASTER = "local-cluster[2,1,1024]"
_KINDS = ("driver", "executor")
_STUCK_S = 600
_MOMENT_S = 60.0
"""Most time to wait for a moment at which all tables are in a batch: a kill then counts for each of them."""
_EXTENSIONS = "spark.sql.extensions"
_ICEBERG = {
    _EXTENSIONS: "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
    "spark.sql.catalog.lake": "org.apache.iceberg.spark.SparkCatalog",
    "spark.sql.catalog.lake.type": "hadoop",
}
_DELTA = {
    _EXTENSIONS: "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}


class Sink(NamedTuple):
    """A kind of table: its listener or stream, its settings of Spark, and what creates and reads it."""

    function: str
    conf: dict[str, str]
    create: Callable[[SparkSession], object]
    numbers: Callable[[SparkSession], list[int]]
    jars: tuple[str, ...] = ()  # starts of the names of its packages
    pyspark: str = ""  # the version that it needs
    is_stream: bool = False  # a stream of its own, not a listener


def _of(table: Any) -> list[int]:
    return [row.number for row in table.select("number").collect()]


def _create_iceberg(spark: SparkSession) -> None:
    columns = "topic string, queueId int, queueOffset bigint, number bigint"
    for name in ("orders", "merged_orders", "streamed_orders"):
        spark.sql(f"CREATE TABLE IF NOT EXISTS lake.shop.{name} ({columns}) USING iceberg")


@contextmanager
def _database() -> Iterator[Any]:
    psycopg = importlib.import_module("psycopg")
    with psycopg.connect(f"postgresql://{os.environ['DATABASE']}") as database:
        yield database


def _create_database(_: object) -> None:
    orders = "topic TEXT, queueid INTEGER, queueoffset BIGINT, number BIGINT"
    batch = "query TEXT, batch BIGINT"
    with _database() as database:
        database.execute(f"CREATE TABLE IF NOT EXISTS batches ({batch}, PRIMARY KEY (query, batch))")
        database.execute(f"CREATE TABLE IF NOT EXISTS orders ({orders})")
        database.execute(f"CREATE TABLE IF NOT EXISTS orders_of_a_batch ({orders}, {batch})")


def _in_database(_: object) -> list[int]:
    with _database() as database:
        return [number for (number,) in database.execute("SELECT number FROM orders")]


def _iceberg(function: str, table: str, *, is_stream: bool = False) -> Sink:
    numbers = lambda spark: _of(spark.table(table))  # noqa: E731
    return Sink(function, _ICEBERG, _create_iceberg, numbers, ("iceberg",), "4.1", is_stream)


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
    "iceberg-stream": _iceberg("stream_to_iceberg", "lake.shop.streamed_orders", is_stream=True),
    "postgresql": Sink("to_postgresql", {}, _create_database, _in_database, ("postgresql",)),
    "parquet": Sink("to_parquet", {}, _nothing, lambda spark: _of(spark.read.parquet("tables/parquet"))),
}
"""Sinks by the name of their group, which is a part of the name of their checkpoint."""


def unavailable_reason(name: str) -> str | None:
    """Return why a sink cannot be run here, or None."""
    version = importlib.import_module("pyspark").__version__
    needed = SINKS[name].pyspark
    if needed and not version.startswith(needed):
        return f"{name} needs PySpark {needed}, this is {version}"
    if name == "postgresql" and binaries() is None:
        return "postgresql needs a server (Debian: apt-get install postgresql)"
    return fetch("spark-tables", "Delta, Iceberg and PostgreSQL's driver") if SINKS[name].jars else None


# --- the driver -------------------------------------------------------------------------------------


def _settings(sinks: list[Sink]) -> dict[str, str]:
    """Return the settings of Spark for these sinks. Executors have other working directories."""
    found = {
        "spark.executor.memory": "768m",
        "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",  # they do not live long
        "spark.python.authenticate.socketTimeout": "5m",
        "spark.sql.warehouse.dir": "warehouse",
        "spark.sql.catalog.lake.warehouse": str(Path("lake").absolute()),
        # A killed executor counts as a failure, of its tasks and of the application.
        "spark.task.maxFailures": "8",
        "spark.deploy.maxExecutorRetries": "-1",
    }
    extensions = {sink.conf[_EXTENSIONS]: None for sink in sinks if _EXTENSIONS in sink.conf}
    for sink in sinks:
        found |= sink.conf
    if extensions:
        found[_EXTENSIONS] = ",".join(extensions)
    packages = tuple(name for sink in sinks for name in sink.jars)
    if packages:
        jars = [path for path in (PACKAGES_FOLDER / "spark-tables").glob("*.jar") if path.name.startswith(packages)]
        # "local:" is a file that all processes see: an executor starts without a copy of it.
        found["spark.jars"] = ",".join(f"local:{path.resolve()}" for path in sorted(jars))
    return found


def drive(*names: str) -> None:
    """Write tables until they have all messages; then write the numbers in them to a file."""
    quiet()
    from mqtemplate.spark import session

    sinks = [SINKS[name] for name in names]
    spark = session(master=_MASTER, short_lived=True, **_settings(sinks))
    jvm = spark._jvm
    assert jvm is not None
    print(jvm.java.lang.ProcessHandle.current().pid(), flush=True)
    for sink in sinks:
        sink.create(spark)
    store = Path("store").absolute()
    with EmbeddedBroker(store, EmbeddedSettings(checkpoint_interval_ms=200, **_SMALL)) as broker:
        ends = []
        for name in names:
            ends.append(_start(name, spark, broker))
            # Each query starts a Python process, for which Spark waits 10 s: not all at once.
            while any(query.status["message"].startswith("Initializing") for query in spark.streams.active):
                time.sleep(0.2)
        for end in ends:
            end()
    found = {name: sink.numbers(spark) for name, sink in zip(names, sinks, strict=True)}
    Path("numbers.json").write_text(json.dumps(found))


def _start(name: str, spark: SparkSession, broker: EmbeddedBroker) -> Callable[[], None]:
    """Start a listener or a stream. Return the function that waits until all messages are handled, and ends it."""
    from mqtemplate.spark import SparkListenerContainer

    function = getattr(importlib.import_module("examples.spark_tables"), SINKS[name].function)
    if SINKS[name].is_stream:
        query = function(spark, str(broker.path), str(_checkpoint(Path.cwd(), name).folder))

        def end() -> None:
            query.processAllAvailable()
            query.stop()

        return end
    container = SparkListenerContainer(function, spark, broker, "checkpoints")
    container.start()

    def end_listener() -> None:
        container.await_idle()
        container.stop()

    return end_listener


def _checkpoint(place: Path, name: str) -> QueryCheckpoint:
    return QueryCheckpoint(place / "checkpoints" / f"{name}@orders")


# --- the kills --------------------------------------------------------------------------------------


@dataclass
class _Kills:
    """Kills of a run: how many more there are to be, and what they have hit.

    Attributes:
        folders: Folders of Spark for the executors, in which it leaves copies of jars.
    """

    names: list[str]
    wanted: int
    chance: random.Random
    until: float
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    folders: set[Path] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.outcomes = {name: Outcome() for name in self.names}

    def left(self) -> list[str]:
        """Return the kinds that are to be killed again."""
        if time.monotonic() > self.until:
            return []
        return [kind for kind in _KINDS if any(each.kills[kind] < self.wanted for each in self.outcomes.values())]

    def executors_of(self, jvm: int) -> list[int]:
        """Return the executors of a driver, and note their folders."""
        executors = [pid for pid in children_of([jvm]) if b"CoarseGrainedExecutorBackend" in _command_of(pid)]
        for executor in executors:
            with suppress(OSError):  # it has ended
                self.folders.add(Path(f"/proc/{executor}/cwd").readlink().parent)
        return executors

    def kill(self, driver: subprocess.Popen[str], jvm: int, place: Path) -> None:
        """Kill a process when it hits a batch of most tables that need it, and count it for each table that it hits."""
        kinds = self.left()
        if not kinds:
            return
        kind = self.chance.choice(kinds)
        needed = {name for name in self.names if self.outcomes[name].kills[kind] < self.wanted}
        limit = time.monotonic() + _MOMENT_S
        while not needed.issubset(hit := [name for name in self.names if _is_in_batch(place, name)]):
            if time.monotonic() > limit or driver.poll() is not None:
                break
            time.sleep(0.05)
        executors = self.executors_of(jvm)
        victims = [driver.pid, jvm] if kind == "driver" else [*executors, *children_of(children_of(executors))]
        if not victims or 2 * len(needed.intersection(hit)) < len(needed):
            return
        try:
            os.kill(self.chance.choice(victims), signal.SIGKILL)
        except ProcessLookupError:  # it has ended
            return
        for name in hit:
            self.outcomes[name].kills[kind] += 1

    def __str__(self) -> str:
        return ", ".join(
            f"{name} {each.kills['driver']}+{each.kills['executor']}" for name, each in self.outcomes.items()
        )


def kill_rounds(
    folder: Path, names: list[str], kills: int, seed: int, *, count: int = 3_000, minutes: float = 1_000
) -> dict[str, Outcome]:
    """Kill drivers and executors in batches of each table, *kills* times each kind; new tables a round."""
    run = _Kills(names, kills, random.Random(seed), time.monotonic() + minutes * 60)
    rounds = 0
    while run.left():
        place = folder / str(rounds)
        _fill(place / "store", count)
        with _served(names) as database:
            # Another one is the first each time: a driver may be killed before the others have begun.
            while (code := _run(place, database, run)) != 0:
                print(f"round {rounds}, drivers+executors killed: {run}; exit code {code}", file=sys.stderr, flush=True)
        for name, numbers in json.loads((place / "numbers.json").read_text()).items():
            run.outcomes[name].check(numbers, count)
        rounds += 1
    for path in run.folders:
        shutil.rmtree(path, ignore_errors=True)
    return run.outcomes


@contextmanager
def _served(names: list[str]) -> Iterator[str]:
    """Run a server of PostgreSQL if it is needed, and yield host, database and user."""
    if "postgresql" not in names:
        yield ""
        return
    with postgres_server() as url:
        yield f"{url.rpartition('@')[2]}?user=postgres"


def _fill(store: Path, count: int) -> None:
    with EmbeddedBroker(store, EmbeddedSettings(**_SMALL)) as broker:
        for queue_id in range(4):
            numbers = range(queue_id, count, 4)
            for start in range(0, len(numbers), 100):
                messages = [Message("orders", b"%d" % number) for number in numbers[start : start + 100]]
                broker.sends.send_batch(messages, MessageQueue("orders", broker.name, queue_id))


def _run(place: Path, database: str, kills: _Kills) -> int:
    """Start a driver, and kill it or its executors while it writes. Return its exit code: 0, all is written."""
    code = "import sys; from bench.spark_exactly_once import drive; drive(*sys.argv[1:])"
    path = os.pathsep.join([str(_ROOT), str(_ROOT / "starters"), os.environ.get("PYTHONPATH", "")])
    with (place / "errors.txt").open("a") as errors:
        driver = subprocess.Popen(
            [sys.executable, "-c", code, *kills.chance.sample(kills.names, len(kills.names))],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=place,
            env={**os.environ, "PYTHONPATH": path, "DATABASE": database},
        )
    assert driver.stdout is not None
    jvm = int(driver.stdout.readline() or "0")
    pause = kills.chance.randint(1, 3)  # batches before the first kill: a part of the batches succeeds
    before, patience = _committed(place, kills.names), Patience(_STUCK_S)
    committed = before
    while jvm and driver.poll() is None:
        time.sleep(0.1)
        committed, seen = _committed(place, kills.names), committed
        if committed > seen:
            kills.executors_of(jvm)  # one has written the batch
        if committed >= before + pause and kills.left():
            time.sleep(kills.chance.uniform(0, 1))
            kills.kill(driver, jvm, place)
            before, pause, patience = committed, kills.chance.randint(1, 6), Patience(_STUCK_S)
        if patience.is_over:
            driver.kill()
            raise AssertionError(f"the driver does not end; see {place / 'errors.txt'}")
    close(driver)
    eventually(lambda: not _is_running(jvm), "the JVM of the driver has ended")
    return driver.returncode


def _committed(place: Path, names: list[str]) -> int:
    """Return the number of committed batches of all tables."""
    return sum(_checkpoint(place, name).committed() + 1 for name in names)


def _is_in_batch(place: Path, name: str) -> bool:
    checkpoint = _checkpoint(place, name)
    return checkpoint.planned() > checkpoint.committed()


def _command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return b""


def _is_running(pid: int) -> bool:
    return bool(_command_of(pid))  # a process that has ended and has not been waited for has none


def main() -> None:
    """Kill, and print what was lost and stored twice in each table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--sink", choices=[*SINKS, "all"], default="all", help="all: in one driver, at the same time")
    parser.add_argument("--kills", type=int, default=25, help="of each kind, in batches of each table")
    parser.add_argument("--minutes", type=float, default=1_000, help="after this time nothing is killed")
    parser.add_argument("--messages", type=int, default=3_000, help="of a round")
    parser.add_argument("--seed", type=int, default=4_466)
    given = parser.parse_args()
    reasons = {name: unavailable_reason(name) for name in SINKS if given.sink in (name, "all")}
    for reason in filter(None, reasons.values()):
        print(f"not run: {reason}")
    if names := [name for name, reason in reasons.items() if reason is None]:
        with scratch_folder() as folder:
            place = folder.resolve()
            outcomes = kill_rounds(place, names, given.kills, given.seed, count=given.messages, minutes=given.minutes)
        print(f"{'killed in batches of':<20} {'drivers':>8} {'executors':>10} {'rows':>8} {'lost':>6} {'twice':>6}")
        for name, outcome in outcomes.items():
            killed = f"{outcome.kills['driver']:>8} {outcome.kills['executor']:>10}"
            print(f"{name:<20} {killed} {outcome.rows:>8} {len(outcome.lost):>6} {len(outcome.doubled):>6}")
        for what, of in (("lost", lambda each: each.lost), ("twice", lambda each: each.doubled)):
            report(f"rows {what} in all tables", sum(len(of(each)) for each in outcomes.values()), "", "0")


if __name__ == "__main__":
    run(main)
