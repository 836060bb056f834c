"""Declaration of command headers: a frozen class whose fields state their names and types on the wire.

::

    class GetMaxOffsetRequestHeader(TopicQueueRequestHeader):
        topic: str  # required, and always written
        queue_id: int  # `queueId` on the wire; an int has 32 bits, a Long 64
        committed: bool = True  # always written; this default stands for a missing field
        broker_name: str | None = wire("bname", default=None)  # left out while it is None

Fields on the wire that a class does not declare are ignored.

A subclass of `CommandHeader` is a dataclass whose ``__init__``, ``to_ext_fields`` and ``from_ext_fields`` are generated
as source code, at the first use of the class. Each send and each pull codes two headers, and a plain loop over the
fields takes about twice as long: ``bench/header_coding.py``.

Source: RocketMQ ``remoting: RemotingCommand.makeCustomHeaderToNet``, ``decodeCommandCustomHeaderDirectly``.
"""

from __future__ import annotations

import dataclasses
import re
import threading
import types
from collections.abc import Iterator, Mapping
from enum import StrEnum
from functools import partial
from typing import Annotated, Any, ClassVar, NamedTuple, Self, TypeVar, Union, dataclass_transform, get_args, get_origin
from typing import get_type_hints as hints_of

from mqtemplate.errors import RemoteProtocolError

Long = Annotated[int, 64]
"""Type of a 64-bit number in the declaration of a header; a plain ``int`` has 32 bits."""

HeaderT = TypeVar("HeaderT", bound="CommandHeader")


class BoundaryType(StrEnum):
    """Choice of a search by time if several messages have the same time: the first or the last of them."""

    LOWER = "LOWER"
    UPPER = "UPPER"

    @classmethod
    def from_text(cls, text: str) -> BoundaryType:
        """Return the member for a text in any case. As in RocketMQ, any other text is LOWER."""
        return cls.UPPER if text.upper() == "UPPER" else cls.LOWER


def wire(name: str, *, default: Any = dataclasses.MISSING, exact: bool = False) -> Any:
    """Return a field with a name on the wire other than the attribute's name in camel case.

    Args:
        exact: Only ``true`` is True; the default also accepts ``TRUE``.
    """
    return dataclasses.field(default=default, metadata={"name": name, "exact": exact})


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(wire,))
class CommandHeader:
    """Base class of all headers. A subclass declares at least one field."""

    wire_names: ClassVar[Mapping[str, str]] = {}
    """Attribute -> name on the wire, for a class that overrides the names of inherited fields."""

    def __init_subclass__(cls) -> None:
        for name in _GENERATED:
            setattr(cls, name, vars(CommandHeader)[name])  # until its first use; a base class may be complete already

    @classmethod
    def complete_declaration(cls) -> None:
        """Make the class a dataclass, unless it is one."""
        complete(cls)

    def __init__(self, **values: Any) -> None:
        complete(type(self))
        type(self).__init__(self, **values)

    def to_ext_fields(self) -> dict[str, str]:
        """Return the header as text by name: numbers in decimal, booleans ``true`` and ``false``, without None."""
        complete(type(self))
        return self.to_ext_fields()

    @classmethod
    def from_ext_fields(cls, ext_fields: Mapping[str, str]) -> Self:
        """Return the header that *ext_fields* contain; names that the class does not declare are ignored.

        Raises:
            RemoteProtocolError: A required field is missing, or a field is not a number of its size.
        """
        complete(cls)
        return cls.from_ext_fields(ext_fields)


_GENERATED = ("__init__", "to_ext_fields", "from_ext_fields")
_completing = threading.RLock()


def complete(cls: type[CommandHeader]) -> None:
    """Make a declared header a dataclass, and generate its methods, unless that is done.

    It happens at the first use of a class: a program uses a tenth of them, and all take 0.05 s of its start.
    """
    if cls is CommandHeader:
        raise TypeError(f"{cls.__name__} has no fields")
    with _completing:
        if "__dataclass_fields__" in vars(cls):
            return
        for base in cls.__bases__:
            if issubclass(base, CommandHeader) and base is not CommandHeader:
                complete(base)
        dataclasses.dataclass(frozen=True, kw_only=True, init=False)(cls)
        plan = _plan_of(cls)
        scope: dict[str, Any] = {f"default_{entry.attribute}": entry.default for entry in plan if not entry.required}
        scope |= {"new": object.__new__, "error": partial(_decode_error, plan), "BoundaryType": BoundaryType}
        source = "\n".join([*_initializer(plan), *_writer(plan), *_reader(plan)])
        exec(compile(source, f"<{cls.__name__}>", "exec"), scope)
        for name in _GENERATED:
            function = scope[name]
            function.__qualname__, function.__doc__ = f"{cls.__name__}.{name}", getattr(CommandHeader, name).__doc__
            setattr(cls, name, classmethod(function) if name == "from_ext_fields" else function)


# --- from a declaration to a plan -------------------------------------------------------------------


class _Kind(NamedTuple):
    """Source code for one type: an expression that writes the value ``{}``, and one that reads the text ``{}``."""

    name: str
    write: str
    read: str
    bits: int = 0


_TEXT = _Kind("text", "{}", "{}")
_INT = _Kind("a number of 32 bits", "str({})", "int({})", 32)
_LONG = _Kind("a number of 64 bits", "str({})", "int({})", 64)
_BOOL = _Kind("true or false", "'true' if {} else 'false'", "{}.lower() == 'true'")
_EXACT_BOOL = _Kind("true or false", "'true' if {} else 'false'", "{} == 'true'")
_BOUNDARY = _Kind("LOWER or UPPER", "{}.value", "BoundaryType.from_text({})")
_KINDS: dict[Any, _Kind] = {str: _TEXT, int: _INT, Long: _LONG, bool: _BOOL, BoundaryType: _BOUNDARY}


class _HeaderField(NamedTuple):
    """One field: its attribute, its name on the wire, its type, its default."""

    attribute: str
    name: str
    kind: _Kind
    default: Any

    @property
    def required(self) -> bool:
        return self.default is dataclasses.MISSING


def camel_case(attribute: str) -> str:
    """Return ``queueId`` for ``queue_id``."""
    return re.sub(r"_([a-z0-9])", lambda found: found[1].upper(), attribute)


def declared_fields(cls: Any) -> Iterator[tuple[dataclasses.Field[Any], str, Any]]:
    """Yield each field of a header or body class with its name on the wire and its type; ``T`` for ``T | None``."""
    cls.complete_declaration()
    hints = hints_of(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if get_origin(hint) in (Union, types.UnionType):
            (hint,) = (part for part in get_args(hint) if part is not type(None))
        yield field, field.metadata.get("name") or camel_case(field.name), hint


def _plan_of(cls: type[CommandHeader]) -> list[_HeaderField]:
    return [
        _HeaderField(
            field.name,
            cls.wire_names.get(field.name, name),
            _EXACT_BOOL if field.metadata.get("exact") else _KINDS[hint],
            field.default,
        )
        for field, name, hint in declared_fields(cls)
    ]


# --- from a plan to source code ---------------------------------------------------------------------


def _initializer(plan: list[_HeaderField]) -> list[str]:
    parameters = [
        entry.attribute if entry.required else f"{entry.attribute}=default_{entry.attribute}" for entry in plan
    ]
    return [f"def __init__(self, *, {', '.join(parameters)}):", *_assignments(plan)]


def _assignments(plan: list[_HeaderField]) -> list[str]:
    # Straight into the dictionary: the frozen class refuses `self.name = ...`, and `object.__setattr__`, which
    # `dataclasses` would use, takes longer.
    return ["    _values = self.__dict__", *[f"    _values[{entry.attribute!r}] = {entry.attribute}" for entry in plan]]


def _writer(plan: list[_HeaderField]) -> list[str]:
    pairs = [
        f"{entry.name!r}: {entry.kind.write.format(f'_values[{entry.attribute!r}]')}"
        for entry in plan
        if entry.default is not None
    ]
    # One look-up of the dictionary is faster than one of an attribute per field.
    lines = ["def to_ext_fields(self):", "    _values = self.__dict__", f"    fields = {{{', '.join(pairs)}}}"]
    for entry in plan:
        if entry.default is None:
            lines += [
                f"    value = _values[{entry.attribute!r}]",
                f"    if value is not None: fields[{entry.name!r}] = {entry.kind.write.format('value')}",
            ]
    return [*lines, "    return fields"]


def _reader(plan: list[_HeaderField]) -> list[str]:
    ranges = [_range_test(entry) for entry in plan if entry.kind.bits]
    return [
        "def from_ext_fields(cls, fields):",
        "    get = fields.get",
        "    try:",
        *[f"        {entry.attribute} = {_read_expression(entry)}" for entry in plan],
        "    except (KeyError, ValueError):",
        "        raise error(cls, fields) from None",
        *([f"    if not ({' and '.join(ranges)}): raise error(cls, fields)"] if ranges else []),
        "    self = new(cls)",
        *_assignments(plan),
        "    return self",
    ]


def _read_expression(entry: _HeaderField) -> str:
    if entry.required:
        return entry.kind.read.format(f"fields[{entry.name!r}]")
    if entry.kind is _TEXT:
        return f"get({entry.name!r}, default_{entry.attribute})"
    read = entry.kind.read.format("text")
    return f"default_{entry.attribute} if (text := get({entry.name!r})) is None else {read}"


def _range_test(entry: _HeaderField) -> str:
    limit = 1 << entry.kind.bits - 1
    test = f"-{limit} <= {entry.attribute} < {limit}"
    return test if entry.default is not None else f"({entry.attribute} is None or {test})"


def _decode_error(plan: list[_HeaderField], cls: type, fields: Mapping[str, str]) -> RemoteProtocolError:
    """Return the error for fields that could not be read; it names each wrong or missing field."""
    missing = [entry.name for entry in plan if entry.required and entry.name not in fields]
    if missing:
        there = ", ".join(sorted(fields)) or "none at all"
        return RemoteProtocolError(f"{cls.__name__} needs {', '.join(missing)}; the fields received are: {there}")
    wrong = [
        f"{entry.name}={fields[entry.name]!r} is not {entry.kind.name}"
        for entry in plan
        if entry.kind.bits and entry.name in fields and not _fits(fields[entry.name], entry.kind.bits)
    ]
    return RemoteProtocolError(f"{cls.__name__} cannot be read: {'; '.join(wrong)}")


def _fits(text: str, bits: int) -> bool:
    try:
        return -(1 << bits - 1) <= int(text) < 1 << bits - 1
    except ValueError:
        return False
