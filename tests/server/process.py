"""``python -m mqtemplate broker`` in a process, on loopback, on ports that the operating system chooses."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from mqtemplate.message import HostAddress
from tests.programs import end_group, finish

_ADDRESS = r"\[?([\d.:a-f]+?)\]?:(\d+)"
_READY = re.compile(
    rf"\S+ listens on {_ADDRESS}, its name server on {_ADDRESS}(?:, gRPC clients on {_ADDRESS})?, store .*; "
    "press Ctrl-C to stop"
)
_FOLLOWS = re.compile("current until |waiting|not promoted|.* has taken over, with everything that was copied until ")


class BrokerProcess:
    """A broker process that is ready inside the ``with`` block. At the end of the block it is killed if it still runs.

    Attributes:
        line: The line that it printed when it was ready.
        address: Address of the broker.
        name_server: Address of the name server.
        grpc: Address for gRPC clients; None without the option ``--grpc``.
    """

    def __init__(self, folder: Path, *options: str, listen: str = "127.0.0.1:0") -> None:
        self._command = [
            *(sys.executable, "-W", "error", "-m", "mqtemplate", "broker", "--config", str(folder)),
            *("--store", str(folder / "store"), "--listen", listen, "--name-server", "127.0.0.1:0", *options),
        ]

    def __enter__(self) -> Self:
        self._start()
        try:
            self.read_addresses()
        except BaseException:
            self.kill()
            raise
        return self

    def _start(self) -> None:
        self.process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    @contextmanager
    def following(self) -> Iterator[Self]:
        """Start the process with the option ``--follow``: it has no addresses before it takes over."""
        self._start()
        try:
            assert self.process.stdout is not None
            self.line = self.process.stdout.readline().rstrip()
            assert " follows " in self.line, self.line
            yield self
        finally:
            if self.process.poll() is None:
                self.kill()

    def read_addresses(self) -> None:
        """Wait until the process is ready."""
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline().rstrip()
        while _FOLLOWS.match(self.line):
            self.line = self.process.stdout.readline().rstrip()
        found = _READY.fullmatch(self.line)
        if found is None:
            end_group(self.process)
            raise AssertionError(f"it did not start: {self.line!r}\n{self.process.communicate()[1]}")
        self.address = HostAddress(found[1], int(found[2]))
        self.name_server = HostAddress(found[3], int(found[4]))
        self.grpc = HostAddress(found[5], int(found[6])) if found[5] else None

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str, str]:
        """Send a signal. Return the exit code, the output since the process was ready, and the error output."""
        self.process.send_signal(number)
        output, errors = finish(self.process)
        return self.process.returncode, output, errors

    def kill(self) -> None:
        """Kill the process with SIGKILL: a crash."""
        end_group(self.process)
        if self.process.stdout is not None and not self.process.stdout.closed:
            self.process.communicate()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.kill()
