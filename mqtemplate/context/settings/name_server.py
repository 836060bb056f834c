"""``rocketmq.name-server``: one key that chooses the broker."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:;/]+):(\d{1,5})")
_ALLOWED = "'embedded', 'embedded:memory', 'embedded:<folder>', or 'host:port;host:port'"


@dataclass(frozen=True, slots=True)
class EmbeddedHome:
    """The broker of this process.

    Attributes:
        path: The folder that the key itself names; None: the folder of ``mqtemplate.broker.store-path``.
        in_memory: No folder at all.
    """

    path: Path | None = None
    in_memory: bool = False


@dataclass(frozen=True, slots=True)
class RemoteCluster:
    """Name servers of a RocketMQ cluster, as ``host:port``."""

    addresses: tuple[str, ...]


def parse_name_server(text: str) -> EmbeddedHome | RemoteCluster:
    """Read the key.

    Raises:
        ValueError: It is neither of the forms.
    """
    kind, colon, rest = text.strip().partition(":")
    if kind.lower() == "embedded":
        rest = rest.strip()
        if colon and not rest:
            raise ValueError(f"'embedded:' lacks what comes behind the colon; allowed are {_ALLOWED}")
        if rest.lower() == "memory":
            return EmbeddedHome(in_memory=True)
        return EmbeddedHome(path=Path(rest).expanduser() if rest else None)
    addresses = tuple(part.strip() for part in re.split("[;,]", text) if part.strip())
    if not addresses or not all(_is_address(address) for address in addresses):
        raise ValueError(f"allowed are {_ALLOWED}")
    return RemoteCluster(addresses)


def _is_address(text: str) -> bool:
    found = _ADDRESS.fullmatch(text)
    return found is not None and 0 < int(found[2]) < 65_536
