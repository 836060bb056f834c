"""Hooks of gunicorn: ``gunicorn -c python:mqtemplate.running.gunicorn shop.web:app``.

Each worker starts the messages of its web application before the first request, also with ``--preload``, and stops them
at its end. A configuration file of your own imports the two functions.
"""

from __future__ import annotations

from typing import Any

from mqtemplate.running.hosting import process_of

graceful_timeout = 60
"""Seconds after which gunicorn kills a worker that stops. Its own 30 would be as long as handlers alone may take."""


def post_worker_init(worker: Any) -> None:
    """Start the messages of a worker, after its web application was imported."""
    process = process_of(worker.wsgi)
    if process is not None:
        process.start()


def worker_exit(_server: Any, worker: Any) -> None:
    """Stop the messages of a worker: running handlers finish."""
    process = process_of(getattr(worker, "wsgi", None))  # missing if the worker could not import its application
    if process is not None:
        process.stop()
