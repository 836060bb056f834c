"""One worker process of ``mqtemplate run``: it runs the application, and tells the supervisor when it is ready.

``python -m mqtemplate.running.worker TARGET DESCRIPTOR``: the descriptor is one end of a pair of sockets. The worker
reads its options from it, and writes a line when it is ready. If the supervisor dies, it reads the end of the stream,
and stops in order.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence

from mqtemplate.context.application import MQApplication
from mqtemplate.context.failure_report import reported_failures
from mqtemplate.running.reload import reload_of
from mqtemplate.running.target import READY, RunOptions, load_application


def main(arguments: Sequence[str]) -> None:
    """Run an application until a signal arrives, or the supervisor has ended.

    Raises:
        SystemExit: The application cannot start.
    """
    supervisor = socket.socket(fileno=int(arguments[1]))
    supervisor.set_inheritable(False)  # a process that the application starts must not keep it open
    with supervisor.makefile("r", encoding="utf-8") as stream:
        line = stream.readline()  # the only one that the supervisor writes
    if not line:
        raise SystemExit("the supervisor ended before it sent the options of this worker")
    options = RunOptions.from_json(line)
    threading.Thread(target=_stop_with, args=(supervisor,), name="mqtemplate-supervisor", daemon=True).start()
    with reported_failures():
        app = load_application(options)
    threading.Thread(target=_report_ready, args=(app, supervisor), name="mqtemplate-ready", daemon=True).start()
    with reload_of(app).running():
        app.run()


def _stop_with(supervisor: socket.socket) -> None:
    try:
        while supervisor.recv(64):
            pass
    except OSError:  # reset: the supervisor was killed
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _report_ready(app: MQApplication, supervisor: socket.socket) -> None:
    app.is_ready.wait()
    with contextlib.suppress(ConnectionError):  # the supervisor was killed; `_stop_with` stops the application
        supervisor.sendall(READY)


if __name__ == "__main__":
    main(sys.argv[1:])
