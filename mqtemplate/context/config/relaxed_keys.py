"""One key, many spellings: ``name-server``, ``nameServer``, ``name_server``, ``NAME_SERVER``."""

from __future__ import annotations

from collections.abc import Iterable


def squash(key: str) -> str:
    """What all spellings of a key have in common: its letters and digits, in lower case.

    The rule is Spring's: dashes, underscores and case carry no meaning, so an environment
    variable can name any key (``SENDMESSAGETIMEOUT``).
    """
    return key.replace("-", "").replace("_", "").lower()


def same_key(one: str, other: str) -> bool:
    return one == other or squash(one) == squash(other)


def kebab(field_name: str) -> str:
    """A Python field name as it is written in a file and in error messages."""
    return field_name.replace("_", "-")


def shown(path: Iterable[object]) -> str:
    """A path as a person writes it: ``a.b-c[0].d``. Numbers are places in a list."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else str(part)
    return text
