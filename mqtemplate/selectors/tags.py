"""Tag selectors, and the type of all selectors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from mqtemplate.errors import ListenerError
from mqtemplate.hashes.java_hash import java_string_hash
from mqtemplate.message import Property

_TAGS = Property.TAGS
_OTHER_SEPARATOR = re.compile(r"\||[,;]|\s(?:or|OR|Or)\s")


class SelectorType(Enum):
    """Language of a selector expression."""

    TAG = "TAG"
    SQL92 = "SQL92"


class Selector(Protocol):
    """Decision which messages are selected: a `TagSelector`, or a `Sql92Selector`."""

    @property
    def expression(self) -> str:
        """The text that the selector was created from."""

    @property
    def selects_all(self) -> bool:
        """True if all messages are selected."""

    @property
    def codes(self) -> frozenset[int] | None:
        """Hash codes of the selected tags; None if hash codes cannot decide."""

    def matches(self, properties: Mapping[str, str]) -> bool:
        """Return True if a message with these properties is selected."""


@dataclass(frozen=True, slots=True)
class TagSelector:
    """``*`` for all messages, or tags joined by ``||``: ``paid || refunded``.

    Attributes:
        tags: The selected tags; empty for all messages.
        codes: Hash codes of the tags, as consume queues store them. Other tags may have the same hash code.
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
        tags = frozenset() if not self.expression.strip() or words == ["*"] else frozenset(words)
        object.__setattr__(self, "tags", tags)
        object.__setattr__(self, "codes", frozenset(map(java_string_hash, tags)))

    @property
    def selects_all(self) -> bool:
        """True if the selector matches all messages."""
        return not self.tags

    def matches(self, properties: Mapping[str, str]) -> bool:
        """Return True if the selector matches a message with these properties."""
        return not self.tags or properties.get(_TAGS) in self.tags


def tag_selector(expression: str) -> TagSelector:
    """Create a tag selector from what a user wrote.

    RocketMQ separates tags by two bars only, and takes ``paid | shipped`` or ``paid,shipped`` as one tag, which no
    message has. Its clients may select such a tag, so `TagSelector` allows it.

    Raises:
        ListenerError: The expression has an empty tag, or a tag with another separator in it; it says the solution.
    """
    selector = TagSelector(expression)
    if any(map(_OTHER_SEPARATOR.search, selector.tags)):
        tags = [tag for part in expression.split("||") for tag in _OTHER_SEPARATOR.split(part) if tag.strip()]
        raise ListenerError(
            f"selector expression {expression!r} would match no message, since only two bars separate tags; "
            f"write {' || '.join(tag.strip() for tag in tags)!r}"
        )
    return selector
