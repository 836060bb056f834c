"""Unary gRPC calls of 1 KiB: calls a second and processor time of the server, ours and grpcio's in turns.

Three clients have 64 calls in flight on one connection. The first one writes bytes that it prepared, with the same
header block in each call; the second one does the same with a request id and a date of its own in each call, as
RocketMQ's clients; the third one is grpcio's. Both servers run alone in a process and send the message back.

    python -m bench.grpc_transport [--calls 10000] [--rounds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc

from bench.measure import BODY, processor_s, report, run
from mqtemplate.clock import SystemClock
from mqtemplate.http2 import GrpcLimits, GrpcServer, frames
from mqtemplate.http2.frames import HEAD, HEAD_BYTES, PREFACE, frame, settings_frame, window_update_frame
from mqtemplate.http2.grpc_wire import framed
from mqtemplate.http2.hpack import HpackEncoder
from mqtemplate.message import HostAddress
from mqtemplate.metrics import Metrics
from mqtemplate.remoting.sockets import connect, parse_address

_METHOD = "/bench.Service/Echo"
_IN_FLIGHT = 64
_METADATA = (
    ("x-mq-client-id", "host@1234@0@abcdef"),
    ("x-mq-language", "JAVA"),
    ("x-mq-client-version", "5.2.0"),
    ("x-mq-protocol", "v2"),
)
_HEADERS = (
    (":method", "POST"),
    (":scheme", "http"),
    (":path", _METHOD),
    (":authority", "localhost"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
    *_METADATA,
)


# --- servers ----------------------------------------------------------------------------------------


def serve_ours() -> None:
    server = GrpcServer(HostAddress("127.0.0.1", 0), SystemClock(), GrpcLimits(), Metrics())
    server.register(_METHOD, lambda call, message: call.reply(message))
    server.start()
    print(server.address, flush=True)
    sys.stdin.readline()


class _Echo(grpc.GenericRpcHandler):
    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        async def echo(message: bytes, context: object) -> bytes:
            return message

        return grpc.unary_unary_rpc_method_handler(echo)


def serve_grpcio() -> None:
    async def serve() -> None:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((_Echo(),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        print(f"127.0.0.1:{port}", flush=True)
        await asyncio.to_thread(sys.stdin.readline)

    asyncio.run(serve())


@contextmanager
def server_process(name: str) -> Iterator[tuple[str, int]]:
    """Start a server; its address and process id."""
    command = [sys.executable, "-m", "bench.grpc_transport", "--serve", name]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip(), process.pid
    finally:
        process.kill()
        process.wait()


# --- clients ----------------------------------------------------------------------------------------


def raw_client(address: str, calls: int, *, fresh: bool) -> None:
    encoder = HpackEncoder()
    block = [encoder.encode(_HEADERS, is_frequent=True) for _ in range(2)]
    tail = frame(frames.DATA, frames.END_STREAM, 0, framed(BODY))

    def call(number: int) -> bytes:
        fields = (("x-mq-request-id", str(uuid.uuid4())), ("x-mq-date-time", f"20261128T{number % 240_000:06d}Z"))
        head = block[number > 0] + (encoder.encode(fields) if fresh else b"")
        stream_id = 2 * number + 1
        content = tail[:5] + stream_id.to_bytes(4, "big") + tail[9:]
        return frame(frames.HEADERS, frames.END_HEADERS, stream_id, head) + content

    requests = deque(call(number) for number in range(calls))
    stream, _ = connect(parse_address(address), 60, None)
    sock = stream.socket
    sock.setblocking(True)
    sock.sendall(PREFACE + settings_frame({frames.INITIAL_WINDOW_SIZE: 1 << 24}) + window_update_frame(0, 1 << 30))
    done, in_flight, rest = 0, 0, b""
    while done < calls:
        batch = [requests.popleft() for _ in range(min(_IN_FLIGHT - in_flight, len(requests)))]
        sock.sendall(b"".join(batch))
        in_flight += len(batch)
        ended, rest = _ended(rest + sock.recv(1 << 20))
        done += ended
        in_flight -= ended
    sock.close()


def _ended(data: bytes) -> tuple[int, bytes]:
    """Return the number of responses that end in *data*, and the bytes after the last whole frame."""
    ended = at = 0
    while len(data) - at >= HEAD_BYTES:
        high, low, kind, flags, _ = HEAD.unpack_from(data, at)
        end = at + HEAD_BYTES + (high << 8 | low)
        if end > len(data):
            break
        ended += kind == frames.HEADERS and flags & frames.END_STREAM != 0
        at = end
    return ended, data[at:]


def grpcio_client(address: str, calls: int) -> None:
    slots = threading.Semaphore(_IN_FLIGHT)
    with grpc.insecure_channel(address) as channel:
        echo = channel.unary_unary(_METHOD)
        for _ in range(calls):
            slots.acquire()
            metadata = (*_METADATA, ("x-mq-request-id", str(uuid.uuid4())), ("x-mq-date-time", "20261128T190000Z"))
            echo.future(BODY, metadata=metadata).add_done_callback(lambda _: slots.release())
        for _ in range(_IN_FLIGHT):
            slots.acquire()


CLIENTS: dict[str, Callable[[str, int], None]] = {
    "the same header block": lambda address, calls: raw_client(address, calls, fresh=False),
    "a request id of its own": lambda address, calls: raw_client(address, calls, fresh=True),
    "the client of grpcio": grpcio_client,
}
SERVERS = {"ours": serve_ours, "grpcio": serve_grpcio}


def measure(client: Callable[[str, int], None], server: str, calls: int) -> tuple[float, float]:
    """Return calls per second, and microseconds of the server's processor time for each."""
    with server_process(server) as (address, pid):
        client(address, calls // 5)  # to warm up
        start_s, used_s = time.perf_counter(), processor_s(pid)
        client(address, calls)
        return calls / (time.perf_counter() - start_s), (processor_s(pid) - used_s) / calls * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", choices=SERVERS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve is not None:
        SERVERS[given.serve]()
        return
    for name, client in CLIENTS.items():
        results: dict[str, list[tuple[float, float]]] = {server: [] for server in SERVERS}
        for _ in range(given.rounds):
            for server, found in results.items():
                found.append(measure(client, server, given.calls))
        for server, found in results.items():
            calls_per_s, used_us = (statistics.median(each) for each in zip(*found, strict=True))
            report(f"{server}, {name}: processor time a call", used_us, "us", "ours 30, of grpcio's client 60")
            report(f"{server}, {name}", calls_per_s, "/s", "ours 14,000 on a quiet machine")


if __name__ == "__main__":
    run(main)
