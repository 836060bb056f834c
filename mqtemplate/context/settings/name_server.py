"""The key ``rocketmq.name-server``, which chooses the broker."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:;/]+):(\d{1,5})")
_ALLOWED = "'embedded', 'embedded:memory', 'embedded:<folder>', or 'host:port;host:port'"
_NO_FOLDER = {
    # texts that are no folder after 'embedded:' -> the problem
    r"^:": "a folder does not begin with a colon ('embedded:memory' is the store without a folder)",
    r"^[A-Za-z][A-Za-z0-9+.-]*:": "a folder has no scheme, drive or port before it",
    r"%[0-9A-Fa-f]{2}": "percent escapes are not decoded",
    r"\\": "the separator of folders is '/', not a backslash",
    r"[;?]": "one folder has no list after it, and no parameters",
    r"[\x00-\x1f]": "a folder has no control characters",
}


@dataclass(frozen=True, slots=True)
class EmbeddedStore:
    """Choice of the embedded broker, and its store.

    Attributes:
        path: Store directory as the key has it, see `AppSettings.absolute`; None for the directory in
            ``mqtemplate.broker.store-path``.
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
        return EmbeddedStore(path=_folder(rest) if rest else None)
    addresses = tuple(part.strip() for part in re.split("[;,]", text) if part.strip())
    if not addresses or not all(_is_address(address) for address in addresses):
        raise ValueError(f"allowed are {_ALLOWED}")
    return RemoteCluster(addresses)


def _folder(text: str) -> Path:
    """Return the folder that follows ``embedded:``.

    It is a path of this system as it stands. Texts that are more likely a URL, or a path of Windows, are refused: they
    would name another folder than the one that was meant, and its messages would seem to be lost.

    Raises:
        ValueError: The text is no path in one of the allowed forms.
    """
    if text.startswith("//") and not text.startswith("///"):
        name = text.strip("/") or "data"
        if name.lower() == "memory":
            raise ValueError(
                "'embedded:' is not the start of a URL; write 'embedded:./memory' for a folder of that name, "
                "or 'embedded:memory' for the store without a folder"
            )
        raise ValueError(
            f"'embedded:' is not the start of a URL with a host; write 'embedded:{name}' for a folder in the working "
            f"directory, or 'embedded:/{name.removeprefix('./')}' for one from the root"
        )
    for pattern, problem in _NO_FOLDER.items():
        if re.search(pattern, text):
            raise ValueError(
                f"{problem}; write the folder as 'embedded:./data' or 'embedded:/var/data', or give its exact name in "
                "mqtemplate.broker.store-path"
            )
    return Path(f"/{text.lstrip('/')}") if text.startswith("/") else Path(text)


def _is_address(text: str) -> bool:
    found = _ADDRESS.fullmatch(text)
    return found is not None and 0 < int(found[2]) < 65_536
