"""Shared parts of the benches: a body, a scratch directory, rates, percentiles, and the printing of results."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

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


def run(main: Callable[[], None]) -> None:
    """Run a bench."""
    quiet()
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted; no result")
