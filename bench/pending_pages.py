"""Pages and bulk changes of many pending messages: processor time of pages, of counts, and of a cancel.

The messages are due within three days from tomorrow on, so most of them are parked on the timing wheel. "First"
includes what a later page does not repeat. The cancel takes messages from the middle, as ``mqtemplate delayed purge``
does.

    python -m bench.pending_pages [COUNT] [CANCELLED] [FOLDER]

With FOLDER its messages are used, and none are sent. Those of the cancel are gone afterwards.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from bench.dashboard import fill
from bench.measure import report, run, scratch_folder
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.operations.access import BrokerAccess
from mqtemplate.operations.delayed import DelayedOperations, PendingAction, PendingChange
from mqtemplate.pending import PendingQuery
from mqtemplate.store.settings import FlushDiskType

_COUNT = 1_000_000
_CANCELLED = 100_000
_PAGE = 100
_ROUNDS = 5
_DAY_MS = 86_400_000
_PLACES = {"first": 0.0, "a quarter": 0.25, "the middle": 0.5, "three quarters": 0.75}


def cpu_ms(work: Callable[[], object]) -> float:
    start = time.thread_time()
    work()
    return (time.thread_time() - start) * 1_000


def measure_pages(broker: EmbeddedBroker, first_ms: int, span_ms: int) -> None:
    for place, share in _PLACES.items():
        query = PendingQuery(after_ms=first_ms + round(share * span_ms))

        def page(query: PendingQuery = query) -> None:
            assert len(broker.delayed.pending(query, _PAGE, None).messages) == _PAGE

        report(f"page of {_PAGE} at {place}, first", cpu_ms(page), "ms", "none")
        report(f"page of {_PAGE} at {place}", statistics.median(cpu_ms(page) for _ in range(_ROUNDS)), "ms", "none")
    middle_ms = first_ms + span_ms // 2
    query = PendingQuery(after_ms=middle_ms, before_ms=middle_ms + 3_600_000)
    report("counts of an hour in the middle", cpu_ms(lambda: broker.delayed.count_pending(query, 60_000)), "ms", "none")
    report("counts of all", cpu_ms(lambda: broker.delayed.count_pending(PendingQuery(), 3_600_000)), "ms", "none")


def measure_cancel(broker: EmbeddedBroker, middle_ms: int, count: int) -> None:
    pending = DelayedOperations(BrokerAccess(broker))
    start, cpu_start = time.perf_counter(), time.thread_time()
    messages = pending.all(PendingQuery(after_ms=middle_ms), count)
    change = pending.change_all(messages, PendingChange(PendingAction.CANCEL))
    cpu_s, wall_s = time.thread_time() - cpu_start, time.perf_counter() - start
    assert change.total == count
    report(f"cancel of {count:,} from the middle: processor time of each", cpu_s * 1e6 / count, "us", "none")
    report(f"cancel of {count:,} from the middle: time", wall_s, "s", "none")


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else _COUNT
    cancelled = int(sys.argv[2]) if len(sys.argv) > 2 else _CANCELLED
    with ExitStack() as stack:
        if len(sys.argv) > 3:
            folder = Path(sys.argv[3])
        else:
            folder = stack.enter_context(scratch_folder()) / "store"
            fill(folder, count)
        settings = EmbeddedSettings(flush_disk_type=FlushDiskType.ASYNC_FLUSH)
        broker = stack.enter_context(EmbeddedBroker(folder, settings))
        first_ms = broker.delayed.pending(PendingQuery(), 1, None).messages[0].deliver_ms
        measure_pages(broker, first_ms, 3 * _DAY_MS)
        measure_cancel(broker, first_ms + 3 * _DAY_MS // 2, cancelled)


if __name__ == "__main__":
    run(main)
