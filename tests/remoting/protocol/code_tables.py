"""Header and body of each request code, for tests that cover all of them.

The tables are the columns of ``code_tables.txt``. A code that is in no table has no header fields or no JSON body of
its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, TypeVar

from mqtemplate.remoting.protocol.bodies import group as group_bodies
from mqtemplate.remoting.protocol.bodies import own_requests
from mqtemplate.remoting.protocol.bodies import route as route_bodies
from mqtemplate.remoting.protocol.bodies.json_body import JsonBody
from mqtemplate.remoting.protocol.codes import RequestCode
from mqtemplate.remoting.protocol.headers import admin as admin_headers
from mqtemplate.remoting.protocol.headers import group as group_headers
from mqtemplate.remoting.protocol.headers import message as message_headers
from mqtemplate.remoting.protocol.headers import pop as pop_headers
from mqtemplate.remoting.protocol.headers.fields import CommandHeader, camel_case, declared_fields
from tests.remoting.protocol.other_side import ConsumeMessageDirectlyResult

_T = TypeVar("_T")


def _declared_in(base: type[_T], *modules: ModuleType) -> Mapping[str, type[_T]]:
    """Return the subclasses of *base* that *modules* declare, by name."""
    classes = {
        name: kind
        for module in modules
        for name, kind in vars(module).items()
        if isinstance(kind, type) and issubclass(kind, base) and kind.__module__ == module.__name__
    }
    return MappingProxyType(classes)


HEADERS: Mapping[str, type[CommandHeader]] = _declared_in(
    CommandHeader, admin_headers, group_headers, message_headers, pop_headers
)
"""Name -> header, for all headers that RocketMQ has as well."""
BODIES: Mapping[str, type[JsonBody]] = _declared_in(JsonBody, group_bodies, route_bodies)
"""Name -> body, for all JSON bodies that RocketMQ has as well."""
_ROCKETMQ_NAMES = {
    "ClientConnection": "Connection",
    "ConsumeStatistics": "ConsumeStatus",
    "DataVersionBody": "DataVersion",
}


def rocketmq_name(kind: type[JsonBody]) -> str:
    """Return RocketMQ's name of a body's class; here a class name is used once in the whole library."""
    return _ROCKETMQ_NAMES.get(kind.__name__, kind.__name__)


_CLASSES: Mapping[str, type] = {
    **HEADERS,
    **BODIES,
    **_declared_in(CommandHeader, own_requests),
    **_declared_in(JsonBody, own_requests),
    "ConsumeMessageDirectlyResult": ConsumeMessageDirectlyResult,
}
_ROWS = [line.split() for line in Path(__file__).with_suffix(".txt").read_text().splitlines()[1:]]


def _column(number: int) -> Mapping[int, Any]:
    classes = {RequestCode[row[0]]: row[number] for row in _ROWS if row[number] != "-"}
    return MappingProxyType({code: _CLASSES[name] for code, name in classes.items()})


REQUEST_HEADERS: Mapping[int, type[CommandHeader]] = _column(1)
"""Request code -> header of the request."""
RESPONSE_HEADERS: Mapping[int, type[CommandHeader]] = _column(2)
"""Request code -> header of its response, if the response has one."""
REQUEST_BODIES: Mapping[int, type[JsonBody]] = _column(3)
"""Request code -> body of the request."""
RESPONSE_BODIES: Mapping[int, type[JsonBody]] = _column(4)
"""Request code -> body of its response."""


def wire_names(code: int) -> list[str]:
    """Return the names of the header fields of a request code."""
    header = REQUEST_HEADERS.get(code)
    if header is None:
        return []
    fields = [field for field, _, _ in declared_fields(header)]
    return [header.wire_names.get(f.name) or f.metadata.get("name") or camel_case(f.name) for f in fields]
