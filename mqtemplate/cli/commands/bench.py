"""``capabilities`` and ``bench``: what brokers can do, and how fast one is."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mqtemplate.cli.invocation import TOP, CommandCall, cluster_of, command

if TYPE_CHECKING:
    from mqtemplate.broker import Broker, Capability
    from mqtemplate.context.settings.app import AppSettings
    from mqtemplate.message import Message
    from mqtemplate.operations import BrokerAccess


@command(
    TOP, "capabilities", "capabilities", "capabilities embedded:./data 127.0.0.1:9876 --json", without=("name_server",)
)
def capabilities(
    call: CommandCall,
    name_servers: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME-SERVER]...", help="name server of a broker (default: rocketmq.name-server)"),
    ] = None,
) -> None:
    """Show the capabilities of brokers, and their differences.

    All brokers guarantee what the Broker interface specifies; a capability is what only some brokers have. A name
    server is a value of rocketmq.name-server: 'embedded:./data', or 'host:port;host:port'. Access keys and TLS are
    read from application.yml.
    """
    calls = [replace(call, name_server=name_server) for name_server in name_servers or (None,)]
    found = dict(capabilities_of(each.settings()) for each in calls)
    call.output.document({name: sorted(each.value for each in given) for name, given in found.items()})
    for line in capability_report(found).splitlines():
        call.output.line(line)


def capabilities_of(settings: AppSettings) -> tuple[str, frozenset[Capability]]:
    """Return name server and capabilities of the broker that the settings choose.

    Raises:
        MQTemplateError: The settings are invalid, or the broker does not answer.
    """
    from mqtemplate.brokers.embedded.broker import EmbeddedBroker

    if settings.is_proxy:
        from mqtemplate.brokers.grpc.broker import GrpcBroker
        from mqtemplate.context.settings.clients import grpc_settings

        with GrpcBroker(grpc_settings(settings)) as proxy:
            return settings.rocketmq.name_server, proxy.capabilities
    name, cluster = settings.rocketmq.name_server, cluster_of(settings)
    if cluster is None:
        return name, EmbeddedBroker(settings.store_path).capabilities  # without opening the store
    with cluster:
        return name, cluster.capabilities


def capability_report(found: Mapping[str, frozenset[Capability]]) -> str:
    """Return a table: one line per capability, one column per broker. A star marks the differences."""
    from mqtemplate.broker import Capability

    width = max(len(capability.value) for capability in Capability) + 2
    lines = [" " * (width + 2) + "  ".join(found)]
    for capability in Capability:
        answers = [capability in capabilities for capabilities in found.values()]
        cells = ["yes" if answer else "no" for answer in answers]
        columns = "  ".join(cell.ljust(len(name)) for cell, name in zip(cells, found, strict=True))
        mark = "* " if len(set(answers)) > 1 else "  "
        lines.append((mark + capability.value.ljust(width) + columns).rstrip())
    if len(found) > 1:
        lines.append("* marks a difference")
    return "\n".join(lines)


_TOPIC = "mqtemplate_bench"
_SLICES = 100


@command(
    TOP,
    "bench",
    "bench",
    "bench --count 100000 --size 1000 --threads 8",
    "bench --delay 1h --name-server 127.0.0.1:9876 --json",
)
def bench(
    call: CommandCall,
    count: Annotated[int, typer.Option(min=1, help="number of messages")] = 10_000,
    size: Annotated[int, typer.Option(min=1, help="bytes of each body")] = 200,
    threads: Annotated[int, typer.Option(min=1, max=256, help="threads that send")] = 4,
    delay: Annotated[
        str | None, typer.Option(metavar="DURATION", help="send delayed messages, then cancel them")
    ] = None,
    topic: Annotated[str, typer.Option(metavar="TOPIC", help="topic of the messages")] = _TOPIC,
) -> None:
    """Measure message rates: send, and read again or cancel.

    Without --name-server it uses a store directory that is deleted afterwards. The rates hold for this machine at this
    moment; other programs on it change them.
    """
    from mqtemplate.cli.formats import duration
    from mqtemplate.message import Message, Property

    properties = {} if delay is None else {Property.TIMER_DELAY_MS: str(duration(delay, "--delay"))}
    with _broker(call) as access:
        broker = access.open_for_changes()
        broker.create_topic(topic, 4)
        starts = {queue: broker.reader.max_offset(queue) for queue in broker.queues(topic)}
        latencies, handles, send_s = _send(call, broker, Message(topic, b"x" * size, properties), count, threads)
        if delay is None:
            rate_name, done, then_s = "read", *_read(broker, starts)
        else:
            rate_name, done, then_s = "cancel", *_cancel(call, broker, handles)
    latencies.sort()
    record: dict[str, Any] = {
        "count": count,
        "size": size,
        "threads": threads,
        "send_per_s": round(count / send_s),
        "send_p50_ms": round(latencies[len(latencies) // 2] * 1_000, 3),
        "send_p99_ms": round(latencies[len(latencies) * 99 // 100] * 1_000, 3),
        f"{rate_name}_count": done,
        f"{rate_name}_per_s": round(done / max(then_s, 1e-9)),
    }
    call.output.fields(record, {name.replace("_", " "): name for name in record})


@contextmanager
def _broker(call: CommandCall) -> Iterator[BrokerAccess]:
    if call.name_server is not None:
        with call.access(create=True) as access:
            yield access
        return
    with (
        tempfile.TemporaryDirectory(prefix="mqtemplate-bench-") as folder,
        replace(call, name_server=None, folder=f"{folder}/store").access(create=True) as access,
    ):
        yield access


def _send(
    call: CommandCall, broker: Broker, message: Message, count: int, threads: int
) -> tuple[list[float], list[str], float]:
    """Send; return the latencies (s) of the sends, the handles, and the time (s) of all."""
    latencies: list[float] = []
    handles: list[str] = []

    def send_some(number: int) -> None:
        for _ in range(number):
            started = time.perf_counter()
            result = broker.sends.send(message)
            latencies.append(time.perf_counter() - started)  # list.append is atomic
            if result.handle is not None:
                handles.append(result.handle)
        advance(number)

    parts = [len(range(start, count, _SLICES)) for start in range(min(_SLICES, count))]
    with call.output.progress("sending", count) as advance, ThreadPoolExecutor(threads) as pool:
        started = time.perf_counter()
        for done in [pool.submit(send_some, part) for part in parts]:
            done.result()
        took_s = time.perf_counter() - started
    return latencies, handles, took_s


def _read(broker: Broker, starts: dict[Any, int]) -> tuple[int, float]:
    """Read what was sent; return the number of messages and the time (s)."""
    from mqtemplate.operations.messages import read_queue

    started = time.perf_counter()
    found = sum(
        1 for queue, start in starts.items() for _ in read_queue(broker, queue, start, broker.reader.max_offset(queue))
    )
    return found, time.perf_counter() - started


def _cancel(call: CommandCall, broker: Broker, handles: list[str]) -> tuple[int, float]:
    """Cancel what was sent; return the number of messages and the time (s)."""
    started = time.perf_counter()
    with call.output.progress("cancelling", len(handles)) as advance:
        cancelled = 0
        for handle in handles:
            cancelled += broker.delayed.cancel(handle).count
            advance(1)
    return cancelled, time.perf_counter() - started
