"""AsyncAPI 3 document of an application: its channels, operations and messages."""

from typing import TYPE_CHECKING

from mqtemplate.asyncapi.declaration import documents_send
from mqtemplate.exports import load_export

if TYPE_CHECKING:
    from mqtemplate.asyncapi.document import asyncapi_document
    from mqtemplate.asyncapi.markdown import markdown_of

__all__ = ["asyncapi_document", "documents_send", "markdown_of"]

_MODULES = {"asyncapi_document": "document", "markdown_of": "markdown"}
# imported with their first use: a program that only declares what it sends needs neither


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = load_export(__name__, _MODULES[name], name)
    return value
