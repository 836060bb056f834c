"""Placeholders ``${key:default}``: values that refer to the environment or to other keys."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeAlias

from mqtemplate.errors import ConfigurationError

Found: TypeAlias = tuple[object, str]
"""The raw value of a key, and its origin."""

Lookup: TypeAlias = Callable[[str], Found | None]
"""Finds a key; None if it has no value."""

_MAX_DEPTH = 50
_MAX_RESOLVED = 10_000
_BRACES = re.compile(r"\$\{|\}")


class Placeholders:
    """Resolver of placeholders.

    - ``${shop.name}`` needs a value, ``${shop.name:none}`` has a default; the default may contain placeholders.
    - A text that is exactly one placeholder takes the value with its type; inside other text it becomes text.
    - ``$${`` is a literal ``${``.

    Args:
        lookup: Finds the raw value of a key.
    """

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup
        self._depth = 0
        self._resolved = 0  # placeholders of the current value: each may stand for two others, and so on

    def resolve(self, value: object, origin: str) -> object:
        """Resolve text, and the text in lists and mappings.

        Raises:
            ConfigurationError: A key has neither value nor default, refers to itself, or a brace is not closed; or too
                many placeholders are in each other.
        """
        self._resolved = 0
        return self._resolve(value, origin, ())

    def _resolve(self, value: object, origin: str, keys: tuple[str, ...]) -> object:
        """Resolve a value of the last of *keys*; each of them refers to the next."""
        if isinstance(value, dict):
            return {key: self._resolve(item, origin, keys) for key, item in value.items()}
        if isinstance(value, list):
            return [self._resolve(item, origin, keys) for item in value]
        if isinstance(value, str) and "${" in value:
            return self._resolve_text(value, origin, keys)
        return value

    def _resolve_text(self, text: str, origin: str, keys: tuple[str, ...]) -> object:
        parts: list[object] = []
        at = 0
        while (start := text.find("${", at)) >= 0:
            if text[start - 1 : start] == "$":
                parts.append(text[at : start - 1] + "${")
                at = start + 2
                continue
            if start > at:
                parts.append(text[at:start])
            end = _closing_brace(text, start, origin)
            parts.append(self._limited_value_of(text[start + 2 : end], origin, keys))
            at = end + 1
        if at < len(text):
            parts.append(text[at:])
        return parts[0] if len(parts) == 1 else "".join(map(as_text, parts))

    def _limited_value_of(self, expression: str, origin: str, keys: tuple[str, ...]) -> object:
        self._resolved += 1
        if self._depth >= _MAX_DEPTH or self._resolved > _MAX_RESOLVED:
            raise ConfigurationError(
                f"{origin}: placeholders are nested deeper than {_MAX_DEPTH} levels, or stand for more than "
                f"{_MAX_RESOLVED:,} others; write the value itself"
            )
        self._depth += 1
        try:
            return self._value_of(expression, origin, keys)
        finally:
            self._depth -= 1

    def _value_of(self, expression: str, origin: str, keys: tuple[str, ...]) -> object:
        key, has_default, default = expression.partition(":")
        key = key.strip()
        if not key:
            raise ConfigurationError(f"{origin}: '${{{expression}}}' names no key; write ${{some.key:default}}")
        if key in keys:
            chain = " -> ".join(f"${{{name}}}" for name in (*keys[keys.index(key) :], key))
            raise ConfigurationError(f"{origin}: placeholders refer to each other in a circle: {chain}")
        if (found := self._lookup(key)) is not None:
            value, found_at = found
            return self._resolve(value, found_at, (*keys, key))
        if has_default:
            return self._resolve(default, origin, keys)
        raise ConfigurationError(
            f"{origin}: '${{{expression}}}' has no value and no default; set {key} or write ${{{key}:default}}"
        )


def _closing_brace(text: str, start: int, origin: str) -> int:
    """Return the position of the brace that closes the placeholder at *start*; placeholders may be nested."""
    depth = 0
    for brace in _BRACES.finditer(text, start):
        depth += 1 if brace[0] == "${" else -1
        if depth == 0:
            return brace.start()
    raise ConfigurationError(f"{origin}: a placeholder is not closed: add '}}', or write $${{ for a literal ${{")


def as_text(value: object) -> str:
    """Return a value as YAML writes it: ``true``, not ``True``."""
    return str(value).lower() if isinstance(value, bool) else str(value)
