"""User of the process at the other end of a connection on this machine, as Linux shows it in ``/proc/net``."""

from __future__ import annotations

import ipaddress
import socket
import struct
import sys
from pathlib import Path

_TABLES = {socket.AF_INET: Path("/proc/net/tcp"), socket.AF_INET6: Path("/proc/net/tcp6")}
# man 5 proc, /proc/pid/net/tcp: after the number of the line, the two addresses, the state, and in the eighth column
# the user id.
_LOCAL, _REMOTE, _USER = 1, 2, 7


def local_user(connected: socket.socket) -> int | None:
    """Return the user id of the client of a connection; None if it is on another machine, or unknown."""
    try:
        here, there = connected.getsockname(), connected.getpeername()
        if not ipaddress.ip_address(there[0].partition("%")[0]).is_loopback:
            return None
        # The socket of the client has the same two addresses, the other way round.
        wanted = (_as_in_table(there), _as_in_table(here))
        with _TABLES[connected.family].open("r", encoding="ascii") as lines:
            for line in lines:
                columns = line.split()
                if (columns[_LOCAL], columns[_REMOTE]) == wanted:
                    return int(columns[_USER])
    except (OSError, ValueError, LookupError):
        return None  # another system, a closed connection, or /proc is hidden
    return None


def _as_in_table(address: tuple[str, int]) -> str:
    """Return an address as the tables show it: words of four bytes in the order of the processor."""
    packed = ipaddress.ip_address(address[0].partition("%")[0]).packed
    words = struct.unpack(f"{'<' if sys.byteorder == 'little' else '>'}{len(packed) // 4}I", packed)
    return f"{''.join(f'{word:08X}' for word in words)}:{address[1]:04X}"
