"""Python programs over this checkout, each in a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from tests.waiting import Patience

ROOT = Path(__file__).parents[1]
PATHS = f"{ROOT}:{ROOT / 'starters'}"
_PATIENCE_S = 100.0


def environment(*, bare: bool = False, **variables: str) -> dict[str, str]:
    """Return the environment of a program that imports this checkout.

    Args:
        bare: True: nothing of this process, as in a container; else its environment.
    """
    inherited = {"PATH": "/usr/bin:/bin"} if bare else os.environ
    return {**inherited, "PYTHONPATH": PATHS, **variables}


def end_group(process: subprocess.Popen[Any]) -> None:
    """Kill a process that has a group of its own, with its children: workers of uvicorn, the JVM of Spark."""
    with contextlib.suppress(ProcessLookupError):  # all have ended
        os.killpg(process.pid, signal.SIGKILL)


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Wait for the end of a process, and return its output and its error output.

    Raises:
        subprocess.TimeoutExpired: It hangs, see `Patience`.
    """
    patience = Patience(_PATIENCE_S)
    while True:
        try:
            return process.communicate(timeout=_PATIENCE_S)
        except subprocess.TimeoutExpired:
            if patience.is_over:
                raise


def run(command: list[str], folder: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder until it ends. Processes that it leaves behind are killed."""
    # Files, because a child that goes on would keep a pipe open.
    with TemporaryFile("w+", encoding="utf-8") as output, TemporaryFile("w+", encoding="utf-8") as errors:
        process = subprocess.Popen(
            command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, start_new_session=True
        )
        patience = Patience(_PATIENCE_S)
        try:
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_PATIENCE_S)
                if process.poll() is None and patience.is_over:
                    output.seek(0)
                    errors.seek(0)
                    raise AssertionError(f"{command} does not end: {output.read()}{errors.read()}")
        finally:
            end_group(process)
            process.wait()
        output.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(command, process.returncode, output.read(), errors.read())


def run_python(folder: Path, *arguments: str, bare: bool = False, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder until it ends, see `run`."""
    return run([sys.executable, *arguments], folder, environment(bare=bare, **variables))
