"""Actuator: health, metrics and listeners of an application over HTTP, in the shapes of Spring Boot's."""

from typing import TYPE_CHECKING

from mqtemplate.exports import late_import

if TYPE_CHECKING:
    from mqtemplate.actuator.actuator import Actuator, ActuatorSources
    from mqtemplate.actuator.http_server import ManagementServer
    from mqtemplate.actuator.response import Response
    from mqtemplate.actuator.web import asgi_app, wsgi_app

__all__ = ["Actuator", "ActuatorSources", "ManagementServer", "Response", "asgi_app", "wsgi_app"]

__getattr__ = late_import(
    __name__,
    {
        "Actuator": "mqtemplate.actuator.actuator",
        "ActuatorSources": "mqtemplate.actuator.actuator",
        "ManagementServer": "mqtemplate.actuator.http_server",
        "Response": "mqtemplate.actuator.response",
        "asgi_app": "mqtemplate.actuator.web",
        "wsgi_app": "mqtemplate.actuator.web",
    },
)
