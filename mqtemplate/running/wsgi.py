"""A WSGI application together with its `MQApplication`, which starts with the first request of each process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeAlias

WSGIApp: TypeAlias = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class Messages(Protocol):
    """A `mqtemplate.running.hosting.ProcessApplication`."""

    def start(self) -> object:
        """Start, unless it is started, and return the application."""


class MQTemplateWSGI:
    """WSGI application around another one.

    WSGI has no start and no end of a process, so the first request starts the messages, and the end of the process
    stops them. `mqtemplate.running.gunicorn` starts them with each worker of gunicorn.

    ``environ["mqtemplate"]`` of each request is the started `MQApplication`.
    """

    def __init__(self, app: WSGIApp, messages: Messages) -> None:
        self._app = app
        self._messages = self.__mqtemplate__ = messages  # `mqtemplate.running.hosting.process_of`

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        environ["mqtemplate"] = self._messages.start()
        return self._app(environ, start_response)
