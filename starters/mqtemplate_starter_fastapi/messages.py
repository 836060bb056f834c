"""The messages of a FastAPI or Starlette application, dependencies of path operations, and routes for probes."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends
from starlette.applications import Starlette
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from mqtemplate.context import MQApplication
from mqtemplate.errors import DependencyError
from mqtemplate.running.hosting import ProcessApplication, health_of
from mqtemplate.template import RocketMQTemplate

App = TypeVar("App", bound=Starlette)
Lifespan = Callable[[App], AbstractAsyncContextManager[Mapping[str, Any] | None]]


class FastAPIMQTemplate(ProcessApplication):
    """One `MQApplication` for each process of a web application, which starts and stops with its lifespan.

    ::

        messages = MQTemplate("shop.listeners")
        web = FastAPI(lifespan=messages.lifespan)

    ``async def`` handlers run on the event loop of the server. Each lifespan has a new `MQApplication`, so a test
    client may be entered several times. The arguments are the components and options of `MQApplication`.
    """

    @asynccontextmanager
    async def lifespan(self, web: Starlette) -> AsyncIterator[None]:
        """Lifespan for ``FastAPI(lifespan=...)`` and ``Starlette(lifespan=...)``."""
        web.state.mqtemplate = await self.start_async()
        try:
            yield
        finally:
            await self.stop_async()

    def around(self, inner: Lifespan[App]) -> Lifespan[App]:
        """Return a lifespan that runs another one while the messages work."""

        @asynccontextmanager
        async def lifespan(web: App) -> AsyncIterator[Mapping[str, Any] | None]:
            async with self.lifespan(web), inner(web) as state:
                yield state

        return lifespan


T = TypeVar("T")


def application_of(connection: HTTPConnection) -> MQApplication:
    """Return the started application of a request or websocket.

    Raises:
        DependencyError: The lifespan did not run.
    """
    app = getattr(connection.app.state, "mqtemplate", None)
    if isinstance(app, MQApplication):
        return app
    raise DependencyError(
        "this web application has no started MQApplication; create it with FastAPI(lifespan=messages.lifespan), and in "
        "tests enter the client: with TestClient(web) as client"
    )


def template(connection: HTTPConnection) -> RocketMQTemplate:
    """Return the template, for ``Depends(template)``."""
    return application_of(connection).template


Template = Annotated[RocketMQTemplate, Depends(template)]
"""Annotation of a parameter that gets the template: ``async def order(order: Order, template: Template)``."""


def depends(wanted: type[T], name: str | None = None) -> Any:
    """Return a dependency on an object of the application: ``audit: Annotated[Audit, depends(Audit)]``.

    Args:
        name: Distinguishes several objects of one type.
    """

    def injected(connection: HTTPConnection) -> T:
        return application_of(connection).get(wanted, name)

    return Depends(injected)


_READY, _LIVE = "/health/ready", "/health/live"


async def _ready(request: Request) -> JSONResponse:
    app = getattr(request.app.state, "mqtemplate", None)
    health = health_of(app if isinstance(app, MQApplication) else None)
    return JSONResponse(health.body, health.status_code)


async def _live() -> dict[str, str]:
    return {"status": "UP"}


def health_router() -> APIRouter:
    """Return the routes ``/health/ready`` (200 or 503) and ``/health/live`` (200) for FastAPI."""
    router = APIRouter(tags=["health"])
    router.add_api_route(_READY, _ready, response_model=None)
    router.add_api_route(_LIVE, _live)
    return router


def health_route(path: str = _READY) -> Route:
    """Return the route of the readiness for Starlette."""
    return Route(path, _ready)
