"""Python programs over this checkout, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PATHS = f"{ROOT}:{ROOT / 'starters'}"


def environment(*, bare: bool = False, **variables: str) -> dict[str, str]:
    """Return the environment of a program that imports this checkout.

    Args:
        bare: True: nothing of this process, as in a container; else its environment.
    """
    inherited = {"PATH": "/usr/bin:/bin"} if bare else os.environ
    return {**inherited, "PYTHONPATH": PATHS, **variables}


def run_python(
    folder: Path, *arguments: str, timeout_s: float = 100, bare: bool = False, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder until it ends."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment(bare=bare, **variables),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
