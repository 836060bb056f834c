"""Dependencies of path operations: the template, and any object of the application."""

from typing import Annotated, Any, TypeVar

from fastapi import Depends
from starlette.requests import HTTPConnection

from mqtemplate.context import MQApplication
from mqtemplate.errors import DependencyError
from mqtemplate.template import RocketMQTemplate

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
