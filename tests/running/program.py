"""A program in a process of its own, and its output line by line."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.programs import end_group
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]


class Program:
    """``python -m …`` that runs inside the ``with`` block; at its end it is killed if it still runs.

    Attributes:
        process: The process.
    """

    def __init__(self, folder: Path, *command: str, **environment: str) -> None:
        self._command = [sys.executable, "-m", *command]
        self._folder = folder
        paths = f"{ROOT}:{ROOT / 'starters'}:{folder}"
        self._environment = {"PYTHONPATH": paths, "PATH": os.environ["PATH"], **environment}
        self._lines: list[str] = []

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(
            self._command,
            cwd=self._folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            self._lines.extend(iter(output.readline, ""))

    @property
    def output(self) -> str:
        """All output so far, of standard output and standard error."""
        return "".join(self._lines)

    def wait_for(self, pattern: str, count: int = 1) -> list[str]:
        """Wait until a pattern was printed so often. Return the matches, or their first group."""
        found = re.compile(pattern, re.MULTILINE)
        eventually(lambda: len(found.findall(self.output)) >= count, f"{pattern!r} was printed {count} times")
        return found.findall(self.output)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        self.process.send_signal(number)

    def end(self) -> int:
        """Wait for the end of the process and of its output. Return its exit code."""
        eventually(lambda: self.process.poll() is not None, "the program has ended")
        self._reader.join()
        return self.process.wait()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal, and wait for the end. Return the exit code."""
        self.send(number)
        return self.end()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        end_group(self.process)
        self.process.wait()
        self._reader.join()
        if error is not None:
            error.add_note(self.output)
