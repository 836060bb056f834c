"""One way to declare a command's header: a frozen class whose fields know their names and types on the wire.

::

    @header
    class GetMaxOffsetRequestHeader(TopicQueueRequestHeader):
        topic: str  # required: must be there, is always written
        queue_id: int  # on the wire `queueId`; int is 32 bits, Long 64
        committed: bool = True  # written always; where it is missing, this is meant
        broker_name: str | None = wire("bname", default=None)  # left out while it is None

What stands in a header that nobody declared is passed over. Each class gets its functions written once, when it is
made, as `dataclasses` does it: a header is made from text, and text from a header, without looking at types again.

Source: RocketMQ ``remoting: RemotingCommand.makeCustomHeaderToNet``, ``decodeCommandCustomHeaderDirectly``.
"""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Annotated, Any, ClassVar, NamedTuple, Self, TypeVar, Union, dataclass_transform, get_args, get_origin
from typing import get_type_hints as hints_of

from mqtemplate.errors import RemoteProtocolError

Long = Annotated[int, 64]
"""A number of 64 bits, in a header's declaration; a plain ``int`` has 32."""

HeaderT = TypeVar("HeaderT", bound="CommandHeader")
_ClassT = TypeVar("_ClassT", bound="type[CommandHeader]")


class BoundaryType(StrEnum):
    """Which of several messages of one time a search by time means."""

    LOWER = "LOWER"
    UPPER = "UPPER"

    @classmethod
    def from_text(cls, text: str) -> BoundaryType:
        """Upper or lower case; what is neither is LOWER, as upstream reads it."""
        return cls.UPPER if text.upper() == "UPPER" else cls.LOWER


class CommandHeader:
    """The base of all headers; see `header`."""

    __slots__ = ()

    wire_names: ClassVar[Mapping[str, str]] = {}
    """Attribute -> name on the wire, where a class wants others than its fields say."""

    def to_ext_fields(self) -> dict[str, str]:
        """The header as text by name: numbers in decimal, booleans ``true`` and ``false``; None is left out."""
        raise TypeError(f"{type(self).__name__} is not declared with @header")

    @classmethod
    def from_ext_fields(cls, ext_fields: Mapping[str, str]) -> Self:
        """Read a header; names that it does not declare are passed over.

        Raises:
            RemoteProtocolError: A required field is missing, or a field is no number of its size.
        """
        raise TypeError(f"{cls.__name__} is not declared with @header")


def wire(name: str, *, default: Any = dataclasses.MISSING, exact: bool = False) -> Any:
    """A field whose name on the wire is not its own in camel case.

    Args:
        exact: Only ``true`` is true, and not ``TRUE``.
    """
    return dataclasses.field(default=default, metadata={"name": name, "exact": exact})


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(wire,))
def header(cls: _ClassT) -> _ClassT:
    """Make a class a frozen, slotted dataclass with keyword arguments, and write its functions."""
    made: Any = dataclasses.dataclass(frozen=True, slots=True, kw_only=True, init=False)(cls)
    plan = _plan_of(made)
    setters = {f"set_{entry.attribute}": getattr(made, entry.attribute).__set__ for entry in plan}
    defaults = {f"default_{entry.attribute}": entry.default for entry in plan if not entry.required}
    scope = {"new": object.__new__, "problem": _problem_of(plan), "BoundaryType": BoundaryType, **setters, **defaults}
    made.__init__ = _compile(made, "__init__", _initializer(plan), scope)
    made.to_ext_fields = _compile(made, "to_ext_fields", _writer(plan), scope)
    made.from_ext_fields = classmethod(_compile(made, "from_ext_fields", _reader(plan), scope))
    return made  # type: ignore[no-any-return]  # dataclass() gives the class back, or one made anew for its slots


# --- from a declaration to a plan -------------------------------------------------------------------


class _Kind(NamedTuple):
    """How one type is written and read: expressions in which ``{}`` is the value, and the text."""

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


class _Entry(NamedTuple):
    """One field: where it is kept, what it is called on the wire, how it is read and written."""

    attribute: str
    name: str
    kind: _Kind
    default: Any

    @property
    def required(self) -> bool:
        return self.default is dataclasses.MISSING


def camel_case(attribute: str) -> str:
    """``queue_id`` -> ``queueId``."""
    return re.sub(r"_([a-z0-9])", lambda found: found[1].upper(), attribute)


def _plan_of(cls: type[CommandHeader]) -> list[_Entry]:
    hints = hints_of(cls, include_extras=True)
    plan = []
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]  # mypy cannot know that it is a dataclass by now
        name = cls.wire_names.get(field.name) or field.metadata.get("name") or camel_case(field.name)
        kind = _KINDS[_without_none(hints[field.name])]
        plan.append(_Entry(field.name, name, _EXACT_BOOL if field.metadata.get("exact") else kind, field.default))
    return plan


def _without_none(hint: Any) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (part for part in get_args(hint) if part is not type(None))
    return hint


# --- from a plan to functions -----------------------------------------------------------------------


def _compile(cls: type, name: str, lines: list[str], scope: dict[str, Any]) -> Callable[..., Any]:
    """The function that *lines* define, over the names in *scope*."""
    exec(compile("\n".join(lines), f"<{cls.__name__}.{name}>", "exec"), scope)
    function: Callable[..., Any] = scope[name]
    function.__qualname__, function.__doc__ = f"{cls.__name__}.{name}", getattr(CommandHeader, name).__doc__
    return function


def _initializer(plan: list[_Entry]) -> list[str]:
    """As `dataclasses` would write it for a frozen class, but a third faster: the slots are set directly."""
    parameters = [
        entry.attribute if entry.required else f"{entry.attribute}=default_{entry.attribute}" for entry in plan
    ]
    star = "*, " if plan else ""
    return [f"def __init__(self, {star}{', '.join(parameters)}):", *_settings(plan), "    pass"]


def _settings(plan: list[_Entry]) -> list[str]:
    return [f"    set_{entry.attribute}(self, {entry.attribute})" for entry in plan]


def _writer(plan: list[_Entry]) -> list[str]:
    always = [entry for entry in plan if entry.default is not None]
    pairs = [f"{entry.name!r}: {entry.kind.write.format('self.' + entry.attribute)}" for entry in always]
    lines = ["def to_ext_fields(self):", f"    fields = {{{', '.join(pairs)}}}"]
    for entry in plan:
        if entry.default is None:
            lines += [
                f"    value = self.{entry.attribute}",
                f"    if value is not None: fields[{entry.name!r}] = {entry.kind.write.format('value')}",
            ]
    return [*lines, "    return fields"]


def _reader(plan: list[_Entry]) -> list[str]:
    reads = [f"        {entry.attribute} = {_read_expression(entry)}" for entry in plan] or ["        pass"]
    ranges = [_range_test(entry) for entry in plan if entry.kind.bits]
    return [
        "def from_ext_fields(cls, fields):",
        "    get = fields.get",
        "    try:",
        *reads,
        "    except (KeyError, ValueError):",
        "        raise problem(cls, fields) from None",
        *([f"    if not ({' and '.join(ranges)}): raise problem(cls, fields)"] if ranges else []),
        "    self = new(cls)",
        *_settings(plan),
        "    return self",
    ]


def _read_expression(entry: _Entry) -> str:
    if entry.required:
        return entry.kind.read.format(f"fields[{entry.name!r}]")
    if entry.kind is _TEXT:
        return f"get({entry.name!r}, default_{entry.attribute})"
    read = entry.kind.read.format("text")
    return f"default_{entry.attribute} if (text := get({entry.name!r})) is None else {read}"


def _range_test(entry: _Entry) -> str:
    limit = 1 << entry.kind.bits - 1
    test = f"-{limit} <= {entry.attribute} < {limit}"
    return test if entry.default is not None else f"({entry.attribute} is None or {test})"


def _problem_of(plan: list[_Entry]) -> Callable[[type, Mapping[str, str]], RemoteProtocolError]:
    """What is wrong with fields that could not be read, told slowly and with care."""

    def problem(cls: type, fields: Mapping[str, str]) -> RemoteProtocolError:
        missing = [entry.name for entry in plan if entry.required and entry.name not in fields]
        if missing:
            there = ", ".join(sorted(fields)) or "none at all"
            return RemoteProtocolError(f"{cls.__name__} needs {', '.join(missing)}; the fields that came are: {there}")
        wrong = [
            f"{entry.name}={fields[entry.name]!r} is not {entry.kind.name}"
            for entry in plan
            if entry.kind.bits and entry.name in fields and not _fits(fields[entry.name], entry.kind.bits)
        ]
        return RemoteProtocolError(f"{cls.__name__} cannot be read: {'; '.join(wrong)}")

    return problem


def _fits(text: str, bits: int) -> bool:
    try:
        return -(1 << bits - 1) <= int(text) < 1 << bits - 1
    except ValueError:
        return False
