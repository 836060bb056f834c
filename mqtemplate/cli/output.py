"""Output of the command line to a terminal or a pipe."""

from __future__ import annotations

import os
import sys
from typing import TextIO


def print_line(text: str, stream: TextIO | None = None) -> None:
    """Print a line and flush it. The default is standard output.

    A server continues whatever happens to its output: a character that the terminal cannot show is escaped, and a
    closed pipe is ignored.
    """
    stream = stream or sys.stdout
    encoding = stream.encoding or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)
    except OSError:
        # Python flushes the stream again at exit and would report the error there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
