"""Find the process that uses a port, for the error message."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_LISTENING = "0A"


def port_owner(port: int, proc: Path = Path("/proc")) -> str | None:
    """Return the process that listens on a TCP port, as ``process 4711 (java)``. None if it cannot be found.

    Args:
        proc: Process information of Linux.
    """
    inodes = {f"socket:[{inode}]" for inode in _listener_inodes(port, proc)}
    for folder in proc.glob("[0-9]*/fd") if inodes else ():
        try:
            if any(str(link.readlink()) in inodes for link in folder.iterdir()):
                name = (folder.parent / "comm").read_text(encoding="utf-8", errors="replace").strip()
                return f"process {folder.parent.name} ({name})"
        except OSError:
            continue  # The process belongs to another user, or has ended.
    return None


def _listener_inodes(port: int, proc: Path) -> Iterator[str]:
    """Yield the inodes of the sockets that listen on *port*. Format: ``proc_net_tcp`` in the kernel's documentation."""
    for table in ("net/tcp", "net/tcp6"):
        try:
            lines = (proc / table).read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            columns = line.split()
            if columns[3] == _LISTENING and int(columns[1].rpartition(":")[2], 16) == port:
                yield columns[9]
