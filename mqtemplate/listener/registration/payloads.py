"""The converter of one listener: its own, or that of the application, with the listener's content type and charset."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mqtemplate.errors import ListenerError

if TYPE_CHECKING:  # it needs pydantic, which executors of Spark do not have
    from mqtemplate.converter import MessageConverter

ConverterOf = Callable[[type], "MessageConverter"]
"""Function that returns an object of a converter class."""


@dataclass(frozen=True, slots=True)
class PayloadSettings:
    """Attributes of a listener that choose its converter; None or empty for those of the application.

    Attributes:
        converter: A converter, or a class of converters.
        content_type: Content type of bodies that name none, and of replies.
        charset: Encoding of text.
    """

    converter: Any = None
    content_type: str = ""
    charset: str = ""


def read_converter(value: Any) -> Any:
    """Return a converter, or a class of converters; a text is the dotted name of one.

    Raises:
        ValueError, AttributeError: It is neither.
    """
    if isinstance(value, str):
        module, _, name = value.strip().rpartition(".")
        if not value.strip():
            return None
        try:
            value = getattr(import_module(module), name)
        except ImportError as error:
            raise ValueError(value) from error
    if value is not None and not all(callable(getattr(value, name, None)) for name in ("to_body", "from_body")):
        raise ValueError(value)
    return value


def converter_of(
    listener: str, settings: PayloadSettings, default: MessageConverter, converter_of_class: ConverterOf
) -> MessageConverter:
    """Return the converter of a listener.

    Raises:
        ListenerError: The converter writes text in one encoding only.
    """
    converter: Any = default if settings.converter is None else settings.converter
    if isinstance(converter, type):
        converter = converter_of_class(converter)
    if settings.charset:
        with_charset = getattr(converter, "with_charset", None)
        if with_charset is None:
            raise ListenerError(
                f"listener {listener}: charset={settings.charset!r} is given, and {converter!r} has no with_charset; "
                "remove charset, or give a converter that has it, such as JsonMessageConverter"
            )
        converter = with_charset(settings.charset)
    return WithContentType(converter, settings.content_type) if settings.content_type else converter


class WithContentType:
    """Converter that takes bodies without a content type for bodies of one, and writes it on replies."""

    def __init__(self, converter: MessageConverter, content_type: str) -> None:
        from mqtemplate.converter import CONTENT_TYPE

        self._header = CONTENT_TYPE
        self._converter = converter
        self._content_type = content_type
        check = getattr(converter, "check_type", None)
        self.check_type: Callable[[Any], object] = check if check is not None else lambda target_type: None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._converter!r}, {self._content_type!r})"

    def to_body(self, payload: object) -> tuple[bytes, str | None]:
        return self._converter.to_body(payload)[0], self._content_type

    def from_body(self, body: bytes, target_type: Any, properties: Mapping[str, str]) -> object:
        if self._header not in properties:
            properties = {**properties, self._header: self._content_type}
        return self._converter.from_body(body, target_type, properties)
