"""RocketMQ's Python client, in a virtual environment of its own. This project does not depend on it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from bench.peer.jvm import PeerError, scratch_home

CLIENT = "rocketmq-python-client==5.1.2"
"""The newest release on PyPI when this was written. It installs grpcio and protobuf."""
_ENVIRONMENT = Path(__file__).parents[2] / ".rocketmq/python-client"
PYTHON = _ENVIRONMENT / "bin/python"
"""Its interpreter."""
_READY = _ENVIRONMENT / ".ready"
_PROGRAMS = Path(__file__).with_name("python")
_FETCH_SECONDS = 600
_STOP_SECONDS = 30


def fetch_client() -> str | None:
    """Install the client if it is missing. Return the reason if that fails."""
    if _READY.exists() and _READY.read_text(encoding="utf-8") == CLIENT:
        return None
    print(f"Installing {CLIENT} from PyPI into .rocketmq/python-client, about 70 MB.", flush=True)
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(_ENVIRONMENT)],
        [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", CLIENT],
    ):
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_FETCH_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return f"{CLIENT} was not installed in {_FETCH_SECONDS} s"
        if done.returncode:
            last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
            return f"{CLIENT} could not be installed: {' '.join(last)}"
    _READY.write_text(CLIENT, encoding="utf-8")
    return None


@contextmanager
def python_program(name: str, *arguments: str) -> Iterator[IO[str]]:
    """Run a program of ``python/``: return its output lines, and wait until it has ended.

    Raises:
        PeerError: The program failed.
    """
    with scratch_home("python") as home, (home / "errors.out").open("w+") as errors:
        process = subprocess.Popen(
            [str(PYTHON), str(_PROGRAMS / f"{name}.py"), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=home,
            env=os.environ | {"HOME": str(home)},  # The client writes its log there.
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.stdout
            if process.wait(_STOP_SECONDS):
                errors.seek(0)
                raise PeerError(f"{name} ended with {process.returncode}:\n{errors.read()[-3_000:]}")
        finally:
            process.kill()
            process.stdin.close()
            process.stdout.close()
            process.wait()
