"""Messages read by Spark: from a folder, beside a source without our format, and over the network.

python -m bench.spark_read              # a million messages with bodies of 200 bytes
python -m bench.spark_read 1024         # another size
python -m bench.spark_read 200 100000   # and another number of messages
python -m bench.spark_read remote       # from our server, by blocks and by pulls; and from RocketMQ 5.5.0

The physical reference yields the same columns with as many bytes from ``range`` and ``mapInArrow``. It has the costs of
Spark, Arrow and Python, and none of reading. CPU seconds are the sum over the JVM and all its Python processes.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from bench.measure import report, run, scratch_folder
from bench.spark_reference import ReferenceSource
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.message import Message, MessageQueue
from mqtemplate.store.settings import FlushDiskType

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_COUNT = 1_000_000
_REMOTE_SHARE = 5  # a cluster gets so many times fewer messages
_QUEUES = 4
_BATCH = 100
_ROUNDS = 5
_COLUMNS = "queueId int, queueOffset bigint, tags string, keys string, body binary, storeTimestamp timestamp"


def fill(broker: Any, count: int, body_size: int, queues: int = _QUEUES) -> None:
    """Send messages to the queues in turn, a hundred at a time."""
    body = random.Random(1).randbytes(body_size)
    for first in range(0, count, _BATCH):
        numbers = range(first, first + _BATCH)
        messages = [Message("orders", body, {"TAGS": ("pay", "ship")[n % 2], "KEYS": f"k{n}"}) for n in numbers]
        broker.sends.send_batch(messages, MessageQueue("orders", broker.name, first // _BATCH % queues))


def write_folder(folder: Path, count: int, body_size: int, queues: int = _QUEUES) -> str:
    """Write a store folder, and return its path."""
    with EmbeddedBroker(folder, EmbeddedSettings(flush_disk_type=FlushDiskType.ASYNC_FLUSH)) as broker:
        fill(broker, count, body_size, queues)
    return str(folder)


def source(spark: SparkSession, schema: str | None = _COLUMNS, **options: str) -> DataFrame:
    """Return the topic as a table."""
    reader = spark.read.format("mqtemplate").options(topic="orders", **options)
    return (reader.schema(schema) if schema else reader).load()


def reference(spark: SparkSession, count: int, body_size: int) -> DataFrame:
    """Return a table with the same columns and sizes that needs no reading."""
    return spark.range(0, _QUEUES, 1, 2).mapInArrow(_rows(count // _QUEUES, body_size), _COLUMNS)


def _rows(count: int, body_size: int) -> Callable[[Iterator[Any]], Iterator[Any]]:
    def rows(queues: Iterator[Any]) -> Iterator[Any]:
        import numpy as np
        import pyarrow as pa

        size = 8_192
        body = pa.array([bytes(body_size)] * size, pa.binary())
        text = pa.array(["pay", "ship"] * (size // 2))
        stamp = pa.array(np.zeros(size, np.int64)).view(pa.timestamp("us", "UTC"))
        names = [column.split()[0] for column in _COLUMNS.split(",")]
        for batch in queues:
            for queue_id in batch.column(0).to_pylist():
                for first in range(0, count, size):
                    number = pa.array(np.arange(first, first + size))
                    ids = pa.array(np.full(size, queue_id, np.int32))
                    whole = pa.RecordBatch.from_arrays([ids, number, text, text, body, stamp], names)
                    yield whole.slice(0, min(size, count - first))

    return rows


class Cost(NamedTuple):
    """Seconds of a pass: on the clock, and of the processor in the JVM and in Spark's Python processes."""

    wall: float
    jvm: float
    python: float

    @property
    def cpu(self) -> float:
        return self.jvm + self.python


def measured(table: Callable[[], DataFrame], count: int, rounds: int = _ROUNDS) -> Cost:
    """Return the median cost of a pass over all rows and columns, after a first one."""
    [found] = measured_in_turn([table], rounds)
    return found


def measured_in_turn(tables: Sequence[Callable[[], DataFrame]], rounds: int = _ROUNDS) -> list[Cost]:
    """Return the same for several tables that take turns, since other work on the machine comes and goes."""
    costs: list[list[Cost]] = [[] for _ in tables]
    for number in range(rounds + 1):
        for table, found in zip(tables, costs, strict=True):
            wall, (jvm, python) = time.perf_counter(), cpu_parts()
            table().write.format("noop").mode("overwrite").save()
            after = cpu_parts()
            if number:
                found.append(Cost(time.perf_counter() - wall, after[0] - jvm, after[1] - python))
    return [Cost(*map(median, zip(*found, strict=True))) for found in costs]


def cpu_seconds() -> float:
    """Return the CPU time of this process's descendants, which are Spark's JVM and its Python processes."""
    return sum(cpu_parts())


def cpu_parts() -> tuple[float, float]:
    """Return the same for the JVM and for the Python processes."""
    parents: dict[int, int] = {}
    times: dict[int, int] = {}
    jvms: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            stat = path.read_text()
        except OSError:  # the process has ended
            continue
        fields = stat.rpartition(")")[2].split()
        pid = int(path.parent.name)
        parents[pid] = int(fields[1])
        is_jvm = stat.partition("(")[2].startswith("java")
        # The JVM counts the Python processes that it started and that have ended, among its children.
        times[pid] = sum(map(int, fields[11:13] if is_jvm else fields[11:15]))
        if is_jvm:
            jvms[pid] = sum(map(int, fields[13:15]))
    own = int(Path("/proc/self").resolve().name)
    ours = [pid for pid in times if _descends(pid, own, parents)]
    jvm = sum(times[pid] for pid in ours if pid in jvms)
    python = sum(jvms.get(pid, times[pid]) for pid in ours)
    return jvm / 100, python / 100


def _descends(pid: int, ancestor: int, parents: dict[int, int]) -> bool:
    while pid in parents:
        pid = parents[pid]
        if pid == ancestor:
            return True
    return False


def compare_with_reference(spark: SparkSession, store: str, body_size: int, count: int) -> None:
    """Print the six columns beside the reference, and all columns."""
    from mqtemplate.spark import read_table

    options = {"rows": str(count), "bodySize": str(body_size)}
    names_of_columns = ",".join(column.split()[0] for column in _COLUMNS.split(","))
    tables = (
        lambda: reference(spark, count, body_size),
        lambda: spark.read.format("reference").schema(_COLUMNS).options(**options).load(),
        lambda: source(spark, store=store),
        lambda: source(spark, store=store, checkCrcs="false"),
        lambda: read_table(spark, store=store, topic="orders", columns=names_of_columns),
    )
    peer, bare, ours, unchecked, mapped = measured_in_turn(tables)
    report(f"physical reference, 6 columns, {body_size} B", count / peer.wall, "/s", "the peer")
    report("the source, the same columns", count / ours.wall, "/s", "")
    report("  of the reference, wall", peer.wall / ours.wall, "x", ">= 0.75 (200 B), 0.8 (1 KiB)")
    report("  of the reference, CPU", peer.cpu / ours.cpu, "x", ">= 0.5 (200 B), 0.55 (1 KiB)")
    report("read_table, the same columns", count / mapped.wall, "/s", "")
    report("a source that reads nothing, of the reference, wall", peer.wall / bare.wall, "x", "")
    report("  of the reference, CPU", peer.cpu / bare.cpu, "x", "")
    names = ("reference", "reads nothing", "the source", "the source, checkCrcs=false", "read_table")
    for name, cost in zip(names, (peer, bare, ours, unchecked, mapped), strict=True):
        for part, seconds in (("JVM", cost.jvm), ("Python", cost.python)):
            report(f"{name}: CPU of 1,000,000 rows, {part}", seconds * 1_000_000 / count, "s", "")
    everything = measured(lambda: source(spark, None, store=store), count)
    report("the source, all 14 columns", count / everything.wall, "/s", ">= 500,000")


def read_one_queue(spark: SparkSession, folder: Path, body_size: int, count: int) -> None:
    """Print the rate of one queue without any option."""
    count //= 4
    store = write_folder(folder, count, body_size, 1)
    wall = measured(lambda: source(spark, None, store=store), count).wall
    report(f"one queue of {count:,}, all columns, no option", count / wall, "/s", ">= 230,000")


def first_count(spark: SparkSession, store: str) -> None:
    """Print the time of the first count, in a session that has run nothing."""
    start = time.perf_counter()
    source(spark, None, store=store).count()
    report("first load().count() of a session", time.perf_counter() - start, "s", "<= 4")
    spark.dataSource.register(ReferenceSource)
    tables: dict[str, Callable[[], DataFrame]] = {
        "a source that reads nothing": lambda: spark.read.format("reference").option("rows", "1000000").load(),
        "the source": lambda: source(spark, None, store=store),
    }
    times: dict[str, list[float]] = {name: [] for name in tables}
    for _ in range(_ROUNDS):
        for name, table in tables.items():
            start = time.perf_counter()
            table().limit(10).collect()
            times[name].append(time.perf_counter() - start)
    for name, found in times.items():
        report(f"limit(10), {name}", median(found), "s", "0.2, as Spark's Kafka connector")


def read_from_our_server(spark: SparkSession, folder: Path, body_size: int, count: int) -> None:
    """Print the rates of blocks and of pulls from our server, in a process of its own."""
    from mqtemplate.spark.location.cluster import ClusterBlocks
    from mqtemplate.spark.location.location import BrokerLocation
    from tests.conformance.servers import BrokerProcess

    with BrokerProcess(folder, flush_disk_type=FlushDiskType.ASYNC_FLUSH) as server:
        _fill_remotely(server.address, body_size, count)
        wall = measured(lambda: source(spark, nameServer=server.address), count, 3).wall
        report("our server, Spark, 6 columns, by blocks", count / wall, "/s", ">= 300,000")
        place = ClusterBlocks(BrokerLocation(name_servers=(server.address,)), pulls=True)
        report("our server, one task without Spark, by pulls", raw_rate(place), "/s", ">= 70,000")


def read_from_rocketmq(spark: SparkSession, folder: Path, body_size: int, count: int) -> None:
    """Print the rate from RocketMQ beside the rate of pulls whose messages are not parsed."""
    from bench.peer.jvm import unavailable_reason
    from bench.peer.rocketmq import NameServer, RocketMQ
    from mqtemplate.spark.location.cluster import ClusterBlocks
    from mqtemplate.spark.location.location import BrokerLocation

    if (reason := unavailable_reason()) is not None:
        print(f"RocketMQ: not measured: {reason}")
        return
    options = {"flushDiskType": FlushDiskType.ASYNC_FLUSH.value}
    with NameServer() as name_server, RocketMQ(folder, name_server, options, for_speed=True):
        _fill_remotely(name_server.address, body_size, count)
        raw = raw_rate(ClusterBlocks(BrokerLocation(name_servers=(name_server.address,)), pulls=True))
        wall = measured(lambda: source(spark, nameServer=name_server.address), count, 3).wall
        report("RocketMQ 5.5.0, raw pulls, one process", raw, "/s", "the peer")
        report("RocketMQ 5.5.0, Spark, 6 columns", count / wall, "/s", "")
        report("  of raw pulls", count / wall / raw, "x", ">= 0.7")


def raw_rate(place: Any) -> float:
    """Return the messages per second of pulls without Spark and without columns: the median of three passes."""
    from mqtemplate.spark.records.offsets import QueueRange

    rates = []
    for _ in range(4):
        start, count = time.perf_counter(), 0
        for queue in place.queues("orders"):
            found = QueueRange.of(queue, 0, place.max_offset(queue))
            count += sum(len(block.at) for block in place.blocks(found, None))
        rates.append(count / (time.perf_counter() - start))
    return median(rates[1:])


def _fill_remotely(address: str, body_size: int, count: int) -> None:
    from mqtemplate.brokers import RemoteBroker, RemoteSettings

    with RemoteBroker(RemoteSettings(name_servers=(address,))) as broker:
        broker.create_topic("orders", _QUEUES)
        fill(broker, count, body_size)


def main() -> None:
    from mqtemplate.spark import session

    numbers = [int(text) for text in sys.argv[1:] if text.isdecimal()]
    body_size, count = (*numbers, *(200, _COUNT)[len(numbers) :])
    with scratch_folder() as folder:
        spark = session(master="local[2]")
        if "remote" in sys.argv:
            read_from_our_server(spark, folder / "ours", body_size, count // _REMOTE_SHARE)
            read_from_rocketmq(spark, folder / "peer", body_size, count // _REMOTE_SHARE)
        else:
            store = write_folder(folder / "store", count, body_size)
            first_count(spark, store)
            compare_with_reference(spark, store, body_size, count)
            read_one_queue(spark, folder / "one", body_size, count)
        spark.stop()


if __name__ == "__main__":
    run(main)
