"""Shared parts of the benches: a body, a scratch directory, rates, percentiles, and the printing of results."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Self

import structlog

BODY = b"x" * 1_024


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Create a directory on the current disk (``/tmp`` may be memory), and remove it at the end."""
    folder = Path(tempfile.mkdtemp(prefix="mqtemplate-bench-", dir=os.environ.get("BENCH_DIR", ".")))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def quiet() -> None:
    """Log warnings only, to standard error."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(30),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def rate(work: Callable[[int], object], count: int, rounds: int = 5) -> float:
    """Return the operations per second of ``work(count)``: the median of some rounds, after one warm-up round."""
    work(count)
    results = []
    for _ in range(rounds):
        gc.collect()
        start = time.perf_counter()
        work(count)
        results.append(count / (time.perf_counter() - start))
    return sorted(results)[rounds // 2]


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that *share* of *values* do not exceed."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def report(name: str, value: float, unit: str, target: str) -> None:
    """Print one line: the measurement, its result, and the target."""
    text = f"{value:,.0f}" if abs(value) >= 100 or isinstance(value, int) else f"{value:.2f}"
    print(f"{name:<66} {text:>12} {unit:<6} (target {target})", flush=True)


def resident_mib(*, anonymous_only: bool = False) -> float:
    """Return the resident memory of this process; with *anonymous_only* without mapped files."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon" if anonymous_only else "VmRSS"].split()[0]) / 1_024


def processor_s(pid: int) -> float:
    """Return the processor time that a process has used, in seconds.

    Raises:
        OSError: The process has ended.
    """
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Scheduled(NamedTuple):
    """How the system has scheduled the threads of a process. Zero on systems without ``/proc/PID/task/TID/schedstat``.

    Attributes:
        run_s: Time that they ran.
        wait_s: Time for which they could run, and waited for a processor.
        turns: How often they got a processor.
    """

    run_s: float
    wait_s: float
    turns: int

    @classmethod
    def of(cls, pid: int) -> Self:
        """Return the sums over the threads that the process has now."""
        run_ns = wait_ns = turns = 0
        for each in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with suppress(OSError):  # the thread has ended meanwhile
                found = [int(number) for number in each.read_text().split()]
                run_ns, wait_ns, turns = run_ns + found[0], wait_ns + found[1], turns + found[2]
        return cls(run_ns / 1e9, wait_ns / 1e9, turns)

    def since(self, before: Self) -> Self:
        """Return the difference to an earlier state. Threads have ended meanwhile, so it is not below zero."""
        run_s, wait_s, turns = self.run_s - before.run_s, self.wait_s - before.wait_s, self.turns - before.turns
        return type(self)(max(run_s, 0.0), max(wait_s, 0.0), max(turns, 0))


def run(main: Callable[[], None]) -> None:
    """Run a bench."""
    quiet()
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted; no result")
