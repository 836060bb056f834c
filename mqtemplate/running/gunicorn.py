"""Hooks of gunicorn: ``gunicorn -c python:mqtemplate.running.gunicorn shop.web:app``.

Each worker starts the messages of its web application before the first request, also with ``--preload``, and stops them
at its end. A configuration file of your own imports the two functions.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mqtemplate.running.hosting import process_of

graceful_timeout = 60
"""Seconds after which gunicorn kills a worker that stops. Its own 30 would be as long as handlers alone may take."""


def post_worker_init(worker: Any) -> None:
    """Start the messages of a worker, after its web application was imported."""
    process = process_of(worker.wsgi)
    if process is not None:
        with _alive(worker):
            process.start()


_NOTIFY_S = 1.0


@contextmanager
def _alive(worker: Any) -> Iterator[None]:
    """Tell gunicorn that a worker is alive while it starts.

    It kills a worker that is silent for its ``timeout``, 30 seconds by default. An embedded broker that rebuilds the
    files of a large store takes longer, and would begin again in the next worker.
    """
    ended = threading.Event()

    def notify() -> None:
        worker.notify()
        while not ended.wait(_NOTIFY_S):
            worker.notify()

    thread = threading.Thread(target=notify, name="mqtemplate-start", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def worker_exit(_server: Any, worker: Any) -> None:
    """Stop the messages of a worker: running handlers finish."""
    process = process_of(getattr(worker, "wsgi", None))  # missing if the worker could not import its application
    if process is not None:
        process.stop()
