"""Messages per second of a listener that receives by POP, beside the same listener that pulls.

One process, the embedded broker, 1 KiB, handlers that do nothing. The messages are stored before. In each round both
listeners handle all of them, one after the other, each in a new group; a turn ends when the last message is
acknowledged or committed. A figure is the median of the rounds. It is measured in memory, and on disk with
``SYNC_FLUSH``, where an acknowledgement by POP survives a crash. The processor time is that of the whole process.

    python -m bench.pop_listener [--count 20000] [--rounds 3] [--handlers 20]
"""

from __future__ import annotations

import argparse
import gc
import itertools
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from bench.measure import BODY, report, run, scratch_folder
from mqtemplate import ConsumeMode, EmbeddedBroker, MessageRequestMode, message_listener
from mqtemplate.converter import JsonMessageConverter
from mqtemplate.listener import ListenerRegistry
from mqtemplate.message import Message

_KEYS = 1_000
_TIMEOUT_S = 300
_BATCH = 500
_numbers = itertools.count()


def rate(broker: EmbeddedBroker, count: int, kind: Callable[..., Any], **options: Any) -> tuple[float, float]:
    """Return the messages per second of one listener in a new group, and the processor time for one (us)."""
    done, left = threading.Event(), itertools.count(count - 1, -1)

    def finish() -> None:
        if not next(left):
            done.set()

    group = f"bench-{next(_numbers)}"
    listener = message_listener("orders", group, consume_from_where="CONSUME_FROM_FIRST_OFFSET", **options)(
        kind(finish)
    )
    registry = ListenerRegistry(broker, JsonMessageConverter())
    [container] = registry.register(listener)
    gc.collect()
    start, processor_start = time.perf_counter(), time.process_time()
    registry.start()
    if not done.wait(_TIMEOUT_S):
        raise SystemExit(f"{container.in_flight} messages are unfinished after {_TIMEOUT_S} s")
    while container.in_flight:
        time.sleep(0.0005)
    seconds, processor_s = time.perf_counter() - start, time.process_time() - processor_start
    registry.stop()
    queues = broker.queues("orders")
    assert sum(broker.groups.committed_offset(group, queue) or 0 for queue in queues) == count, "each is done"
    return count / seconds, processor_s / count * 1e6


def plain(finish: Callable[[], None]) -> Callable[..., Any]:
    """Return a handler that does nothing."""

    def handle(body: bytes) -> None:
        finish()

    return handle


def with_await(finish: Callable[[], None]) -> Callable[..., Any]:
    """Return a handler for the event loop that does nothing."""

    async def handle(body: bytes) -> None:
        finish()

    return handle


def store(broker: EmbeddedBroker, count: int) -> None:
    """Store the messages in all queues, with a thousand keys in turn."""
    queues = broker.queues("orders")
    for first in range(0, count, _BATCH):
        numbers = range(first, min(first + _BATCH, count))
        messages = [Message("orders", BODY, {"__SHARDINGKEY": str(number % _KEYS)}) for number in numbers]
        broker.sends.send_batch(messages, queues[first // _BATCH % len(queues)])


def compare(where: str, folder: Path | None, count: int, rounds: int, handlers: int) -> None:
    """Measure each kind of listener by both ways of receiving, in turns."""
    kinds = {
        "CONCURRENTLY": (plain, {}),
        "CONCURRENTLY, async def": (with_await, {}),
        f"ORDERLY, {_KEYS:,} keys": (plain, {"consume_mode": ConsumeMode.ORDERLY}),
    }
    with EmbeddedBroker(folder) as broker:
        store(broker, count)
        for name, (kind, options) in kinds.items():
            results: dict[MessageRequestMode, list[tuple[float, float]]] = {mode: [] for mode in MessageRequestMode}
            for _ in range(rounds):
                for mode, found in results.items():
                    found.append(
                        rate(broker, count, kind, request_mode=mode, consume_thread_number=handlers, **options)
                    )
            for mode, found in results.items():
                rates, processor_us = zip(*found, strict=True)
                report(f"{where}, {name}: {mode.value}", median(rates), "/s", "-")
                report("  processor time for a message", median(processor_us), "us", "-")
            pull, pop = (median(each for each, _ in found) for found in results.values())
            report("  ratio of the rates", pop / pull, "", ">= 0.33")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--handlers", type=int, default=20)
    arguments = parser.parse_args()
    measure = partial(compare, count=arguments.count, rounds=arguments.rounds, handlers=arguments.handlers)
    for where, folder in (("in memory", nullcontext(None)), ("on disk", scratch_folder())):
        with folder as path:
            measure(where, path)


if __name__ == "__main__":
    run(main)
