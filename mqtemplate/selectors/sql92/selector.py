"""The selector itself: a text, read once, asked for every message."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mqtemplate.selectors.sql92.values import Evaluate, NotComparableError


@dataclass(frozen=True, slots=True)
class Sql92Selector:
    """A condition over a message's properties: ``region = 'north' AND price BETWEEN 10 AND 20``.

    It answers as RocketMQ does, also where that surprises:

    - Properties are texts; beside a number they are read as one, of that number's type. ``5.5`` is no whole number, so
      ``price > 5`` cannot be answered for it; where fractions may come, write ``price > 5.0``.
    - What cannot be answered ends the evaluation, and the message is not wanted, whatever ``NOT`` or ``OR`` stand
      around; but ``AND`` and ``OR`` leave off as soon as they know, from left to right.
    - A property that is not there is NULL, and a condition that is NULL does not match. In ``a <> b`` only the left
      side's NULL makes NULL: where b alone is missing, the two differ.
    - ``NOT`` binds to the next word only: write ``NOT (a = 1)``.
    - ``CONTAINS``, ``STARTSWITH``, ``ENDSWITH`` and their ``NOT`` forms are false where the property is not there, or
      where the text looked for is empty.
    - ``IN`` takes texts; ``<`` and its like take numbers, and properties that are read as such.

    One difference: RocketMQ ignores whatever follows the first condition that is complete (``a = 1 b = 2`` is ``a = 1``
    to it); here that is a mistake.

    Args:
        expression: At most 32,768 characters, conditions within conditions at most 100 deep.

    Raises:
        SelectorError: RocketMQ would refuse it too, something follows its end, or it is too long or too deep.
    """

    expression: str
    _evaluate: Evaluate = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        # The library takes longer to load than the rest of this package; only who selects by SQL92 pays for it.
        from mqtemplate.selectors.sql92.grammar import compile_expression

        object.__setattr__(self, "_evaluate", compile_expression(self.expression))

    @property
    def selects_all(self) -> bool:
        """Never known beforehand."""
        return False

    @property
    def codes(self) -> None:
        """Tags codes tell nothing about it."""

    def matches(self, properties: Mapping[str, str]) -> bool:
        """Return True if the expression selects a message with these properties.

        Args:
            properties: All of the message's, the tag as ``TAGS`` and the keys as ``KEYS`` among them.
        """
        try:
            return self._evaluate(properties) is True
        except NotComparableError:
            return False
