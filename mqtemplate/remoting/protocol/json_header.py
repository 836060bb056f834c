"""A command's header as JSON, which is what RocketMQ speaks unless it is told otherwise.

Written as Java does: keys by the alphabet, no blanks, what is null left out, every value of ``extFields`` a string.
Only ``extFields`` itself always stands there, if empty: brokers look into it without asking whether it is there.

Read as Java does: what we do not know is passed over, null is as good as missing, and a number or a boolean among the
``extFields`` becomes text.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from mqtemplate.errors import MessageError, RemoteProtocolError
from mqtemplate.remoting.protocol.codes import LanguageCode, SerializeType
from mqtemplate.remoting.protocol.command import RemotingCommand

_encode_text = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False).encode


def _dump_plainly(value: Any) -> bytes:
    return _encode_text(value).encode()


def _load_plainly(data: bytes) -> Any:
    """Half of a character, which nothing could write again, becomes a question mark, as Java would write it."""
    text = data.decode()
    value = json.loads(text)
    if "\\ud" in text or "\\uD" in text:
        value = json.loads(_encode_text(value).encode("utf-8", "replace"))
    return value


_dump: Callable[[Any], bytes]
_load: Callable[[bytes], Any]
try:
    import orjson  # several times as fast; what it refuses, the standard library has the last word about
except ImportError:
    _dump, _load = _dump_plainly, _load_plainly
else:
    _dump, _load = orjson.dumps, orjson.loads

_NAMES = {language.value: language.name for language in LanguageCode}
_LANGUAGES = {language.name: language for language in LanguageCode}
_LIMIT = 1 << 31
_JSON = SerializeType.JSON  # looked up once: an enum is slow to ask


def encode_json_header(command: RemotingCommand) -> bytes:
    """The header of *command*.

    Raises:
        MessageError: A text in it cannot be written as UTF-8.
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
        raise MessageError(f"the header of {command} cannot be written: {exc}; give texts that UTF-8 can say") from exc


def decode_json_header(data: bytes) -> RemotingCommand:
    """The command whose header *data* is, without a body.

    Raises:
        RemoteProtocolError: It is none.
    """
    try:
        fields = _load(data)
    except (ValueError, RecursionError):
        fields = _load_carefully(data)
    if type(fields) is not dict:
        raise RemoteProtocolError(f"the header must be a JSON object, got {_shorten(fields)}")
    get = fields.get
    ext_fields = get("extFields")
    if ext_fields is None:
        ext_fields = {}
    elif type(ext_fields) is not dict:
        raise RemoteProtocolError(f"extFields must be an object, got {_shorten(ext_fields)}")
    else:
        try:
            "".join(ext_fields.values())  # the quickest way to see that all are strings
        except TypeError:
            ext_fields = _as_texts(ext_fields)
    remark = get("remark")
    if remark is not None and type(remark) is not str:
        remark = _text_of(remark)
    code, opaque, flag, version = get("code"), get("opaque"), get("flag"), get("version")
    if not (
        type(code) is type(opaque) is type(flag) is type(version) is int
        and -_LIMIT <= code < _LIMIT
        and -_LIMIT <= opaque < _LIMIT
        and -_LIMIT <= flag < _LIMIT
        and -_LIMIT <= version < _LIMIT
    ):
        code, opaque = _number("code", code), _number("opaque", opaque)
        flag, version = _number("flag", flag, 0), _number("version", version, 0)
    language = get("language")
    return RemotingCommand(
        code,
        opaque,
        flag,
        _LANGUAGES.get(language, LanguageCode.OTHER) if type(language) is str else LanguageCode.OTHER,
        version,
        remark,
        ext_fields,
        b"",
        _JSON,
    )


def _load_carefully(data: bytes) -> Any:
    try:
        return _load_plainly(data)
    except (ValueError, RecursionError) as exc:
        raise RemoteProtocolError(f"the header is no JSON: {exc}; it begins with {data[:40]!r}") from exc


def _number(name: str, value: Any, default: int | None = None) -> int:
    if value is None and default is not None:
        return default
    if type(value) is str and value.lstrip("-").isdecimal() and len(value) < 12:
        value = int(value)
    if type(value) is int and -_LIMIT <= value < _LIMIT:
        return value
    raise RemoteProtocolError(f"{name} must be a number of 32 bits, got {_shorten(value)}")


def _as_texts(ext_fields: dict[str, Any]) -> dict[str, str]:
    return {name: _text_of(value) for name, value in ext_fields.items() if value is not None}


def _text_of(value: Any) -> str:
    return value if type(value) is str else _encode_text(value)


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
