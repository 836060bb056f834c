"""RocketMQ's Java client as a push consumer of 100,000 waiting messages: from our server, and from RocketMQ 5.5.0's.

python -m bench.rocketmq_server_consume
"""

from __future__ import annotations

from pathlib import Path
from statistics import median

from bench.measure import BODY, report, run, scratch_folder
from bench.peer.rocketmq import NameServer, RocketMQ, java_program, why_not
from mqtemplate.store import FlushDiskType
from tests.conformance.servers import OurServer

_COUNT = 100_000
_BATCH = 100
_ROUNDS = 3


def theirs(folder: Path) -> float:
    """Messages a second from RocketMQ."""
    options = {"flushDiskType": FlushDiskType.ASYNC_FLUSH.value}
    with NameServer() as names, RocketMQ(folder, names, options, for_speed=True):
        return _drain(names.address)


def ours(folder: Path) -> float:
    """Messages a second from our server, in a process of its own."""
    with OurServer(folder, flush_disk_type=FlushDiskType.ASYNC_FLUSH) as server:
        return _drain(server.address)


def _drain(address: str) -> float:
    """Fill a topic, then let one group after the other read it; the first warms the server up."""
    with java_program("Fill", address, "orders", str(_COUNT), str(_BATCH), str(len(BODY))) as lines:
        list(lines)
    return median([_consume(address, f"group-{number}") for number in range(_ROUNDS + 1)][1:])


def _consume(address: str, group: str) -> float:
    with java_program("Drain", address, "orders", group, str(_COUNT)) as lines:
        return float(next(lines))


def main() -> None:
    if (reason := why_not()) is not None:
        raise SystemExit(f"not measured: {reason}")
    with scratch_folder() as folder:
        peer = theirs(folder / "peer")
        own = ours(folder / "ours")
    report("RocketMQ 5.5.0, a push consumer in Java, 100,000 waiting messages", peer, "/s", "the peer")
    report("our server, the same consumer", own, "/s", "")
    report("  of RocketMQ", own / peer, "x", ">= 0.5x")


if __name__ == "__main__":
    run(main)
