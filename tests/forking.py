"""A child process that a test forks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable


def fork() -> int:
    """Fork, although threads are running: that is the point. Return the id of the child; 0 in the child."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def in_child(work: Callable[[], str]) -> str:
    """Return the result of *work* in a forked child, or its error, then end the child without pytest's own exit."""
    reader, writer = os.pipe()
    pid = fork()
    if pid == 0:
        try:
            os.write(writer, work().encode())
        except BaseException as exc:
            os.write(writer, f"{type(exc).__name__}: {exc}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        result = pipe.read().decode()
    os.waitpid(pid, 0)
    return result
