"""SQL92 selectors, and the creation of a selector from the type and the expression that a user wrote."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mqtemplate.errors import ListenerError, SelectorError
from mqtemplate.selectors.expressions import Evaluate, NotComparableError
from mqtemplate.selectors.tags import Selector, SelectorType, tag_selector
from mqtemplate.user_code import shown


@dataclass(frozen=True, slots=True)
class Sql92Selector:
    """A condition over the properties of a message: ``region = 'north' AND price BETWEEN 10 AND 20``.

    It has the same results as RocketMQ, including the surprising ones:

    - Properties are strings. Compared with a number, a property is parsed as a number of the same type. ``5.5`` is not
      an integer, so ``price > 5`` cannot be evaluated for it. If a property may have decimals, write ``price > 5.0``.
    - If a comparison cannot be evaluated, the message does not match, even inside ``NOT`` or ``OR``. ``AND`` and ``OR``
      are evaluated from left to right and stop as soon as the result is known.
    - A missing property is NULL, and a condition that is NULL does not match. ``a <> b`` is NULL only if the left side
      is NULL; if only b is missing, it is true.
    - ``NOT`` applies to the next operand only: write ``NOT (a = 1)``.
    - ``CONTAINS``, ``STARTSWITH``, ``ENDSWITH`` and their ``NOT`` forms are false if the property is missing or the
      argument is empty.
    - ``IN`` takes strings; ``<``, ``<=``, ``>`` and ``>=`` take numbers, and properties that are parsed as numbers.

    There is one difference. RocketMQ ignores everything after the first complete condition: it reads ``a = 1 b = 2`` as
    ``a = 1``. Here that is an error.

    Args:
        expression: At most 8,192 characters, with conditions nested at most 100 levels deep.

    Raises:
        SelectorError: RocketMQ refuses the expression too, text follows its end, or it is too long or nested too deep.
    """

    expression: str
    _evaluate: Evaluate = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        from mqtemplate.selectors.grammar import compile_expression

        object.__setattr__(self, "_evaluate", compile_expression(self.expression))

    def __reduce__(self) -> tuple[type[Sql92Selector], tuple[str]]:
        """Return what a pickle contains: the expression, which the other process compiles again."""
        return Sql92Selector, (self.expression,)

    @property
    def selects_all(self) -> bool:
        """False: only the evaluation decides."""
        return False

    @property
    def codes(self) -> None:
        """None: hash codes of tags cannot decide an SQL92 expression."""

    def matches(self, properties: Mapping[str, str]) -> bool:
        """Return True if the selector matches a message with these properties.

        Args:
            properties: All properties of the message, including the tag as ``TAGS`` and the keys as ``KEYS``.
        """
        try:
            return self._evaluate(properties) is True
        except NotComparableError:
            return False


# --- creation -------------------------------------------------------------------------------------


_NAME_ALONE = re.compile(r"[\s(]*(?!(?i:true|false|null)\b)([A-Za-z_$][\w$]*)[\s)]*", re.ASCII)


def make_selector(selector_type: SelectorType, expression: str) -> Selector:
    """Create the selector of this type.

    An expression that can match no message is an error here, since a listener with it would be silent. The classes of
    the selectors allow it: clients of RocketMQ may send it.

    Raises:
        ListenerError: The expression is invalid, or matches no message; for SQL92 a `SelectorError`, which names the
            column.
    """
    if not isinstance(expression, str):
        raise ListenerError(
            f"selector expression must be text such as 'a || b', got {type(expression).__name__} {shown(expression)}"
        )
    if selector_type is not SelectorType.SQL92:
        return tag_selector(expression)
    if (surrogate := re.search("[\ud800-\udfff]", expression)) is not None:
        raise SelectorError(expression, surrogate.start(), "a surrogate is not a character; write the character itself")
    selector = Sql92Selector(expression)
    if (name := _NAME_ALONE.fullmatch(expression)) is not None:
        raise SelectorError(
            expression,
            name.start(1),
            f"a property alone matches no message; compare it, as in {name[1]} = 'north'; for the tag {name[1]} use "
            "the selector type TAG",
        )
    properties = _Watched()
    if not selector.matches(properties) and not properties.are_read:
        raise SelectorError(
            expression, 0, "it matches no message, whatever its properties; compare a property, as in region = 'north'"
        )
    return selector


class _Watched(dict[str, str]):
    """Properties of no message, which note that a condition reads them."""

    are_read = False

    def get(self, name: str, default: Any = None) -> Any:
        self.are_read = True
        return default
