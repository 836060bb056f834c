"""Python of an executor: it has numpy, pyarrow and PySpark, and nothing else that is installed here."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa

_PACKAGES = ("numpy", "numpy.libs", "pyarrow", "pyarrow.libs")


def bare_python(folder: Path) -> Path:
    """Write a program that runs Python without this library, and return its path."""
    packages = folder / "packages"
    packages.mkdir()
    for installed in {Path(module.__file__ or "").parents[1] for module in (np, pa)}:
        for name in _PACKAGES:
            if (installed / name).exists():
                (packages / name).symlink_to(installed / name)
    program = folder / "python"
    # Without -S, Python adds the folder with everything that is installed. Spark passes its own path.
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{packages}{os.pathsep}$PYTHONPATH" exec {sys.executable} -S "$@"\n')
    program.chmod(0o755)
    return program
