"""Celery tasks with an ETA: Celery with Redis alone, and the same with the ETA in mqtemplate, one after the other.

80,000 tasks are sent by sixteen threads and then fall due one after the other. Half-way through, the worker and its
children are killed with SIGKILL and started again. Printed are the memory of the worker over time, CPU time, lateness,
and how many tasks were lost or run twice. Lateness includes the time that tasks wait for a worker that is busy, so the
bench reports it for the time before the kill, too.

    python -m bench.celery_eta [TASKS] [TASKS A SECOND] [redis|mqtemplate]

Redis keeps nothing on disk here (``--save ''``); our server flushes each task before ``apply_async`` returns. With
Redis a task that a killed worker held comes back after Celery's ``visibility_timeout``, an hour by default. It counts
as "not run" if it has not run when no task has run for half a minute.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from bench.measure import percentile, processor_s, scratch_folder
from tests.server.process import BrokerProcess
from tests.starters.redis_server import PROGRAM, redis_server

WARM_UP = 500
SENDERS = 16
MARGIN_S = 20
IDLE_S = 30


class Sample(NamedTuple):
    """Memory at one time: seconds since the start, MB of the worker with its children, of Redis and of our server."""

    at_s: float
    worker: float
    redis: float
    broker: float


def main() -> None:
    """Run the bench."""
    if PROGRAM is None:
        print("skipped: redis-server is not installed (Debian: apt-get install redis-server)")
        return
    if len(sys.argv) > 4:  # one variant, in a process of its own
        run_variant(sys.argv[3], int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[4]))
        return
    count, rate = int((sys.argv[1:] or ["80000"])[0]), float((sys.argv[2:] or ["200"])[0])
    for variant in sys.argv[3:4] or ["redis", "mqtemplate"]:
        with scratch_folder() as folder:
            command = [sys.executable, "-m", "bench.celery_eta", str(count), str(rate), variant, str(folder.absolute())]
            subprocess.run(command, check=True)


def run_variant(variant: str, count: int, rate: float, folder: Path) -> None:
    """Run one of the variants, and print its figures."""
    title = "Celery with Redis" if variant == "redis" else "Celery with Redis, ETA in mqtemplate"
    print(f"--- {title}: {count:,} tasks, {rate:,.0f} due a second", flush=True)
    runs = folder / "runs"
    os.environ |= {"BENCH_RUNS": str(runs)}
    with redis_server() as redis, contextlib.ExitStack() as stack:
        os.environ["BENCH_REDIS"] = redis.url
        pids = {"redis": redis.pid}
        if variant == "mqtemplate":
            broker = stack.enter_context(BrokerProcess(folder))
            os.environ["BENCH_NAME_SERVER"] = str(broker.name_server)
            pids["broker"] = broker.process.pid
        tasks = importlib.import_module("bench.celery_eta_tasks")
        workers = Workers(folder)
        stack.callback(workers.kill)
        workers.start()
        send_rate = warm_up(tasks, runs)
        sampler = stack.enter_context(sampling(workers, pids))
        start_ms = send(tasks, count, rate, send_rate)
        half_ms = start_ms + round(count / rate * 500)
        wait_until_ms(half_ms)
        sampler.mark("kill")
        workers.kill()
        workers.start()
        wait_until_done(runs, (count + WARM_UP + 1) * tasks.RUN.size, start_ms + round(count / rate * 1_000))
        sampler.mark("end")
        print_lateness(list(tasks.RUN.iter_unpack(runs.read_bytes())), count, half_ms)
        print_memory(sampler)
        print(f"{'CPU seconds':<34} worker {workers.cpu_s():.0f}, " + ", ".join(
            f"{name} {cpu_s(pid):.0f}" for name, pid in pids.items()
        ), flush=True)  # fmt: skip
        if tasks.messages is not None:
            tasks.messages.stop()


# --- work ---------------------------------------------------------------------------------------


class Workers:
    """The worker of Celery, with two processes for tasks. It is killed and started again."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "worker.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._cpu_of_killed_s = 0.0

    def start(self) -> None:
        """Start a worker in a process group of its own."""
        command = ["celery", "-A", "bench.celery_eta_tasks:celery", "worker", "-c", "2", "--loglevel=WARNING"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *command],
                env={**os.environ, "PYTHONPATH": f"{Path.cwd()}:{Path.cwd() / 'starters'}"},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def kill(self) -> None:
        """Kill the worker and its children, as the kernel does when memory is short."""
        if self._process is not None and self._process.poll() is None:
            self._cpu_of_killed_s += sum(map(cpu_s, self.pids()))
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def pids(self) -> list[int]:
        """Return the processes of the worker."""
        if self._process is None or self._process.poll() is not None:
            return []
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text("utf-8").split()
        return [pid, *map(int, children)]

    def cpu_s(self) -> float:
        """Return the CPU seconds of all workers."""
        return self._cpu_of_killed_s + sum(map(cpu_s, self.pids()))


def warm_up(tasks: ModuleType, runs: Path) -> float:
    """Let the worker run some tasks, so that everything is loaded and connected. Return how many were sent a second."""
    send_one(tasks, -WARM_UP - 1, now_ms() + 50)  # connects
    numbers = range(-WARM_UP, 0)
    begin = time.perf_counter()
    with ThreadPoolExecutor(SENDERS) as pool:
        list(pool.map(lambda number: send_one(tasks, number, now_ms() + 50), numbers))
    rate = WARM_UP / (time.perf_counter() - begin)
    while not runs.exists() or runs.stat().st_size < (WARM_UP + 1) * tasks.RUN.size:
        time.sleep(0.1)
    return rate


def send(tasks: ModuleType, count: int, rate: float, send_rate: float) -> int:
    """Send all tasks, with ETAs from a time when all of them are sent. Return that time in epoch ms.

    Args:
        send_rate: Number of tasks that can be sent a second.
    """
    start_ms = now_ms() + round((count / send_rate * 1.25 + MARGIN_S) * 1_000)
    begin = time.perf_counter()
    with ThreadPoolExecutor(SENDERS) as pool:
        list(pool.map(lambda number: send_one(tasks, number, start_ms + round(number / rate * 1_000)), range(count)))
    sent_rate, left_s = count / (time.perf_counter() - begin), (start_ms - now_ms()) / 1_000
    print(f"{'sent':<34} {sent_rate:,.0f} a second; the first is due {left_s:.0f} s later", flush=True)
    return start_ms


def send_one(tasks: ModuleType, number: int, due_ms: int) -> None:
    """Send one task."""
    tasks.tick.apply_async((number, due_ms), eta=datetime.fromtimestamp(due_ms / 1_000, UTC))


def wait_until_ms(at_ms: int) -> None:
    """Wait until a time."""
    time.sleep(max(0.0, (at_ms - now_ms()) / 1_000))


def wait_until_done(runs: Path, complete_size: int, last_due_ms: int) -> None:
    """Wait until all tasks have run, or none has run for half a minute after the last one was due."""
    size, changed = -1, time.monotonic()
    while size < complete_size:
        if (found := runs.stat().st_size) != size:
            size, changed = found, time.monotonic()
        elif now_ms() > last_due_ms and time.monotonic() - changed > IDLE_S:
            return
        time.sleep(0.5)


# --- figures ------------------------------------------------------------------------------------


class Sampler:
    """Memory over time."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.marks: dict[str, float] = {}
        self.start = time.monotonic()

    def mark(self, name: str) -> None:
        """Name the present time."""
        self.marks[name] = time.monotonic() - self.start


@contextlib.contextmanager
def sampling(workers: Workers, pids: dict[str, int]) -> Iterator[Sampler]:
    """Measure the memory each second."""
    sampler, is_over = Sampler(), threading.Event()

    def sample() -> None:
        while not is_over.wait(1):
            with contextlib.suppress(OSError):  # a process has just been killed
                sampler.samples.append(
                    Sample(
                        time.monotonic() - sampler.start,
                        sum(map(memory_mb, workers.pids())),
                        memory_mb(pids["redis"]),
                        memory_mb(pids["broker"]) if "broker" in pids else 0.0,
                    )
                )

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield sampler
    finally:
        is_over.set()
        thread.join()


def print_memory(sampler: Sampler) -> None:
    """Print the largest memory, and the memory of the worker in ten steps over time."""
    samples = sampler.samples
    largest = {name: max(getattr(each, name) for each in samples) for name in ("worker", "redis", "broker")}
    print(f"{'largest memory, MB':<34} " + ", ".join(f"{name} {value:.0f}" for name, value in largest.items() if value))
    steps = [samples[index * (len(samples) - 1) // 10] for index in range(11)]
    print(f"{'worker over time, MB':<34} " + ", ".join(f"{each.at_s:.0f} s: {each.worker:.0f}" for each in steps))
    print(f"{'killed':<34} at {sampler.marks['kill']:.0f} s", flush=True)


def print_lateness(runs: Sequence[tuple[int, int, int]], count: int, half_ms: int) -> None:
    """Print lateness, lost tasks and repeated ones. A run is a number, the due time, and the time of the run."""
    found = [each for each in runs if each[0] >= 0]
    times = Counter(number for number, _, _ in found)
    print_percentiles("lateness before the kill, ms", [ran - due for _, due, ran in found if ran < half_ms])
    print_percentiles("lateness in all, ms", [ran - due for _, due, ran in found])
    early = sum(ran < due for _, due, ran in found)
    twice = sum(1 for ran in times.values() if ran > 1)
    print(f"{'tasks':<34} not run {count - len(times):,}, run twice {twice:,}, early {early:,}", flush=True)


def print_percentiles(title: str, values: Sequence[float]) -> None:
    """Print one line."""
    if values:
        shares = ", ".join(f"{name} {percentile(values, share):,.0f}" for name, share in (("p50", 0.5), ("p99", 0.99)))
        print(f"{title:<34} {shares}, largest {max(values):,.0f} ({len(values):,} tasks)", flush=True)


def memory_mb(pid: int) -> float:
    """Return the memory of a process in MB; a page that several processes share counts in parts."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text("ascii").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1_024
    return 0.0


def cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    try:
        return processor_s(pid)
    except OSError:  # it has ended
        return 0.0


def now_ms() -> int:
    """Return the time."""
    return time.time_ns() // 1_000_000


if __name__ == "__main__":
    main()
