"""Starter of Django: an app for ``INSTALLED_APPS``, the messages of a project, and clean connections around handlers.

Names are imported when they are used, since the models of a project need its settings first.
"""

from typing import TYPE_CHECKING

from mqtemplate.exports import late_import

if TYPE_CHECKING:
    from mqtemplate_starter_django.autoconfiguration import DjangoAutoConfiguration
    from mqtemplate_starter_django.project import (
        application,
        asgi,
        messages,
        new_application,
        outbox,
        send_on_commit,
        template,
        wsgi,
    )
    from mqtemplate_starter_django.tasks.backend import MQTemplateBackend

__all__ = [
    "DjangoAutoConfiguration",
    "MQTemplateBackend",
    "application",
    "asgi",
    "messages",
    "new_application",
    "outbox",
    "send_on_commit",
    "template",
    "wsgi",
]

__getattr__ = late_import(
    __name__,
    {
        "DjangoAutoConfiguration": "mqtemplate_starter_django.autoconfiguration",
        "MQTemplateBackend": "mqtemplate_starter_django.tasks.backend",
        **dict.fromkeys(
            (
                "application",
                "asgi",
                "messages",
                "new_application",
                "outbox",
                "send_on_commit",
                "template",
                "wsgi",
            ),
            "mqtemplate_starter_django.project",
        ),
    },
)
