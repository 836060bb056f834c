"""Who has a port: for the message that somebody else does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_LISTENING = "0A"


def port_owner(port: int, proc: Path = Path("/proc")) -> str | None:
    """The process that listens at a TCP port, as ``process 4711 (java)``; None where this machine does not tell.

    Args:
        proc: Where Linux shows its processes.
    """
    inodes = {f"socket:[{inode}]" for inode in _listeners(port, proc)}
    for folder in proc.glob("[0-9]*/fd") if inodes else ():
        try:
            if any(str(link.readlink()) in inodes for link in folder.iterdir()):
                name = (folder.parent / "comm").read_text(encoding="utf-8", errors="replace").strip()
                return f"process {folder.parent.name} ({name})"
        except OSError:
            continue  # another user's, or it ended
    return None


def _listeners(port: int, proc: Path) -> Iterator[str]:
    """The inodes of the sockets that listen at *port*. Format: ``proc_net_tcp`` in the kernel's documentation."""
    for table in ("net/tcp", "net/tcp6"):
        try:
            lines = (proc / table).read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            words = line.split()
            if words[3] == _LISTENING and int(words[1].rpartition(":")[2], 16) == port:
                yield words[9]
