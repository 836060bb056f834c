"""RocketMQ's Java push consumer reads 100,000 stored messages: from mqtemplate's server, and from RocketMQ 5.5.0.

python -m bench.rocketmq_server_consume
"""

from __future__ import annotations

from pathlib import Path
from statistics import median

from bench.measure import BODY, report, run, scratch_folder
from bench.peer.jvm import java_program, unavailable_reason
from bench.peer.rocketmq import NameServer, RocketMQ
from mqtemplate.store.settings import FlushDiskType
from tests.conformance.servers import BrokerProcess

_COUNT = 100_000
_BATCH = 100
_ROUNDS = 3


def rocketmq_rate(folder: Path) -> float:
    """Return the messages per second from RocketMQ."""
    options = {"flushDiskType": FlushDiskType.ASYNC_FLUSH.value}
    with NameServer() as name_server, RocketMQ(folder, name_server, options, for_speed=True):
        return _drain_rate(name_server.address)


def mqtemplate_rate(folder: Path) -> float:
    """Return the messages per second from mqtemplate's server in its own process."""
    with BrokerProcess(folder, flush_disk_type=FlushDiskType.ASYNC_FLUSH) as server:
        return _drain_rate(server.address)


def _drain_rate(address: str) -> float:
    """Fill a topic, and let groups read it one after the other. The first one is a warm-up."""
    with java_program("Fill", address, "orders", str(_COUNT), str(_BATCH), str(len(BODY))) as lines:
        list(lines)
    return median([_group_rate(address, f"group-{number}") for number in range(_ROUNDS + 1)][1:])


def _group_rate(address: str, group: str) -> float:
    with java_program("Drain", address, "orders", group, str(_COUNT)) as lines:
        return float(next(lines))


def main() -> None:
    if (reason := unavailable_reason()) is not None:
        raise SystemExit(f"not measured: {reason}")
    with scratch_folder() as folder:
        peer = rocketmq_rate(folder / "peer")
        own = mqtemplate_rate(folder / "ours")
    report("RocketMQ 5.5.0, a push consumer in Java, 100,000 messages", peer, "/s", "the peer")
    report("mqtemplate's server, the same consumer", own, "/s", "")
    report("  of RocketMQ", own / peer, "x", ">= 0.5x")


if __name__ == "__main__":
    run(main)
