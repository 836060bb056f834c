"""Fresh processes of Python that read bytecode, as those of an installed package do: this library and its peers."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from bench.peer.python_environment import install, python_of

ENVIRONMENT = "weight"
_TIMEOUT_S = 120
_PEERS = ("faststream[nats]==0.7.8", "celery==5.7.0", "dramatiq==2.2.1")


def install_peers() -> str | None:
    """Install the peers; return why that is not possible, or None."""
    return install(ENVIRONMENT, *_PEERS)


def peers_python() -> str:
    """Return the interpreter that has the peers."""
    return str(python_of(ENVIRONMENT))


@dataclass(frozen=True, slots=True)
class FreshProcesses:
    """Starter of processes that find their bytecode in one folder.

    Attributes:
        variables: Their environment.
    """

    variables: dict[str, str]

    def output_of(self, python: str, code: str, *arguments: str) -> str:
        """Return what a program prints. The first run of a program writes its bytecode, so it is not measured."""
        command = [python, "-c", code, *arguments]
        done = subprocess.run(
            command, env=self.variables, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
        if done.returncode:
            raise RuntimeError(f"the program failed: {done.stderr.strip().splitlines()[-1:]}")
        return done.stdout


@contextmanager
def fresh_processes() -> Iterator[FreshProcesses]:
    """Create a folder for the bytecode, whatever this process does with its own, and remove it at the end."""
    with tempfile.TemporaryDirectory(prefix="mqtemplate-bytecode-") as folder:
        variables = os.environ | {"PYTHONPYCACHEPREFIX": folder}
        variables.pop("PYTHONDONTWRITEBYTECODE", None)
        yield FreshProcesses(variables)
