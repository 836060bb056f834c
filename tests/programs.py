"""Python programs over this checkout, each in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryFile
from types import TracebackType
from typing import Any, Self

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


OF_AN_APPLICATION = (
    "mqtemplate.context.application",
    "mqtemplate.context.components",
    "mqtemplate.context.phases",
    "mqtemplate.brokers.embedded.broker",
    "mqtemplate.testing",
    "mqtemplate_starter_embedded.autoconfiguration",
)
"""Modules that an application with an embedded broker imports."""

_FORKING = """
import gc, json, os, sys
from importlib import import_module

for module in sys.argv[1:]:
    import_module(module)
gc.freeze()
while line := sys.stdin.readline():
    if not (process := os.fork()):
        break
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
else:
    sys.exit()
folder, text, sys.argv[1:] = json.loads(line)
os.chdir(folder)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
for number, name in ((1, "output"), (2, "errors")):
    os.dup2(os.open(f"{folder}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
exec(compile(text, "<string>", "exec"), {"__name__": "__main__"})
"""
"""Reads a program from each line, and runs it in a child, which then ends as any Python does."""


class ForkedPython:
    """A Python that has imported modules, and forks a process for each program.

    Half a second of processor time is the import of the library: programs that do not test their start need it once.

    Args:
        options: Options of Python, such as ``-W``.
        modules: Modules to import. They must start no thread.
    """

    def __init__(self, *options: str, modules: tuple[str, ...]) -> None:
        self._command = [sys.executable, *options, "-c", _FORKING, *modules]

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        return self

    def run(self, folder: Path, text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the text of a program in a folder until it ends."""
        commands, results = self._process.stdin, self._process.stdout
        assert commands is not None
        assert results is not None
        print(json.dumps([str(folder), text, arguments]), file=commands, flush=True)
        code = results.readline()
        assert code, "the Python that forks has ended; its error output is above"
        output, errors = (Path(f"{folder}.{name}").read_text("utf-8") for name in ("output", "errors"))
        return subprocess.CompletedProcess(arguments, int(code), output, errors)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        end_group(self._process)
        self._process.communicate()
