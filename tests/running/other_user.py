"""Another user of the machine: what a process with another uid may do to the files and ports of an application."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.programs import run

OTHER_UID = 65_534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")

_PROGRAM = """
import encodings.idna, json, os, socket, sys  # now: another user may not read the folder of this interpreter
os.setgroups([])
os.setgid({uid})
os.setuid({uid})

{code}
"""


def as_other_user(code: str, *arguments: str) -> Any:
    """Run code as another user, and return the value that it prints as JSON."""
    program = _PROGRAM.format(uid=OTHER_UID, code=code)
    done = run([sys.executable, "-c", program, *arguments], Path("/"))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def open_to_others(*paths: Path) -> list[str]:
    """Return the paths, and those in the folders, that another user can list, read or write."""
    found: list[str] = as_other_user(
        """
found = []
def look(path):
    if any(os.access(path, mode) for mode in (os.R_OK, os.W_OK)):
        found.append(path)
    if os.path.isdir(path):
        try:
            names = os.listdir(path)
        except PermissionError:
            return
        for name in names:
            look(os.path.join(path, name))
for path in sys.argv[1:]:
    look(path)
print(json.dumps(found))
""",
        *map(str, paths),
    )
    return found


def answers_to_other_user(port: int, frames: Sequence[bytes]) -> list[bytes]:
    """Send requests to a port of 127.0.0.1 as another user. Return the response to each; empty if there is none."""
    found: list[str] = as_other_user(
        """
answers = []
for frame in sys.argv[2:]:
    with socket.create_connection(("127.0.0.1", int(sys.argv[1])), 10) as connection:
        connection.sendall(bytes.fromhex(frame))
        connection.shutdown(socket.SHUT_WR)
        with connection.makefile("rb") as stream:
            answers.append(stream.read().hex())
print(json.dumps(answers))
""",
        str(port),
        *(frame.hex() for frame in frames),
    )
    return [bytes.fromhex(each) for each in found]


@contextmanager
def public_folder() -> Iterator[Path]:
    """Yield a folder that all users can enter, as a folder of a service in /srv is. Those of pytest are private."""
    with tempfile.TemporaryDirectory(prefix="mqtemplate-test-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)
