"""A web server with worker processes, on loopback, on a port that the operating system chooses."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.programs import end_group
from tests.waiting import eventually

_ROOT = Path(__file__).parents[2]
_ADDRESS = re.compile(r"https?://127\.0\.0\.1:(\d+)")


class WebServer:
    """A server that listens inside the ``with`` block.

    Attributes:
        lines: Output so far.
    """

    def __init__(self, folder: Path, *command: str, environment: Mapping[str, str] | None = None) -> None:
        self._command = [sys.executable, "-W", "ignore", "-m", *command]
        self._folder = folder
        self._environment = environment or {}
        self.lines: list[str] = []

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command,
            cwd=self._folder,
            env={
                "PYTHONPATH": f"{_ROOT}:{_ROOT / 'starters'}:{self._folder}",
                "PATH": "/usr/bin:/bin",
                **self._environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # its workers can be killed with it
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._port = eventually(lambda: _ADDRESS.search(self.output), "the server listens")[1]
        return self

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            self.lines.extend(iter(output.readline, ""))

    @property
    def output(self) -> str:
        """All output so far."""
        return "".join(self.lines)

    @property
    def url(self) -> str:
        """URL of the server."""
        return f"http://127.0.0.1:{self._port}/"

    def get(self) -> str:
        """Return the body of a response. A server says that it is ready a moment before it accepts connections."""
        return eventually(self._get, "the server accepts a connection")

    def _get(self) -> str:
        try:
            with urllib.request.urlopen(self.url) as response:
                return str(response.read().decode())
        except urllib.error.URLError as exc:
            if isinstance(exc.reason, ConnectionRefusedError):
                return ""
            raise

    def stop(self) -> int:
        """Stop the server as an operator does. Return its exit code."""
        self._process.terminate()
        eventually(lambda: self._process.poll() is not None, "the server has ended")
        self._reader.join()
        return self._process.wait()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        end_group(self._process)
        self._process.wait()
        self._reader.join()
        if error is not None:
            error.add_note(self.output)
