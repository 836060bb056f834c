"""The key ``rocketmq.name-server``, which chooses the broker."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from mqtemplate.errors import ConfigurationError
from mqtemplate.processes import expand_home

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:;/]+):(\d{1,5})")
_ALLOWED = "'embedded', 'embedded:memory', 'embedded:<folder>', or 'host:port;host:port'"


@dataclass(frozen=True, slots=True)
class EmbeddedStore:
    """Choice of the embedded broker, and its store.

    Attributes:
        path: Store directory in the key itself; None for the directory in ``mqtemplate.broker.store-path``.
        in_memory: True: the store has no directory.
    """

    path: Path | None = None
    in_memory: bool = False


@dataclass(frozen=True, slots=True)
class RemoteCluster:
    """Choice of a RocketMQ cluster: its name servers as ``host:port``."""

    addresses: tuple[str, ...]


def parse_name_server(text: str) -> EmbeddedStore | RemoteCluster:
    """Return the broker that the value of the key chooses.

    Raises:
        ValueError: The value has none of the allowed forms.
    """
    kind, colon, rest = text.strip().partition(":")
    if kind.lower() == "embedded":
        rest = rest.strip()
        if colon and not rest:
            raise ValueError(f"'embedded:' has nothing after the colon; allowed are {_ALLOWED}")
        if rest.lower() == "memory":
            return EmbeddedStore(in_memory=True)
        try:
            return EmbeddedStore(path=expand_home(Path(rest), "rocketmq.name-server") if rest else None)
        except ConfigurationError as exc:
            raise ValueError(str(exc)) from exc
    addresses = tuple(part.strip() for part in re.split("[;,]", text) if part.strip())
    if not addresses or not all(_is_address(address) for address in addresses):
        raise ValueError(f"allowed are {_ALLOWED}")
    return RemoteCluster(addresses)


def _is_address(text: str) -> bool:
    found = _ADDRESS.fullmatch(text)
    return found is not None and 0 < int(found[2]) < 65_536
