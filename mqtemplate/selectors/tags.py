"""Which messages of a topic a group matches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from mqtemplate.errors import ListenerError
from mqtemplate.java_hash import java_string_hash
from mqtemplate.selectors.sql92 import Sql92Selector


class SelectorType(Enum):
    TAG = "TAG"
    SQL92 = "SQL92"


@dataclass(frozen=True, slots=True)
class TagSelector:
    """``*`` for every message, or tags joined by two bars: ``paid || refunded``.

    Attributes:
        tags: The tags wanted; empty for all.
        codes: Their hashes, as a consume queue keeps them: a cheap first sieve that lets strangers through.
    """

    expression: str = field(default="*", compare=False)
    tags: frozenset[str] = field(init=False)
    codes: frozenset[int] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        words = [word.strip() for word in self.expression.split("||")]
        if not all(words) and self.expression.strip():
            raise ListenerError(
                f"selector expression {self.expression!r} has an empty tag; write 'a || b', or '*' for all"
            )
        wanted = frozenset() if not self.expression.strip() or words == ["*"] else frozenset(words)
        object.__setattr__(self, "tags", wanted)
        object.__setattr__(self, "codes", frozenset(map(java_string_hash, wanted)))

    @property
    def selects_all(self) -> bool:
        return not self.tags

    def matches(self, properties: Mapping[str, str]) -> bool:
        """Return True if the selector selects a message with these properties."""
        return not self.tags or properties.get("TAGS") in self.tags


Selector: TypeAlias = TagSelector | Sql92Selector
"""Either kind. Both tell ``selects_all``, ``matches(properties)``, and ``codes``: None where tags codes say nothing."""


def make_selector(selector_type: SelectorType, expression: str) -> Selector:
    """The selector that an expression of this type stands for.

    Raises:
        ListenerError: The expression cannot be read; of SQL92, a `SelectorError` with the column.
    """
    return Sql92Selector(expression) if selector_type is SelectorType.SQL92 else TagSelector(expression)
