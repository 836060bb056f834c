"""A Redis server on loopback, started for tests and benches."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from bench.peer.rocketmq import free_port
from tests.waiting import PATIENCE_S, eventually

PROGRAM = shutil.which("redis-server")


class RedisServer(NamedTuple):
    """A running server."""

    url: str
    pid: int


@contextmanager
def redis_server() -> Iterator[RedisServer]:
    """Start a server without files. It is stopped at the end."""
    assert PROGRAM is not None
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="redis-") as folder:
        server = subprocess.Popen(
            [PROGRAM, "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--dir", folder],
            stdout=subprocess.DEVNULL,
        )
        try:
            eventually(lambda: _answers(port), "Redis is ready")
            yield RedisServer(f"redis://127.0.0.1:{port}/0", server.pid)
        finally:
            server.terminate()
            server.wait(PATIENCE_S)


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")
    except OSError:
        return False
