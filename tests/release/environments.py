"""Clean environments for the checks of a release: Pythons of this machine, the built distribution, commands."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

ROOT = Path(__file__).parents[2]
LOCKS = ROOT / ".ci" / "locks"
BUILD = ROOT / "build" / "release"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
OLDEST, NEWEST = 11, 19
"""Minor versions of Python 3 that are searched for; `requires-python` has the first one."""

_FOREIGN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "MYPYPATH")


class CheckFailedError(Exception):
    """A check of the release failed; the text says which one and how."""


@dataclass(frozen=True, order=True)
class Python:
    """One installed Python."""

    version: tuple[int, int]
    path: Path

    @property
    def name(self) -> str:
        """The version as text, such as ``3.13``."""
        return f"{self.version[0]}.{self.version[1]}"


def installed_pythons() -> list[Python]:
    """Return each Python from 3.11 on that is on the PATH or in pyenv, the oldest first.

    Each one is run: a shim of pyenv is on the PATH and still fails for a version that is not selected.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found: dict[tuple[int, int], Path] = {}
    for minor in range(OLDEST, NEWEST + 1):
        candidates = [shutil.which(f"python3.{minor}"), *sorted(pyenv.glob(f"3.{minor}.*/bin/python"))]
        for candidate in filter(None, candidates):
            if _version_of(candidate) == (3, minor):
                found[3, minor] = Path(candidate)
                break
    found.setdefault(sys.version_info[:2], Path(sys.executable))
    return [Python(version, found[version]) for version in sorted(found)]


def oldest_and_newest(pythons: Sequence[Python]) -> list[Python]:
    """Return the two ends of a list, or the one element that it has."""
    return sorted({pythons[0], pythons[-1]})


def _version_of(python: Path | str) -> tuple[int, ...] | None:
    program = "import sys, venv, ensurepip; print(*sys.version_info[:2])"
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=False)
    return tuple(map(int, done.stdout.split())) if done.returncode == 0 else None


def run(*command: Path | str, cwd: Path = ROOT, **variables: str) -> str:
    """Run a command without the variables that would lead Python to the clone; return what it printed.

    Raises:
        CheckFailedError: It failed; the text has its output.
    """
    env = {name: value for name, value in os.environ.items() if name not in _FOREIGN} | variables
    done = subprocess.run(
        command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        words = " ".join(str(word) for word in command)
        raise CheckFailedError(f"{words}\nended with exit code {done.returncode}:\n{done.stdout}")
    return done.stdout


def step(what: str, started: float) -> None:
    """Print one check that passed, with its seconds."""
    print(f"ok  {what}  ({monotonic() - started:.1f} s)", flush=True)


def build_wheel(folder: Path) -> Path:
    """Build the wheel of the clone into an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder)
    [wheel] = folder.glob("*.whl")
    return wheel


def environment(folder: Path, python: Python, wheel: Path, *, lock: str | None = "base", is_kept: bool = False) -> Path:
    """Create an environment with the wheel and the packages of a lock; return its Python.

    Args:
        lock: None for the wheel alone.
        is_kept: Use the environment of the run before, with this wheel, if its Python and its lock are the same.
    """
    inside = folder / "bin" / "python"
    packages = "" if lock is None else (LOCKS / f"{lock}.txt").read_text("utf-8")
    wanted, origin = f"{python.path}\n{packages}", folder / "origin.txt"
    install = (inside, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    if not (is_kept and origin.exists() and origin.read_text("utf-8") == wanted and inside.exists()):
        run(python.path, "-m", "venv", "--clear", folder)
        if lock is not None:
            run(*install, "--require-hashes", "--requirement", LOCKS / f"{lock}.txt")
        origin.write_text(wanted, "utf-8")
    run(*install, "--force-reinstall", "--no-deps", "--no-index", wheel)
    return inside


def check_origin(inside: Path, cwd: Path) -> None:
    """Check that an environment imports mqtemplate from its own packages, not from the clone."""
    origin = run(inside, "-c", "import mqtemplate; print(mqtemplate.__file__)", cwd=cwd).strip()
    if not re.search(r"/site-packages/mqtemplate/__init__\.py$", origin):
        raise CheckFailedError(f"mqtemplate was imported from {origin}, not from the installed wheel")
