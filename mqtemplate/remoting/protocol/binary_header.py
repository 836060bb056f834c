"""A command's header in RocketMQ's binary encoding. All numbers are big-endian.

===  =====  ==============  ==========================================================
 0   i2     code            a larger code needs a JSON header
 2   i1     language
 3   i2     version
 5   i4     opaque
 9   i4     flag
13   i4, n  remark          length 0: no remark
     i4     ext_length      size of all that follows; 0: no fields
     i2, n  name            name and value repeat
     i4, n  value           length 0: no value, as if the name were missing
===  =====  ==============  ==========================================================

Source: RocketMQ ``remoting: RocketMQSerializable``.
"""

from __future__ import annotations

import struct

from mqtemplate.errors import MessageError, RemoteProtocolError
from mqtemplate.remoting.protocol.codes import LanguageCode, SerializeType
from mqtemplate.remoting.protocol.command import RemotingCommand

LARGEST_BINARY_CODE = 32_767

_FIXED = struct.Struct(">hbhiii")
_I2 = struct.Struct(">h")
_I4 = struct.Struct(">i")
assert _FIXED.size == 17
_SMALLEST = _FIXED.size + _I4.size

_LANGUAGES = {language.value: language for language in LanguageCode}


def encode_binary_header(command: RemotingCommand) -> bytes:
    """Return the header of *command*, without fields whose value is empty: a reader takes them as missing.

    Raises:
        MessageError: A number is too large for its field, or a text is not valid Unicode.
    """
    try:
        remark = (command.remark or "").encode()
        entries: list[bytes] = []
        for name, value in command.ext_fields.items():
            if name and value:
                key, text = name.encode(), value.encode()
                entries += (_I2.pack(len(key)), key, _I4.pack(len(text)), text)
        fields = b"".join(entries)
        fixed = _FIXED.pack(command.code, command.language, command.version, command.opaque, command.flag, len(remark))
    except (struct.error, UnicodeEncodeError) as exc:
        raise MessageError(f"the header of {command} has no binary form: {exc}; send it with a JSON header") from exc
    return b"".join((fixed, remark, _I4.pack(len(fields)), fields))


def decode_binary_header(data: bytes) -> RemotingCommand:
    """Return the command that has *data* as its header, without a body.

    Raises:
        RemoteProtocolError: The lengths are wrong, or a text is not UTF-8.
    """
    if len(data) < _SMALLEST:
        raise RemoteProtocolError(f"a binary header has at least {_SMALLEST} bytes, this one has {len(data)}")
    code, language, version, opaque, flag, remark_length = _FIXED.unpack_from(data)
    try:
        remark, at = _read_text(data, _FIXED.size, remark_length)
        (length,) = _I4.unpack_from(data, at)
        at += 4
        if at + length != len(data):
            raise RemoteProtocolError(f"ext fields of {length} bytes announced, {len(data) - at} bytes follow")
        ext_fields = _read_fields(data, at)
    except (struct.error, UnicodeDecodeError) as exc:
        raise RemoteProtocolError(f"the binary header cannot be read: {exc}") from exc
    sender = _LANGUAGES.get(language, LanguageCode.OTHER)
    return RemotingCommand(code, opaque, flag, sender, version, remark or None, ext_fields, b"", SerializeType.ROCKETMQ)


def _read_fields(data: bytes, at: int) -> dict[str, str]:
    fields = {}
    while at < len(data):
        (length,) = _I2.unpack_from(data, at)
        name, at = _read_text(data, at + 2, length)
        (length,) = _I4.unpack_from(data, at)
        value, at = _read_text(data, at + 4, length)
        if name and value:
            fields[name] = value
    return fields


def _read_text(data: bytes, at: int, length: int) -> tuple[str, int]:
    end = at + length
    if length < 0 or end > len(data):
        raise RemoteProtocolError(f"a text of {length} bytes announced, {len(data) - at} bytes follow")
    return data[at:end].decode(), end
