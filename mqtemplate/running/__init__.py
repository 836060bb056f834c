"""Processes of an application: ``mqtemplate run``, and web servers. Names are imported when they are used."""

from typing import TYPE_CHECKING

from mqtemplate.exports import late_import

if TYPE_CHECKING:
    from mqtemplate.running.hosting import MQTemplateASGI, MQTemplateWSGI

__all__ = ["MQTemplateASGI", "MQTemplateWSGI"]

__getattr__ = late_import(
    __name__,
    {
        "MQTemplateASGI": "mqtemplate.running.hosting",
        "MQTemplateWSGI": "mqtemplate.running.hosting",
    },
)
