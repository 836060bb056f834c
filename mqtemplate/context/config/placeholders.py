"""``${key:default}``: values that refer to the environment or to other keys."""

from __future__ import annotations

from collections.abc import Callable

from mqtemplate.context.config.tree import UNSET
from mqtemplate.errors import ConfigurationError

Lookup = Callable[[str], tuple[object, str]]
"""A key's raw value and where it is from; `UNSET` if nobody gave one."""


class Placeholders:
    """Fills placeholders in.

    - ``${shop.name}`` needs a value, ``${shop.name:none}`` has a default; the default may hold placeholders.
    - A text that is one placeholder and nothing else takes the value with its type; inside other text it becomes text.
    - ``$${`` is a plain ``${``.

    Args:
        lookup: Finds the raw value of a key.
    """

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup

    def resolve(self, value: object, origin: str) -> object:
        """Resolve text, and the text in lists and mappings.

        Raises:
            ConfigurationError: A key has neither value nor default, refers to itself, or a brace is left open.
        """
        return self._resolve(value, origin, ())

    def _resolve(self, value: object, origin: str, asking: tuple[str, ...]) -> object:
        if isinstance(value, dict):
            return {key: self._resolve(item, origin, asking) for key, item in value.items()}
        if isinstance(value, list):
            return [self._resolve(item, origin, asking) for item in value]
        if isinstance(value, str) and "${" in value:
            return self._fill(value, origin, asking)
        return value

    def _fill(self, text: str, origin: str, asking: tuple[str, ...]) -> object:
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
            parts.append(self._value_of(text[start + 2 : end], origin, asking))
            at = end + 1
        if at < len(text):
            parts.append(text[at:])
        return parts[0] if len(parts) == 1 else "".join(map(_as_text, parts))

    def _value_of(self, expression: str, origin: str, asking: tuple[str, ...]) -> object:
        key, has_default, default = expression.partition(":")
        key = key.strip()
        if not key:
            raise ConfigurationError(f"{origin}: '${{{expression}}}' names no key; write ${{some.key:default}}")
        if key in asking:
            chain = " -> ".join(f"${{{name}}}" for name in (*asking[asking.index(key) :], key))
            raise ConfigurationError(f"{origin}: placeholders refer to each other in a circle: {chain}")
        value, found_at = self._lookup(key)
        if value is not UNSET:
            return self._resolve(value, found_at, (*asking, key))
        if has_default:
            return self._resolve(default, origin, asking)
        raise ConfigurationError(
            f"{origin}: '${{{expression}}}' has no value and no default; set {key} or write ${{{key}:default}}"
        )


def _closing_brace(text: str, start: int, origin: str) -> int:
    depth = 0
    at = start
    while at < len(text):
        if text.startswith("${", at):
            depth += 1
            at += 2
            continue
        if text[at] == "}":
            depth -= 1
            if depth == 0:
                return at
        at += 1
    raise ConfigurationError(f"{origin}: a placeholder is not closed: write '}}' behind it, or $${{ for a plain ${{")


def _as_text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)
