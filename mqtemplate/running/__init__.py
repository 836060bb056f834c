"""Processes of an application: ``mqtemplate run``, and the processes of web servers. Names are imported when used."""

from typing import TYPE_CHECKING

from mqtemplate.exports import late_import

if TYPE_CHECKING:
    from mqtemplate.running.asgi import MQTemplateASGI
    from mqtemplate.running.health import Health, health_of
    from mqtemplate.running.options import RunOptions
    from mqtemplate.running.process_application import ProcessApplication
    from mqtemplate.running.program import check, run
    from mqtemplate.running.wsgi import MQTemplateWSGI

__all__ = [
    "Health",
    "MQTemplateASGI",
    "MQTemplateWSGI",
    "ProcessApplication",
    "RunOptions",
    "check",
    "health_of",
    "run",
]

__getattr__ = late_import(
    __name__,
    {
        "Health": "mqtemplate.running.health",
        "MQTemplateASGI": "mqtemplate.running.asgi",
        "MQTemplateWSGI": "mqtemplate.running.wsgi",
        "ProcessApplication": "mqtemplate.running.process_application",
        "RunOptions": "mqtemplate.running.options",
        "check": "mqtemplate.running.program",
        "health_of": "mqtemplate.running.health",
        "run": "mqtemplate.running.program",
    },
)
