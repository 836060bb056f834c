"""A worker process, as the supervisor sees it."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable

from mqtemplate.running.options import RunOptions

READY = b"ready\n"
"""Line that a worker writes when its application is ready."""


class WorkerProcess:
    """One process that runs the application. It is not forked: it starts with an interpreter of its own.

    It has a process group of its own, so Ctrl-C in a terminal reaches the supervisor only, which stops it in order.

    Args:
        on_ready: Called in a thread when the application is ready.
        on_end: Called in a thread with the exit code when the process has ended; negative: the signal that ended it.

    Attributes:
        pid: Id of the process.
    """

    def __init__(self, options: RunOptions, on_ready: Callable[[], object], on_end: Callable[[int], object]) -> None:
        self._channel, theirs = socket.socketpair()
        with theirs:
            # The target is for readers of lists of processes. The options may contain an account.
            command = [sys.executable, "-m", "mqtemplate.running.worker", options.target, str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], process_group=0)
        with contextlib.suppress(ConnectionError):  # it has ended already, which `_observe` reports
            self._channel.sendall(f"{options.to_json()}\n".encode())
        self.pid = self._process.pid
        self._on_ready, self._on_end = on_ready, on_end
        threading.Thread(target=self._observe, name=f"mqtemplate-worker-{self.pid}", daemon=True).start()

    def terminate(self) -> None:
        """Request an orderly stop: handlers finish, offsets are committed."""
        self._process.terminate()

    def kill(self) -> None:
        """End the process at once. Messages of running handlers are delivered again."""
        self._process.kill()

    def _observe(self) -> None:
        # A worker that ends before it has read its options resets the connection.
        with self._channel, contextlib.suppress(ConnectionError):
            received = b""
            while part := self._channel.recv(64):
                received += part
                if received == READY:
                    self._on_ready()
        self._on_end(self._process.wait())


def exit_text(code: int) -> str:
    """Return the end of a process in words, after its name: ``was ended by SIGKILL``."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
