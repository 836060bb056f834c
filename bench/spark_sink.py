"""Rows per second of `df.write.format("mqtemplate")`, and the time to read many pending messages as a DataFrame.

Writes: 200,000 rows with a body of 200 bytes and a key, `local[2]`, four tasks, warm; the median of five. The embedded
broker is in the driver's process, our server in a process of its own, in both flush modes. The peer is the same job
into Spark's ``noop`` sink, which makes the rows and drops them. CPU is the sum over all processes: driver, JVM, Python
workers and server.

    python -m bench.spark_sink [ROWS] [PENDING]      200,000 and 1,000,000 by default
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.measure import quiet, report, run, scratch_folder
from bench.peer.rocketmq import free_port
from bench.spark_read import cpu_seconds
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.message import HostAddress, Message, Property
from mqtemplate.server import BrokerServerSettings, LocalCluster
from mqtemplate.spark import LocalServer, session
from mqtemplate.store.settings import FlushDiskType

_ROUNDS = 5
_TARGET = "50,000"


def serve(folder: str, port: str, mode: str) -> None:
    """Run a server until its standard input is closed."""
    quiet()
    address = HostAddress("127.0.0.1", int(port))
    engine = EmbeddedBroker(folder, EmbeddedSettings(listen_host=address, flush_disk_type=FlushDiskType(mode)))
    with LocalCluster(engine, BrokerServerSettings(listen=address)):
        print("serving", flush=True)
        sys.stdin.read()


@contextmanager
def _server(folder: Path, mode: FlushDiskType) -> Iterator[str]:
    port = free_port()
    code = "import sys; from bench.spark_sink import serve; serve(*sys.argv[1:])"
    command = [sys.executable, "-c", code, str(folder), str(port), mode.value]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield f"127.0.0.1:{port}"
        process.communicate("")


def _report(name: str, write: Callable[[], object], count: int, target: str) -> None:
    """Print the median rate of some writes, and the CPU time of one row."""
    write()  # warm-up
    rates, cpus = [], []
    for _ in range(_ROUNDS):
        started, cpu = time.perf_counter(), _cpu_s()
        write()
        rates.append(count / (time.perf_counter() - started))
        cpus.append((_cpu_s() - cpu) / count * 1e6)
    report(name, statistics.median(rates), "rows/s", target)
    report("  CPU of a row", statistics.median(cpus), "us", "")


def _cpu_s() -> float:
    return time.process_time() + cpu_seconds()


def _writes(spark: Any, folder: Path, count: int) -> None:
    rows = spark.range(0, count, 1, 4).selectExpr("repeat('x', 200) AS body", "concat('k', id) AS keys").cache()
    rows.count()
    _report("noop sink", lambda: rows.write.format("noop").mode("overwrite").save(), count, "-")

    def write(**options: str) -> Callable[[], object]:
        return lambda: rows.write.format("mqtemplate").mode("append").options(topic="orders", **options).save()

    for mode in FlushDiskType:
        store = folder / f"embedded-{mode.value}"
        with EmbeddedBroker(store, EmbeddedSettings(flush_disk_type=mode)) as broker, LocalServer(broker):
            _report(f"embedded broker, {mode.value}", write(store=str(store)), count, _TARGET)
        with _server(folder / f"server-{mode.value}", mode) as address:
            _report(f"our server, {mode.value}", write(nameServer=address), count, _TARGET)


def _pending(spark: Any, folder: Path, count: int) -> None:
    store = folder / "pending"
    with EmbeddedBroker(store, EmbeddedSettings(flush_disk_type=FlushDiskType.ASYNC_FLUSH)) as broker:
        for start in range(0, count, 1_000):
            delays = range(start, min(start + 1_000, count))
            properties = [{Property.TIMER_DELAY_MS: str(86_400_000 + n), Property.KEYS: f"k{n}"} for n in delays]
            broker.sends.send_batch([Message("reminders", b"x" * 200, each) for each in properties])
        with LocalServer(broker):
            times, found = [], 0
            for _ in range(_ROUNDS + 1):
                started = time.perf_counter()
                view = spark.read.format("mqtemplate").options(view="pending", store=str(store)).load()
                found = view.selectExpr("count(handle)", "max(deliverTime)").collect()[0][0]
                times.append(time.perf_counter() - started)
            report(f"{found:,} pending messages as a DataFrame, first", times[0], "s", "")
            report(f"{found:,} pending messages as a DataFrame", statistics.median(times[1:]), "s", "5")


def main() -> None:
    """Run both measurements."""
    count, pending = (int(text) for text in [*sys.argv[1:], *("200000", "1000000")[len(sys.argv) - 1 :]])
    with scratch_folder() as folder:
        spark = session(master="local[2]", **{"spark.driver.memory": "1g"})
        _writes(spark, folder, count)
        if pending:
            _pending(spark, folder, pending)
        spark.stop()


if __name__ == "__main__":
    run(main)
