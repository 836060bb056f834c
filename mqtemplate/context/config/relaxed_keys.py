"""Spellings of one key: ``name-server``, ``nameServer``, ``name_server``, ``NAME_SERVER``."""

from __future__ import annotations

from collections.abc import Iterable


def canonical_key(key: str) -> str:
    """Return the part that all spellings of a key have in common: its letters and digits, in lower case.

    The rule is Spring's: dashes, underscores and case have no meaning, so an environment variable can name any key
    (``SENDMESSAGETIMEOUT``).
    """
    return key.replace("-", "").replace("_", "").lower()


def same_key(one: str, other: str) -> bool:
    """Return True if both are spellings of one key."""
    return one == other or canonical_key(one) == canonical_key(other)


def kebab(field_name: str) -> str:
    """Return a Python field name as files and error messages write it."""
    return field_name.replace("_", "-")


def variable_name(path: Iterable[str]) -> str:
    """Return the recommended environment variable of a key: ``ROCKETMQ_PRODUCER_SEND_MESSAGE_TIMEOUT``."""
    return "_".join(path).replace("-", "_").upper()


def dotted(path: Iterable[object]) -> str:
    """Return a path as a person writes it: ``a.b-c[0].d``. Numbers are positions in a list."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")
