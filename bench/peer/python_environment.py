"""Python packages that a bench measures as peers, in virtual environments of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_ENVIRONMENTS = Path(__file__).parents[2] / ".rocketmq"
_INSTALL_TIMEOUT_S = 600


def python_of(name: str) -> Path:
    """Return the interpreter of the environment *name*."""
    return _ENVIRONMENTS / name / "bin/python"


def install(name: str, *packages: str) -> str | None:
    """Create the environment *name* with *packages* if it does not exist yet.

    Returns:
        None, or the reason why it could not be created.
    """
    ready = _ENVIRONMENTS / name / ".ready"
    wanted = "\n".join(packages)
    if ready.exists() and ready.read_text(encoding="utf-8") == wanted:
        return None
    print(f"Installing {', '.join(packages)} from PyPI into .rocketmq/{name}.", flush=True)
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(_ENVIRONMENTS / name)],
        [str(python_of(name)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages],
    ):
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_INSTALL_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"{wanted} was not installed in {_INSTALL_TIMEOUT_S} s"
        if done.returncode:
            last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
            return f"{wanted} could not be installed: {' '.join(last)}"
    ready.write_text(wanted, encoding="utf-8")
    return None
