"""The servers that RocketMQ's clients are run against: ours, in a process of its own, and the real one."""

from __future__ import annotations

import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from bench.peer.rocketmq import NameServer, RocketMQ
from mqtemplate.store import FlushDiskType

__all__ = ["REAL", "OurServer", "Server", "real_server", "servers"]

REAL = "REAL_ROCKETMQ"
"""An environment variable. At 1, the client programs are run against RocketMQ's own server too, some minutes more: that
proves the programs, not our server."""

_LEVELS = "1s 2s 5s"
_TRANSACTION_MS = 1_000
_START_SECONDS = 60
_STOP_SECONDS = 60


class Server(Protocol):
    """A name server with a broker behind it."""

    @property
    def address(self) -> str:
        """``host:port`` of the name server."""


def servers() -> list[str]:
    """Which servers the client programs are run against: "ours", and "rocketmq" if that was asked for."""
    return ["ours", "rocketmq"] if os.environ.get(REAL) == "1" else ["ours"]


@contextmanager
def real_server(folder: Path) -> Iterator[Server]:
    """RocketMQ's own, with short times for transactions."""
    options = {
        "messageDelayLevel": _LEVELS,
        "transactionTimeOut": _TRANSACTION_MS,
        "transactionCheckInterval": _TRANSACTION_MS,
        "transactionOpBatchInterval": 100,  # else it asks about what has ended up to 3 s ago
    }
    with NameServer() as names, RocketMQ(folder, names, options):
        yield names


class OurServer:
    """``python -m mqtemplate broker`` over a store folder, at ports that the system chooses.

    Leaving the block ends it cleanly, unless it was killed.

    Attributes:
        address: ``host:port`` of its name server, once started.
        pid: Its process.
    """

    def __init__(self, folder: Path, *, flush_disk_type: FlushDiskType = FlushDiskType.SYNC_FLUSH) -> None:
        self._folder = folder
        self._flush_disk_type = flush_disk_type
        self.address = ""
        self.pid = 0

    def __enter__(self) -> Self:
        self._home = tempfile.TemporaryDirectory(prefix="mqtemplate-server-")
        self._log = Path(self._home.name, "server.log")
        self._configure()
        anywhere = "127.0.0.1:0"
        places = ["--store", str(self._folder), "--listen", anywhere, "--name-server", anywhere]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mqtemplate", "broker", *places, "--config", self._home.name],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            )
        self.pid = self._process.pid
        self.address = self._told_address()
        return self

    def _configure(self) -> None:
        settings = {
            "message-delay-level": _LEVELS,
            "transaction-timeout-ms": _TRANSACTION_MS,
            "transaction-check-interval-ms": _TRANSACTION_MS,
            "flush-disk-type": self._flush_disk_type.value,
        }
        rows = "".join(f"    {name}: {value}\n" for name, value in settings.items())
        logging = "  logging:\n    level: WARNING\n"
        Path(self._home.name, "application.yml").write_text(f"mqtemplate:\n{logging}  broker:\n{rows}")

    def _told_address(self) -> str:
        """What it prints when it serves; read in a thread, so that a server that says nothing is noticed."""
        told: queue.Queue[str] = queue.Queue()
        printed = self._process.stdout
        assert printed is not None
        threading.Thread(target=lambda: told.put(printed.readline()), daemon=True).start()
        try:
            line = told.get(timeout=_START_SECONDS)
        except queue.Empty:
            line = ""
        found = re.search(r"its name server at (\S+?:\d+),", line)
        if found is None:
            self.kill()
            raise AssertionError(f"our server did not start; it printed {line!r} and logged:\n{self.tail()}")
        return found[1]

    def tail(self) -> str:
        """The end of its log."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-40:])

    def kill(self) -> None:
        """SIGKILL, as a crash."""
        self._process.kill()
        self._process.wait()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            self._process.terminate()
            self._process.wait(_STOP_SECONDS)
        finally:
            self._process.kill()
            self._process.communicate()
            if error is not None:
                error.add_note(f"what our server logged:\n{self.tail()}")
            self._home.cleanup()
