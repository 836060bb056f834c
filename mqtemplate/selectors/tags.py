"""Tag selectors, and the type of all selectors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from mqtemplate.errors import ListenerError
from mqtemplate.hashes import java_string_hash
from mqtemplate.message import Property
from mqtemplate.user_code import shown

_TAGS = Property.TAGS
_OTHER_SEPARATOR = re.compile(r"\s*(?:\|+|[,;]|\s(?i:or)\s)\s*|\s+")
_BOTH = re.compile(r"&&|\s(?i:and)\s")
_SQL = re.compile(r"[=<>'\"]|\s(?i:is|in|between|like|contains|startswith|endswith)\b|^\s*(?i:not)\s")
# Separators, wildcards, signs of conditions, blanks and control characters, and what UTF-8 does not have.
_NOT_IN_TAGS = re.compile(r"[|,;*=<>()'\"\s\x00-\x1f\x7f-\x9f\ud800-\udfff]|&&|^!")


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


def tag_problem(tag: str) -> str | None:
    """Return why a tag that an application sends could not be selected by it, and what to write; None if it can.

    One rule holds for what is sent and for what is selected. RocketMQ itself takes ``a,b`` or ``a | b`` as one tag. A
    message of another client may have it, and is selected by ``*`` or by SQL92.
    """
    if not tag:
        return "the tag is empty"
    if tag != tag.strip():
        return f"the tag starts or ends with a blank; write {tag.strip()!r}"
    if "||" in tag:
        return "a message has one tag; use '||' in a listener's selector"
    if (found := _NOT_IN_TAGS.search(tag)) is not None:
        return (
            f"the tag contains {found[0]!r}, and tags have no separators, blanks, wildcards, conditions or control "
            "characters; use letters, digits, and signs such as - _ . : /"
        )
    return None


def tag_selector(expression: str) -> TagSelector:
    """Create a tag selector from what a user wrote; see `tag_problem` for the tags that are allowed.

    Raises:
        ListenerError: The expression has an empty tag, or something that cannot be a tag: another separator, a
            condition of SQL92, a wildcard. The text says what to write.
    """
    selector = TagSelector(expression)
    if all(tag_problem(tag) is None for tag in selector.tags):
        return selector
    start = f"selector expression {shown(expression)} would match no message, since "
    if _SQL.search(expression):
        raise ListenerError(
            f"{start}it is SQL92, not a list of tags; set the selector type to SQL92, or write 'a || b'"
        )
    if _BOTH.search(expression):
        tags = [tag.strip() for tag in _BOTH.split(expression) if tag.strip()]
        raise ListenerError(f"{start}a message has one tag; write {' || '.join(tags)!r} for messages with either tag")
    if "*" in selector.tags:
        raise ListenerError(f"{start}* beside tags is itself a tag; write '*' alone for all messages")
    if _OTHER_SEPARATOR.search(expression):
        tags = [tag.strip() for tag in _OTHER_SEPARATOR.split(expression) if tag.strip()]
        if all(tag_problem(tag) is None for tag in tags):
            raise ListenerError(f"{start}only two bars separate tags; write {' || '.join(tags)!r}")
    problem = next(filter(None, map(tag_problem, sorted(selector.tags))))
    raise ListenerError(f"{start}{problem}; write 'a || b', or '*' for all messages")
