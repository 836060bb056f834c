"""Hooks of gunicorn: ``gunicorn -c python:mqtemplate.running.gunicorn shop.web:app``.

Each worker starts its applications before its first request, also with ``--preload``, and stops them at its end. A
configuration file of your own imports the two functions.
"""

from __future__ import annotations

from mqtemplate.running.process_application import start_all, stop_all


def post_worker_init(_worker: object) -> None:
    """Start the applications of a worker."""
    start_all()


def worker_exit(_server: object, _worker: object) -> None:
    """Stop the applications of a worker: running handlers finish."""
    stop_all()
