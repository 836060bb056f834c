"""A command's header as JSON, which is RocketMQ's default encoding.

Written as Java writes it: keys in alphabetical order, no blanks, null left out, every value of ``extFields`` a string.
``extFields`` itself is always written, even if it is empty: brokers read it without a check for null.

Read as Java reads it: unknown keys are ignored, null is the same as missing, and a number or a boolean among the
``extFields`` becomes text.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Sequence
from typing import Any

from mqtemplate.errors import MessageError, RemoteProtocolError
from mqtemplate.remoting.protocol.codes import LanguageCode, SerializeType
from mqtemplate.remoting.protocol.command import RemotingCommand

_encode_text = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False).encode


def _dump_plainly(value: Any) -> bytes:
    return _encode_text(value).encode()


def _load_plainly(data: bytes) -> Any:
    text = data.decode()
    value = json.loads(text)
    # A lone surrogate could never be encoded again. It becomes a question mark, which Java writes for it as well.
    if "\\ud" in text or "\\uD" in text:
        value = json.loads(_encode_text(value).encode("utf-8", "replace"))
    return value


_dump: Callable[[Any], bytes]
_load: Callable[[bytes], Any]
try:
    import orjson  # optional and several times faster; what it refuses is tried again by the standard library
except ImportError:
    _dump, _load = _dump_plainly, _load_plainly
else:
    _dump, _load = orjson.dumps, orjson.loads

_NAMES = {language.value: language.name for language in LanguageCode}
_LANGUAGES = {language.name: language for language in LanguageCode}
_LIMIT = 1 << 31
_JSON = SerializeType.JSON  # a module global: attribute access on an enum is slow


def encode_json_header(command: RemotingCommand) -> bytes:
    """Return the header of *command*.

    Raises:
        MessageError: A text in it is not valid Unicode.
    """
    fields: dict[str, Any] = {
        "code": command.code,
        "extFields": command.ext_fields,
        "flag": command.flag,
        "language": _NAMES[command.language],
        "opaque": command.opaque,
    }
    if command.remark is not None:
        fields["remark"] = command.remark
    fields["serializeTypeCurrentRPC"] = "JSON"
    fields["version"] = command.version
    try:
        return _dump(fields)
    except (TypeError, ValueError) as exc:
        raise MessageError(f"the header of {command} cannot be encoded: {exc}; use text that UTF-8 can encode") from exc


def json_header_template(command: RemotingCommand, values: Sequence[int | str]) -> bytes:
    """Return the header of *command* as a format for ``%``, with ``%d`` or ``%b`` in the places of *values*.

    To fill it in takes a tenth of the time of encoding.

    Args:
        values: Each occurs once in the header. They are filled in by the order of the header, and texts only with such
            as need no escapes in JSON.
    """
    template = encode_json_header(command).replace(b"%", b"%%")
    for value in values:
        template = template.replace(str(value).encode(), b"%d" if isinstance(value, int) else b"%b")
    return template


def decode_json_header(data: bytes) -> RemotingCommand:
    """Return the command that has *data* as its header, without a body.

    Raises:
        RemoteProtocolError: *data* is not JSON, or a field has a wrong type.
    """
    try:
        fields = _load(data)
    except (ValueError, RecursionError):
        fields = _load_carefully(data)
    if type(fields) is not dict:
        raise RemoteProtocolError(f"the header must be a JSON object, got {shorten(fields)}")
    get = fields.get
    ext_fields = get("extFields")
    if ext_fields is None:
        ext_fields = {}
    elif type(ext_fields) is not dict:
        raise RemoteProtocolError(f"extFields must be an object, got {shorten(ext_fields)}")
    else:
        try:
            "".join(ext_fields.values())  # the fastest check that all values are strings
        except TypeError:
            ext_fields = {name: _text_of(value) for name, value in ext_fields.items() if value is not None}
    remark = get("remark")
    if remark is not None and type(remark) is not str:
        remark = _text_of(remark)
    code, opaque, flag, version = get("code"), get("opaque"), get("flag"), get("version")
    # The usual case in one expression, since each request passes here: four integers of 32 bits.
    if not (
        type(code) is type(opaque) is type(flag) is type(version) is int
        and -_LIMIT <= code < _LIMIT
        and -_LIMIT <= opaque < _LIMIT
        and -_LIMIT <= flag < _LIMIT
        and -_LIMIT <= version < _LIMIT
    ):
        code, opaque = _number("code", code), _number("opaque", opaque)
        flag, version = _number("flag", flag, 0), _number("version", version, 0)
    name = get("language")
    language = _LANGUAGES.get(name, LanguageCode.OTHER) if type(name) is str else LanguageCode.OTHER
    return RemotingCommand(code, opaque, flag, language, version, remark, ext_fields, b"", _JSON)


def _load_carefully(data: bytes) -> Any:
    try:
        return _load_plainly(data)
    except (ValueError, RecursionError) as exc:
        raise RemoteProtocolError(f"the header is not JSON: {exc}; it starts with {data[:40]!r}") from exc


def _number(name: str, value: Any, default: int | None = None) -> int:
    if value is None and default is not None:
        return default
    if type(value) is str and value.removeprefix("-").isdecimal() and len(value) < 12:
        value = int(value)
    if type(value) is int and -_LIMIT <= value < _LIMIT:
        return value
    raise RemoteProtocolError(f"{name} must be a number of 32 bits, got {shorten(value)}")


def _text_of(value: Any) -> str:
    try:
        return value if type(value) is str else _encode_text(value)
    except RecursionError:
        raise RemoteProtocolError(f"a field must be a text, got nested values: {shorten(value)}") from None


def shorten(value: Any) -> str:
    """Return a value of a peer as errors show it."""
    # A value with many or nested items is not written out: that takes long, or exceeds Python's limit of recursion.
    text = reprlib.repr(value) if isinstance(value, dict | list | tuple) else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
