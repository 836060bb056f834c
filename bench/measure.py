"""What every bench needs: a body, a folder of its own, percentiles, and one way to print a figure."""

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
    """A folder on the disk the bench is started on (``/tmp`` may be memory), gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="mqtemplate-bench-", dir=os.environ.get("BENCH_DIR", ".")))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def quiet() -> None:
    """Only warnings, and those beside the figures."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(30),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def rate(work: Callable[[int], object], count: int, rounds: int = 5) -> float:
    """Calls a second of ``work(count)``: the median of some rounds after one to warm up."""
    work(count)
    results = []
    for _ in range(rounds):
        gc.collect()
        start = time.perf_counter()
        work(count)
        results.append(count / (time.perf_counter() - start))
    return sorted(results)[rounds // 2]


def percentile(values: Sequence[float], share: float) -> float:
    """The value that *share* of *values* do not exceed."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def report(what: str, figure: float, unit: str, target: str) -> None:
    """One line: what was measured, what came out, what was asked for."""
    text = f"{figure:,.0f}" if abs(figure) >= 100 or isinstance(figure, int) else f"{figure:.2f}"
    print(f"{what:<66} {text:>12} {unit:<6} (target {target})", flush=True)


def resident_mib(*, anonymous_only: bool = False) -> float:
    """Memory of this process; *anonymous_only* leaves mapped files aside."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon" if anonymous_only else "VmRSS"].split()[0]) / 1_024


def run(main: Callable[[], None]) -> None:
    quiet()
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted; no figure")
