"""AsyncAPI 3 document of an application: its channels, operations and messages."""

from typing import TYPE_CHECKING

from mqtemplate.asyncapi.declaration import documents_send
from mqtemplate.exports import load_export

if TYPE_CHECKING:
    from mqtemplate.asyncapi.document import asyncapi_document, markdown_of

__all__ = ["asyncapi_document", "documents_send", "markdown_of"]


def __getattr__(name: str) -> object:
    # Imported with the first use: a program that only declares what it sends needs neither.
    if name not in ("asyncapi_document", "markdown_of"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = load_export(__name__, "document", name)
    return value
