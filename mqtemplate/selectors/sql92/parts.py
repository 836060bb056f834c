"""The parts of an expression, made ready to be evaluated as they are read, from the inside out.

Each function here takes parts and makes a larger one: it refuses what RocketMQ refuses, and otherwise returns a `Part`
whose ``evaluate`` is a closure chosen for the kinds of its operands.

Source: RocketMQ ``filter: expression/``, what its ``create…`` methods check and what its ``evaluate`` methods answer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

from mqtemplate.selectors.sql92.values import (
    Evaluate,
    Kind,
    NotComparableError,
    Value,
    compare_doubles,
    read_double,
    read_integer,
    read_long,
)

MAX_DEPTH = 100
"""Conditions within conditions. Each is a call within a call, and Python allows a thousand of them by default."""

_Holds: TypeAlias = Callable[[Any, Any], bool]

_ORDERS: dict[str, _Holds] = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_TESTS: dict[str, _Holds] = {"CONTAINS": operator.contains, "STARTSWITH": str.startswith, "ENDSWITH": str.endswith}
_READERS: dict[Kind, Callable[[str], int | float]] = {
    Kind.INTEGER: read_integer,
    Kind.LONG: read_long,
    Kind.DOUBLE: read_double,
}


class Role(Enum):
    """What a part is to the rules of what may stand where."""

    PROPERTY = "a property"
    CONSTANT = "a constant"
    NEGATIVE = "a negative"  # of a constant, too: RocketMQ does not look into it
    CONDITION = "a condition"


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of an expression.

    Attributes:
        at: Where it begins in the text, counted from 0.
        given: The name of a property; the value of a constant or of a constant's negative.
        depth: Calls within calls that `evaluate` makes.
    """

    role: Role
    kind: Kind
    at: int
    evaluate: Evaluate
    given: Value = None
    depth: int = 0

    @property
    def is_condition(self) -> bool:
        """Conditions, and TRUE, FALSE and NULL."""
        return self.role is Role.CONDITION or (self.role is Role.CONSTANT and self.kind in (Kind.BOOLEAN, Kind.NOTHING))

    @property
    def is_number(self) -> bool:
        return self.kind in _READERS


class RefusedError(Exception):
    """A part does not fit where it stands. Whoever knows the whole text makes a SelectorError of it."""

    def __init__(self, at: int, reason: str) -> None:
        super().__init__(reason)
        self.at, self.reason = at, reason


def property_named(name: str, at: int) -> Part:
    return Part(Role.PROPERTY, Kind.TEXT, at, lambda properties: properties.get(name), name)


def constant(value: Value, kind: Kind, at: int) -> Part:
    return Part(Role.CONSTANT, kind, at, lambda _: value, value)


def negative(part: Part, at: int) -> Part:
    """``-part``: NULL where it is no number. A property is none: it is a text until something is compared with it."""
    if part.is_number:
        assert isinstance(part.given, int | float)
        value = -part.given
        return Part(Role.NEGATIVE, part.kind, at, lambda _: value, value)
    inner = part.evaluate

    def evaluate(properties: Mapping[str, str]) -> Value:
        inner(properties)  # it may have no answer, and then the whole has none
        return None

    return Part(Role.NEGATIVE, Kind.NOTHING, at, evaluate, depth=_depth_over(at, part))


# --- conditions of conditions -----------------------------------------------------------------------


def as_condition(part: Part) -> Part:
    """What may stand beside AND, OR and NOT, or alone. A property's text is no truth: it is false, ``true`` as well."""
    if part.is_condition:
        return part
    if part.role is not Role.PROPERTY:
        raise RefusedError(part.at, f"{part.kind.value} alone is no condition; compare it, as in price = 10")
    get = part.evaluate
    return _condition(part.at, lambda properties: None if get(properties) is None else False, part)


def negated(part: Part, at: int) -> Part:
    condition = as_condition(part)
    inner = condition.evaluate

    def evaluate(properties: Mapping[str, str]) -> Value:
        holds = inner(properties)
        return None if holds is None else not holds

    return _condition(at, evaluate, condition)


def all_of(parts: Sequence[Part]) -> Part:
    return _joined(parts, decisive=False)


def any_of(parts: Sequence[Part]) -> Part:
    return _joined(parts, decisive=True)


def _joined(parts: Sequence[Part], *, decisive: bool) -> Part:
    """The first *decisive* answer is the whole's; else NULL if there was one. Flat, however many there are."""
    conditions = [as_condition(part) for part in parts]
    steps = tuple(condition.evaluate for condition in conditions)

    def evaluate(properties: Mapping[str, str]) -> Value:
        answer: Value = not decisive
        for step in steps:
            holds = step(properties)
            if holds is decisive:
                return decisive
            if holds is None:
                answer = None
        return answer

    return _condition(parts[0].at, evaluate, *conditions)


# --- conditions of values ---------------------------------------------------------------------------


def compared(sign: str, left: Part, right: Part) -> Part:
    """``<``, ``<=``, ``>`` or ``>=``."""
    for part in (left, right):
        if part.role is Role.CONDITION:
            raise RefusedError(
                part.at, f"a condition cannot be compared by {sign}; NOT takes the next word only: NOT (price > 10)"
            )
        if part.role is Role.CONSTANT and not part.is_number:
            raise RefusedError(
                part.at,
                f"{part.kind.value} cannot be compared by {sign}, only numbers and properties can; "
                "write price > 10 for numbers, region = 'north' for texts",
            )
    return _condition(left.at, _by_order(_ORDERS[sign], left, right), left, right)


def _by_order(order: _Holds, left: Part, right: Part) -> Evaluate:
    """How two parts are ordered; a property beside a number, the usual case, without a call for each side."""
    get, get_other = left.evaluate, right.evaluate
    if left.role is Role.PROPERTY and right.kind in (Kind.INTEGER, Kind.LONG):
        read, name, bound = _READERS[right.kind], left.given, right.given

        def evaluate_beside_number(properties: Mapping[str, str]) -> Value:
            text = properties.get(name)  # type: ignore[arg-type]  # a property's name is a text
            return None if text is None else order(read(text), bound)

        return evaluate_beside_number

    difference = _difference(left.kind, right.kind)

    def evaluate(properties: Mapping[str, str]) -> Value:
        value = get(properties)
        if value is None:
            return None
        other = get_other(properties)
        return None if other is None else order(difference(value, other), 0)

    return evaluate


def _difference(left: Kind, right: Kind) -> Callable[[Any, Any], int]:
    """A function of two values that are not NULL: negative, zero or positive as Java's ``compareTo`` is.

    Two texts are compared as fractions; a text and a number as that kind of number; two numbers as the wider kind.
    """
    wider = Kind.DOUBLE if Kind.DOUBLE in (left, right) or left is right is Kind.TEXT else Kind.LONG
    read: Callable[[Any], Any] = _READERS.get(right, read_double) if left is Kind.TEXT else _widen(wider)
    read_other: Callable[[Any], Any] = _READERS.get(left, read_double) if right is Kind.TEXT else _widen(wider)
    if wider is Kind.DOUBLE:
        return lambda value, other: compare_doubles(read(value), read_other(other))
    return lambda value, other: read(value) - read_other(other)


def _widen(kind: Kind) -> Callable[[Any], int | float]:
    return float if kind is Kind.DOUBLE else int


def equal(left: Part, right: Part) -> Part:
    for part in (left, right):
        if part.role is Role.CONSTANT and part.kind is Kind.NOTHING:
            raise RefusedError(part.at, "NULL is not compared by = or <>; write region IS NULL, or region IS NOT NULL")
    if left.role is right.role is Role.CONSTANT and left.kind is Kind.BOOLEAN and right.kind is not Kind.BOOLEAN:
        raise RefusedError(right.at, f"TRUE and FALSE have no equal in {right.kind.value}; write urgent = TRUE")
    return _condition(left.at, _by_equality(left, right), left, right)


def _by_equality(left: Part, right: Part) -> Evaluate:
    get, get_other, same = left.evaluate, right.evaluate, _sameness(left.kind, right.kind)
    if left.role is Role.PROPERTY and right.given is not None and right.role is not Role.PROPERTY:
        name, wanted = left.given, right.given

        def evaluate_beside_constant(properties: Mapping[str, str]) -> Value:
            text = properties.get(name)  # type: ignore[arg-type]  # a property's name is a text
            return None if text is None else same(text, wanted)

        return evaluate_beside_constant

    def evaluate(properties: Mapping[str, str]) -> Value:
        value, other = get(properties), get_other(properties)
        if value is None:
            return True if other is None else None
        return False if other is None else same(value, other)

    return evaluate


def _sameness(left: Kind, right: Kind) -> _Holds:
    """A function of two values that are not NULL. A text is TRUE if it says so, and FALSE else, to the right only."""
    if left is right and left not in _READERS:
        return operator.eq
    if left is Kind.TEXT and right is Kind.BOOLEAN:
        return lambda text, truth: (text.lower() == "true") is truth
    if left is Kind.BOOLEAN and right is Kind.TEXT:
        return _no_answer
    if Kind.BOOLEAN in (left, right):
        return lambda _, __: False
    difference = _difference(left, right)
    return lambda value, other: difference(value, other) == 0


def _no_answer(left: object, right: object) -> bool:
    raise NotComparableError(f"{left} and {right}")


def is_null(part: Part) -> Part:
    inner = part.evaluate
    return _condition(part.at, lambda properties: inner(properties) is None, part)


def between(part: Part, low: Part, high: Part) -> Part:
    fixed = low.role is high.role is Role.CONSTANT and low.is_number and high.is_number
    if fixed and _difference(low.kind, high.kind)(low.given, high.given) > 0:
        raise RefusedError(low.at, f"{low.given} is above {high.given}; BETWEEN takes the lower bound first")
    return all_of([compared(">=", part, low), compared("<=", part, high)])


def not_between(part: Part, low: Part, high: Part) -> Part:
    return any_of([compared("<", part, low), compared(">", part, high)])


def is_in(part: Part, texts: Sequence[str], *, wanted: bool) -> Part:
    """``IN`` (*wanted*) or ``NOT IN``."""
    if part.role is not Role.PROPERTY:
        raise RefusedError(part.at, "only a property can be IN a list; write region IN ('north', 'west')")
    get, known = part.evaluate, frozenset(texts)

    def evaluate(properties: Mapping[str, str]) -> Value:
        text = get(properties)
        return None if text is None else (text in known) is wanted

    return _condition(part.at, evaluate, part)


def tested(name: str, part: Part, text: str, *, wanted: bool) -> Part:
    """``CONTAINS``, ``STARTSWITH`` or ``ENDSWITH``, or their NOT. Never NULL: what is no text is neither."""
    if not text:
        return _condition(part.at, lambda _: False, part)
    inner, test = part.evaluate, _TESTS[name]

    def evaluate(properties: Mapping[str, str]) -> Value:
        value = inner(properties)
        return isinstance(value, str) and test(value, text) is wanted

    return _condition(part.at, evaluate, part)


def _condition(at: int, evaluate: Evaluate, *inner: Part) -> Part:
    return Part(Role.CONDITION, Kind.BOOLEAN, at, evaluate, depth=_depth_over(at, *inner))


def _depth_over(at: int, *inner: Part) -> int:
    depth = 1 + max(part.depth for part in inner)
    if depth > MAX_DEPTH:
        raise RefusedError(
            at, f"what begins here is more than {MAX_DEPTH} conditions deep; AND and OR in one row count as one"
        )
    return depth
