"""Routes for the probes of an orchestrator."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from mqtemplate.context import MQApplication
from mqtemplate.running.hosting import health_of

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
