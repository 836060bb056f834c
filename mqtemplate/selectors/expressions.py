"""Expressions of an SQL92 selector: each function combines operands into a larger expression.

The functions raise `OperandError` for everything that RocketMQ refuses. Otherwise they return an
`Expression`, whose ``evaluate`` is a closure chosen by the types of the operands. Values are as Java has them:
strings are parsed as numbers by its rules, and numbers are compared by them.

Source: RocketMQ ``filter: expression/``: the checks of its ``create…`` methods and the results of its ``evaluate``
methods.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, TypeAlias

from mqtemplate.errors import Picklable

# --- values ---------------------------------------------------------------------------------------


Value: TypeAlias = str | int | float | bool | None
Evaluate: TypeAlias = Callable[[Mapping[str, str]], Value]
"""Function of the properties of a message; None is NULL."""

_INT_LIMIT = 1 << 31
_LONG_LIMIT = 1 << 63
_TRIMMED = "".join(map(chr, range(33)))  # the characters that Java's String.trim removes

# Java accepts the digits of all scripts, but only those in the basic plane (16 bits).
_WHOLE = re.compile(r"[+-]?(?:(?![\U00010000-\U0010ffff])\d)+")
_DECIMAL = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)[fFdD]?")
_HEXADECIMAL = re.compile(r"([+-]?0[xX](?:[0-9a-fA-F]+\.?[0-9a-fA-F]*|\.[0-9a-fA-F]+)[pP][+-]?[0-9]+)[fFdD]?")
_NAMED = re.compile(r"([+-]?)(NaN|Infinity)")


class ValueType(Enum):
    """Java type of a value. It is known before the evaluation, since all properties are strings."""

    STRING = "a string"
    INTEGER = "an integer"
    LONG = "a long integer"
    DOUBLE = "a decimal number"
    BOOLEAN = "a boolean"
    NULL = "NULL"


class NotComparableError(Exception):
    """Two values cannot be compared. It ends the evaluation of the whole expression, as in RocketMQ."""


def parse_whole(limit: int, text: str) -> int:
    """Parse as Java's ``Integer.valueOf`` and ``Long.valueOf``: a sign and digits, no spaces, below a limit."""
    if not (text.isascii() and text.isdecimal()) and not _WHOLE.fullmatch(text):
        raise NotComparableError(text)
    try:
        value = int(text)
    except ValueError as exc:  # more digits than Python converts
        raise NotComparableError(text) from exc
    if -limit <= value < limit:
        return value
    raise NotComparableError(text)


def parse_double(text: str) -> float:
    """Parse as Java's ``Double.valueOf``: decimal, hexadecimal, ``NaN``, ``Infinity``; a type suffix; spaces around."""
    text = text.strip(_TRIMMED)
    if found := _DECIMAL.fullmatch(text):
        return float(found[1])
    if found := _HEXADECIMAL.fullmatch(text):
        try:
            return float.fromhex(found[1])
        except OverflowError:
            return -math.inf if text.startswith("-") else math.inf
    if found := _NAMED.fullmatch(text):
        return float(found[1] + found[2])
    raise NotComparableError(text)


def compare_doubles(left: float, right: float) -> int:
    """Return -1, 0 or 1 as Java's ``Double.compareTo``: -0.0 < 0.0, and NaN equals itself and is above all others."""
    if left < right:
        return -1
    if left > right:
        return 1
    if left == right:
        return int(math.copysign(1, left) - math.copysign(1, right)) // 2 if left == 0 else 0
    return math.isnan(left) - math.isnan(right)


# --- expressions ----------------------------------------------------------------------------------


MAX_DEPTH = 100
"""Deepest nesting of conditions. Each level is a nested call, and Python's default limit is a thousand."""

_Predicate: TypeAlias = Callable[[Any, Any], bool]

_ORDERS: dict[str, _Predicate] = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_TESTS: dict[str, _Predicate] = {"CONTAINS": operator.contains, "STARTSWITH": str.startswith, "ENDSWITH": str.endswith}
_PARSERS: dict[ValueType, Callable[[str], int | float]] = {
    ValueType.INTEGER: partial(parse_whole, _INT_LIMIT),
    ValueType.LONG: partial(parse_whole, _LONG_LIMIT),
    ValueType.DOUBLE: parse_double,
}


class Role(Enum):
    """Kind of an expression. It decides where the expression is allowed."""

    PROPERTY = "a property"
    CONSTANT = "a constant"
    NEGATIVE = "a negative"  # also the negative of a constant, which RocketMQ does not treat as a constant
    CONDITION = "a condition"


@dataclass(frozen=True, slots=True)
class Expression:
    """An expression or a part of one.

    Attributes:
        at: Index of its first character in the text.
        given: Name of a property; value of a constant or of the negative of a constant.
        depth: Number of nested calls in `evaluate`.
    """

    role: Role
    type: ValueType
    at: int
    evaluate: Evaluate
    given: Value = None
    depth: int = 0

    @property
    def is_condition(self) -> bool:
        """True for conditions and for TRUE, FALSE and NULL."""
        is_truth_value = self.role is Role.CONSTANT and self.type in (ValueType.BOOLEAN, ValueType.NULL)
        return is_truth_value or self.role is Role.CONDITION

    @property
    def is_number(self) -> bool:
        """True for numbers and their negatives."""
        return self.type in _PARSERS


class OperandError(Picklable):
    """An operand is not allowed where it is used. `compile_expression` turns it into a `SelectorError`."""

    def __init__(self, at: int, reason: str) -> None:
        super().__init__(reason)
        self.at, self.reason = at, reason


def property_named(name: str, at: int) -> Expression:
    """Return the expression of a property."""
    return Expression(Role.PROPERTY, ValueType.STRING, at, lambda properties: properties.get(name), name)


def constant(value: Value, type_: ValueType, at: int) -> Expression:
    """Return the expression of a constant."""
    return Expression(Role.CONSTANT, type_, at, lambda _: value, value)


def negative(operand: Expression, at: int) -> Expression:
    """Return ``-operand``. It is NULL unless *operand* is a number; a property is not, since its value is a string."""
    if operand.is_number:
        assert isinstance(operand.given, int | float)
        value = -operand.given
        return Expression(Role.NEGATIVE, operand.type, at, lambda _: value, value)
    inner = operand.evaluate

    def evaluate(properties: Mapping[str, str]) -> Value:
        inner(properties)  # raises if it cannot be evaluated; then the whole expression cannot
        return None

    return Expression(Role.NEGATIVE, ValueType.NULL, at, evaluate, depth=_depth_of(at, operand))


# --- conditions of conditions -----------------------------------------------------------------------


def as_condition(operand: Expression) -> Expression:
    """Return *operand* as an operand of AND, OR and NOT. A property alone is false, even if its value is ``true``."""
    if operand.is_condition:
        return operand
    if operand.role is not Role.PROPERTY:
        raise OperandError(operand.at, f"{operand.type.value} alone is not a condition; compare it, as in price = 10")
    get = operand.evaluate
    return _condition(operand.at, lambda properties: None if get(properties) is None else False, operand)


def negated(operand: Expression, at: int) -> Expression:
    """Return ``NOT operand``."""
    condition = as_condition(operand)
    inner = condition.evaluate

    def evaluate(properties: Mapping[str, str]) -> Value:
        result = inner(properties)
        return None if result is None else not result

    return _condition(at, evaluate, condition)


def all_of(*operands: Expression) -> Expression:
    """Return the operands joined by AND."""
    return _join(operands, decisive=False)


def any_of(*operands: Expression) -> Expression:
    """Return the operands joined by OR."""
    return _join(operands, decisive=True)


def _join(operands: Sequence[Expression], *, decisive: bool) -> Expression:
    """Return a condition: *decisive* if one operand is, otherwise NULL if one is NULL. One level deep for all."""
    conditions = [as_condition(operand) for operand in operands]
    steps = tuple(condition.evaluate for condition in conditions)

    def evaluate(properties: Mapping[str, str]) -> Value:
        result: Value = not decisive
        for step in steps:
            value = step(properties)
            if value is decisive:
                return decisive
            if value is None:
                result = None
        return result

    return _condition(operands[0].at, evaluate, *conditions)


# --- conditions of values ---------------------------------------------------------------------------


def compared(left: Expression, sign: str, right: Expression) -> Expression:
    """Return ``left < right``, or the same with ``<=``, ``>`` or ``>=``."""
    for operand in (left, right):
        if operand.role is Role.CONDITION:
            reason = f"a condition cannot be compared by {sign}; NOT applies to the next operand only: NOT (price > 10)"
            raise OperandError(operand.at, reason)
        if operand.role is Role.CONSTANT and not operand.is_number:
            raise OperandError(
                operand.at,
                f"{operand.type.value} cannot be compared by {sign}, only numbers and properties can; "
                "write price > 10 for numbers, region = 'north' for strings",
            )
    return _condition(left.at, _by_order(_ORDERS[sign], left, right), left, right)


def _by_order(order: _Predicate, left: Expression, right: Expression) -> Evaluate:
    get_left, get_right = left.evaluate, right.evaluate
    if left.role is Role.PROPERTY and right.type in (ValueType.INTEGER, ValueType.LONG):
        # The most frequent case, without the calls that get the two values.
        parse, name, bound = _PARSERS[right.type], left.given, right.given

        def evaluate_with_number(properties: Mapping[str, str]) -> Value:
            text = properties.get(name)  # type: ignore[arg-type]  # the name of a property is a string
            return None if text is None else order(parse(text), bound)

        return evaluate_with_number

    difference = _difference(left.type, right.type)

    def evaluate(properties: Mapping[str, str]) -> Value:
        left_value = get_left(properties)
        if left_value is None:
            return None
        right_value = get_right(properties)
        return None if right_value is None else order(difference(left_value, right_value), 0)

    return evaluate


def _difference(left: ValueType, right: ValueType) -> Callable[[Any, Any], int]:
    """Return a function of two values that are not NULL: negative, zero or positive, as Java's ``compareTo``.

    Two strings are compared as doubles, a string and a number as that type of number, two numbers as the wider type.
    """
    has_double = ValueType.DOUBLE in (left, right) or left is right is ValueType.STRING
    convert_left, convert_right = _converter(left, right, has_double), _converter(right, left, has_double)
    if has_double:
        return lambda value, other: compare_doubles(convert_left(value), convert_right(other))
    return lambda value, other: convert_left(value) - convert_right(other)


def _converter(type_: ValueType, other: ValueType, has_double: bool) -> Callable[[Any], Any]:
    if type_ is ValueType.STRING:
        return _PARSERS.get(other, parse_double)
    return float if has_double else int


def equal(left: Expression, right: Expression) -> Expression:
    """Return ``left = right``."""
    for operand in (left, right):
        if operand.role is Role.CONSTANT and operand.type is ValueType.NULL:
            raise OperandError(
                operand.at, "NULL is not compared by = or <>; write region IS NULL, or region IS NOT NULL"
            )
    are_constants = left.role is right.role is Role.CONSTANT
    if are_constants and left.type is ValueType.BOOLEAN and right.type is not ValueType.BOOLEAN:
        raise OperandError(right.at, f"TRUE and FALSE are never equal to {right.type.value}; write urgent = TRUE")
    return _condition(left.at, _by_equality(left, right), left, right)


def unequal(left: Expression, right: Expression) -> Expression:
    """Return ``left <> right``."""
    return negated(equal(left, right), left.at)


def _by_equality(left: Expression, right: Expression) -> Evaluate:
    get_left, get_right, same = left.evaluate, right.evaluate, _sameness(left.type, right.type)
    if left.role is Role.PROPERTY and right.given is not None and right.role is not Role.PROPERTY:
        name, expected = left.given, right.given

        def evaluate_with_constant(properties: Mapping[str, str]) -> Value:
            text = properties.get(name)  # type: ignore[arg-type]  # the name of a property is a string
            return None if text is None else same(text, expected)

        return evaluate_with_constant

    def evaluate(properties: Mapping[str, str]) -> Value:
        left_value, right_value = get_left(properties), get_right(properties)
        if left_value is None:
            return True if right_value is None else None
        return False if right_value is None else same(left_value, right_value)

    return evaluate


def _sameness(left: ValueType, right: ValueType) -> _Predicate:
    """Return a function of two values that are not NULL. A string equals TRUE only on the left side of a boolean."""
    if left is right and left not in _PARSERS:
        return operator.eq
    if left is ValueType.STRING and right is ValueType.BOOLEAN:
        return lambda text, boolean: (text.lower() == "true") is boolean
    if left is ValueType.BOOLEAN and right is ValueType.STRING:
        return _raise_not_comparable
    if ValueType.BOOLEAN in (left, right):
        return lambda _, __: False
    difference = _difference(left, right)
    return lambda value, other: difference(value, other) == 0


def _raise_not_comparable(left: object, right: object) -> bool:
    raise NotComparableError(f"{left} and {right}")


def is_null(operand: Expression) -> Expression:
    """Return ``operand IS NULL``."""
    inner = operand.evaluate
    return _condition(operand.at, lambda properties: inner(properties) is None, operand)


def between(operand: Expression, low: Expression, high: Expression) -> Expression:
    """Return ``operand BETWEEN low AND high``."""
    are_numbers = low.role is high.role is Role.CONSTANT and low.is_number and high.is_number
    if are_numbers and _difference(low.type, high.type)(low.given, high.given) > 0:
        raise OperandError(low.at, f"{low.given} is above {high.given}; BETWEEN takes the lower bound first")
    return all_of(compared(operand, ">=", low), compared(operand, "<=", high))


def not_between(operand: Expression, low: Expression, high: Expression) -> Expression:
    """Return ``operand NOT BETWEEN low AND high``. RocketMQ does not compare the bounds here."""
    return any_of(compared(operand, "<", low), compared(operand, ">", high))


def is_in(operand: Expression, texts: Sequence[str], *, expected: bool) -> Expression:
    """Return ``operand IN (texts)``, or ``NOT IN`` if not *expected*."""
    if operand.role is not Role.PROPERTY:
        raise OperandError(operand.at, "only a property can be IN a list; write region IN ('north', 'west')")
    get, members = operand.evaluate, frozenset(texts)

    def evaluate(properties: Mapping[str, str]) -> Value:
        text = get(properties)
        return None if text is None else (text in members) is expected

    return _condition(operand.at, evaluate, operand)


def tested(operand: Expression, name: str, text: str, *, expected: bool) -> Expression:
    """Return ``operand CONTAINS text``, STARTSWITH or ENDSWITH, or its negation if not *expected*. It is never NULL."""
    if not text:
        return _condition(operand.at, lambda _: False, operand)
    inner, test = operand.evaluate, _TESTS[name]

    def evaluate(properties: Mapping[str, str]) -> Value:
        value = inner(properties)
        return isinstance(value, str) and test(value, text) is expected

    return _condition(operand.at, evaluate, operand)


def _condition(at: int, evaluate: Evaluate, *operands: Expression) -> Expression:
    return Expression(Role.CONDITION, ValueType.BOOLEAN, at, evaluate, depth=_depth_of(at, *operands))


def _depth_of(at: int, *operands: Expression) -> int:
    depth = 1 + max(operand.depth for operand in operands)
    if depth > MAX_DEPTH:
        raise OperandError(
            at, f"the expression that starts here has more than {MAX_DEPTH} levels; a row of ANDs or ORs is one level"
        )
    return depth
