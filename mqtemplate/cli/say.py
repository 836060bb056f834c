"""Printing for a program that goes on whether somebody reads it or not."""

from __future__ import annotations

import os
import sys
from typing import TextIO


def say(text: str, stream: TextIO | None = None) -> None:
    """Print a line at once, on standard output if nothing else is said.

    A terminal that has no letter for something gets its number, and a pipe that nobody reads any more is passed over: a
    server does not end for either.
    """
    stream = stream or sys.stdout
    encoding = stream.encoding or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # what is left in it goes there at the end
