"""A WSGI application together with its `MQApplication`, which starts with the first request of each process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from mqtemplate.running.process_application import RUN_ATTRIBUTE, ProcessApplication

WSGIApp: TypeAlias = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class MQTemplateWSGI:
    """WSGI application around another one.

    WSGI has no start and no end of a process, so the first request starts the messages, and the end of the process
    stops them. `mqtemplate.running.gunicorn` starts them with each worker of gunicorn.

    ``environ["mqtemplate"]`` of each request is the started `MQApplication`.
    """

    def __init__(self, app: WSGIApp, messages: ProcessApplication) -> None:
        self._app = app
        self._messages = messages
        setattr(self, RUN_ATTRIBUTE, messages)

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        environ["mqtemplate"] = self._messages.start()
        return self._app(environ, start_response)
