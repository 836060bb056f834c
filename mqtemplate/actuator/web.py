"""The actuator as a handler of requests, and as a WSGI and an ASGI application for any web framework to mount."""

from __future__ import annotations

from mqtemplate.actuator.response import HEADERS, MAX_BODY_BYTES, Responder, below_actuator
from mqtemplate.http.bridges import AsgiApp, WsgiApp, asgi_application, wsgi_application
from mqtemplate.http.exchange import HttpHandler, HttpRequest, HttpResponse


def handler_of(actuator: Responder) -> HttpHandler:
    """Return the actuator as a handler of requests."""

    def handle(request: HttpRequest) -> HttpResponse:
        response = actuator.respond(
            request.method,
            below_actuator(request.path),
            request.query,
            request.headers.get("authorization", ""),
            request.body,
            request.remote,
            request.headers.get("host"),  # without one it is no browser
        )
        return HttpResponse(response.status, response.body, response.content_type, HEADERS)

    return handle


def wsgi_app(actuator: Responder) -> WsgiApp:
    """Return the actuator as a WSGI application: Flask, Django, gunicorn. Mount it at ``/actuator``."""
    return wsgi_application(handler_of(actuator), MAX_BODY_BYTES)


def asgi_app(actuator: Responder) -> AsgiApp:
    """Return the actuator as an ASGI application: FastAPI, Starlette, uvicorn. Mount it at ``/actuator``.

    The documents are created in a thread: a health check may wait for a broker.
    """
    return asgi_application(handler_of(actuator), MAX_BODY_BYTES)
