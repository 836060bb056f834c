"""Settings of the interpreter for a process that serves others: its threads wait little for each other."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_SWITCH_INTERVAL_S = 0.00005
"""Time after which a busy thread lets another one run. With Python's 5 ms, the I/O thread would wait so long after each
system call while a worker thread parses a large request, and a response needs several system calls."""
_GC_THRESHOLDS = (10_000, 20, 20)
"""Python's are (700, 10, 10): a collection of all objects, which holds all threads, is seldom needed here."""


@contextmanager
def prompt_threads() -> Iterator[None]:
    """Let threads take turns often, and collect garbage only among the objects that are created in the block.

    Enter it when everything is started. A full collection holds all threads. With the modules and settings of a server
    it took up to 100 ms, and large requests cause many (``bench.hostile``).
    """
    interval_s, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
        sys.setswitchinterval(interval_s)
