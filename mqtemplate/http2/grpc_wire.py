"""Statuses, fields and messages of gRPC as they are on the wire. Source: grpc/grpc, doc/PROTOCOL-HTTP2.md."""

from __future__ import annotations

import re
from enum import IntEnum
from urllib.parse import quote

from mqtemplate.http2.streams import Fields


class GrpcStatus(IntEnum):
    """Status of a call. Source: grpc/grpc, doc/statuscodes.md."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


PREFIX_BYTES = 5
"""A message starts with a flag (1: it is compressed), and its length in four bytes."""

HEAD_FIELDS: Fields = ((":status", "200"), ("content-type", "application/grpc"))
OK_FIELDS: Fields = (("grpc-status", "0"),)
_MAX_DETAILS_BYTES = 2_000
"""Each may become three, and clients limit the size of trailers to 8 KiB."""
_PRINTABLE = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")

_TIMEOUT = re.compile(r"([0-9]{1,8})([HMSmun])")
_UNIT_MS = {"H": 3_600_000.0, "M": 60_000.0, "S": 1_000.0, "m": 1.0, "u": 0.001, "n": 0.000_001}


def parse_timeout(text: str) -> float | None:
    """Return the milliseconds of a ``grpc-timeout``; None if it has another form."""
    found = _TIMEOUT.fullmatch(text)
    return None if found is None else int(found[1]) * _UNIT_MS[found[2]]


def status_fields(status: GrpcStatus, details: str) -> Fields:
    """Return the trailers of a status. The details are percent-encoded UTF-8."""
    if status is GrpcStatus.OK and not details:
        return OK_FIELDS
    fields = ("grpc-status", str(int(status)))
    if not details:
        return (fields,)
    text = details.encode("utf-8", "replace")[:_MAX_DETAILS_BYTES].decode("utf-8", "ignore")
    return (fields, ("grpc-message", quote(text, safe=_PRINTABLE)))


def framed(message: bytes) -> bytes:
    """Return a message with its prefix."""
    return b"\0" + len(message).to_bytes(4, "big") + message
