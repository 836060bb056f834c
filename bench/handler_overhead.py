"""Cost of what is around a handler, and async handlers per second on one loop.

Each step calls the same listener with the same message: bare, with an injected object, with a provider that is opened
and closed for each message, with two middlewares, and with all of them. The steps take turns, and the median counts, so
that a slow moment of the machine hits all alike. FastStream does the same with its in-memory broker, if it can be
installed: the difference between its bare handler and one with a dependency and two middlewares.

    python -m bench.handler_overhead [--count 20000]
"""

from __future__ import annotations

import argparse
import gc
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Annotated, Any

from bench.measure import report, run
from bench.peer.python_environment import install, python_of
from mqtemplate import Delivery, Depends, EmbeddedBroker, MessageExt, MQApplication, Timing, message_listener
from mqtemplate.converter import JsonMessageConverter
from mqtemplate.listener import ListenerRegistry
from mqtemplate.message import Message

_ROUNDS = 9
_ASYNC_COUNT = 60_000
_PEER = "faststream[nats]==0.7.8"
_SETTINGS = {"rocketmq.name-server": "embedded:memory", "rocketmq.consumer.pull-batch-size": 32}


class Audit:
    """A service."""


class Session:
    """Something that is opened for each message."""


def session(audit: Audit) -> Iterator[Session]:
    """Open a session, and close it after the handler."""
    yield Session()


async def async_session(audit: Audit) -> Any:
    """Open a session on the event loop, and close it after the handler."""
    yield Session()


class Around:
    """A middleware that does nothing."""

    def consume(self, delivery: Delivery) -> Generator[Delivery, object, object]:
        """Call the handler."""
        return (yield delivery)


def handlers() -> dict[str, Callable[..., None]]:
    """Return the same listener with more and more around it."""
    two = [Timing(), Around()]

    def bare(body: bytes) -> None: ...
    def injected(body: bytes, audit: Audit) -> None: ...
    def scoped(body: bytes, session: Annotated[Session, Depends(session)]) -> None: ...
    def around(body: bytes) -> None: ...
    def everything(body: bytes, audit: Audit, session: Annotated[Session, Depends(session)]) -> None: ...

    # The annotations name functions of this module only, so they can be read.
    return {
        "a bare handler": message_listener("bare", "bare")(bare),
        "with an injected object": message_listener("injected", "injected")(injected),
        "with a provider that is opened and closed": message_listener("scoped", "scoped")(scoped),
        "with two middlewares": message_listener("around", "around", middlewares=two)(around),
        "with all three": message_listener("everything", "everything", middlewares=two)(everything),
    }


def per_call_us(call: Callable[[MessageExt], object], message: MessageExt, count: int) -> float:
    """Return the microseconds of processor time of one call: it waits for nothing."""
    gc.collect()
    start = time.thread_time()
    for _ in range(count):
        call(message)
    return (time.thread_time() - start) / count * 1e6


def overhead(count: int) -> None:
    """Measure what is around a handler."""
    with MQApplication(*handlers().values(), Audit, settings=_SETTINGS, environment={}) as app:
        containers = zip(handlers(), app.containers, strict=True)
        calls = {name: container.member.invocation.handle_one for name, container in containers}
        app.broker.sends.send(Message("read", b"x" * 100))
        [message] = [
            found for queue in app.broker.queues("read") for found in app.broker.reader.pull(queue, 0).messages
        ]
        results: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(_ROUNDS + 1):
            for name, call in calls.items():
                results[name].append(per_call_us(call, message, count))
    medians = {name: statistics.median(rounds[1:]) for name, rounds in results.items()}
    bare = medians.pop("a bare handler")
    report("a bare handler", bare, "us", "-")
    for name, median in medians.items():
        report(f"  {name}, more", median - bare, "us", "< 5 us" if name == "with all three" else "-")


def async_rate(name: str, target: str, handler: Callable[..., Any], attributes: dict[str, Any]) -> None:
    """Measure how fast an async listener handles messages that are stored already."""
    done, left = threading.Event(), [_ASYNC_COUNT]

    def count() -> None:
        left[0] -= 1
        if not left[0]:
            done.set()

    listener = message_listener("orders", "bench", consume_from_where="CONSUME_FROM_FIRST_OFFSET", **attributes)(
        handler(count)
    )
    with EmbeddedBroker(None) as broker:
        broker.queues("orders")
        for _ in range(_ASYNC_COUNT):
            broker.sends.send(Message("orders", b"x" * 100))
        registry = ListenerRegistry(broker, JsonMessageConverter())
        registry.register(listener)
        start = time.perf_counter()
        registry.start()
        done.wait(120)
        seconds = time.perf_counter() - start
        registry.stop()
    report(name, _ASYNC_COUNT / seconds, "/s", target)


def async_rates() -> None:
    """Measure plain and async handlers beside each other."""

    def plain(count: Callable[[], None]) -> Callable[..., Any]:
        def handle(body: bytes) -> None:
            count()

        return handle

    def with_await(count: Callable[[], None]) -> Callable[..., Any]:
        async def handle(body: bytes) -> None:
            count()

        return handle

    one_thread = {"consume_thread_number": 1, "consume_thread_max": 1}
    async_rate("plain handlers in one thread", "-", plain, one_thread)
    async_rate("async handlers on one loop", ">= 20,000/s", with_await, {})
    async_rate("async handlers with two middlewares", "-", with_await, {"middlewares": [Timing(), Around()]})


_FASTSTREAM = """
import asyncio, statistics, sys, time
from typing import Annotated
from faststream import BaseMiddleware, Depends
from faststream.nats import NatsBroker, TestNatsBroker

COUNT, ROUNDS = int(sys.argv[1]), int(sys.argv[2])

class Around(BaseMiddleware):
    async def consume_scope(self, call_next, message):
        return await call_next(message)

async def session():
    yield object()

async def measure(middlewares, with_dependency):
    broker = NatsBroker(middlewares=middlewares)
    if with_dependency:
        @broker.subscriber("orders")
        async def handle(body: bytes, session: Annotated[object, Depends(session)]) -> None: ...
    else:
        @broker.subscriber("orders")
        async def handle(body: bytes) -> None: ...
    rounds = []
    async with TestNatsBroker(broker) as test:
        for _ in range(ROUNDS):
            start = time.process_time()
            for _ in range(COUNT):
                await test.publish(b"x" * 100, "orders")
            rounds.append((time.process_time() - start) / COUNT * 1e6)
    return statistics.median(rounds)

async def main():
    bare = await measure([], False)
    print(bare, await measure([Around, Around], True) - bare)

asyncio.run(main())
"""


def peer(count: int) -> None:
    """Measure FastStream in an environment of its own."""
    if problem := install("handlers", _PEER):
        print(f"FastStream is missing: {problem}")
        return
    command = [str(python_of("handlers")), "-c", _FASTSTREAM, str(count), str(_ROUNDS)]
    output = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if output.returncode:
        print(f"FastStream failed: {output.stderr.strip().splitlines()[-1]}")
        return
    bare, more = map(float, output.stdout.split())
    report("FastStream: publish to a bare handler in memory", bare, "us", "-")
    report("  with a dependency and two middlewares, more", more, "us", "-")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20_000)
    count = parser.parse_args().count
    overhead(count)
    async_rates()
    peer(max(count // 20, 100))


if __name__ == "__main__":
    run(main)
