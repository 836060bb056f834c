"""sync_send to Apache RocketMQ 5.5.0, one thread, 1 KiB: the remote broker and RocketMQ's Java client.

python -m bench.rocketmq_remote_send
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from bench.measure import BODY, rate, report, run, scratch_folder
from bench.peer.jvm import java_program, unavailable_reason
from bench.peer.rocketmq import NameServer, RocketMQ
from mqtemplate.brokers import RemoteBroker, RemoteSettings
from mqtemplate.template import RocketMQTemplate

_ROUND_SECONDS = 4
_ROUNDS = 3
_MESSAGES = 5_000


@contextmanager
def peer(folder: Path) -> Iterator[NameServer]:
    """Run the broker that both clients use. Its disk work is the same for both."""
    with NameServer() as name_server, RocketMQ(folder, name_server, {"flushDiskType": "ASYNC_FLUSH"}, for_speed=True):
        yield name_server


def rocketmq_rate(name_server: NameServer) -> float:
    """Return the messages per second of RocketMQ's Java client."""
    arguments = (name_server.address, "orders", "1", str(len(BODY)), "1", str(_ROUND_SECONDS), str(_ROUNDS))
    with java_program("Throughput", *arguments) as lines:
        return median(float(line.split()[0]) for line in lines)


def mqtemplate_rate(name_server: NameServer) -> float:
    """Return the messages per second of ``template.sync_send`` with a remote broker."""
    settings = RemoteSettings(name_servers=(name_server.address,), compress_threshold=1 << 30)
    with RemoteBroker(settings) as broker:
        send = RocketMQTemplate(broker).sync_send

        def work(count: int) -> None:
            for _ in range(count):
                send("orders:paid", BODY)

        return rate(work, _MESSAGES)


def main() -> None:
    if (reason := unavailable_reason()) is not None:
        raise SystemExit(f"not measured: {reason}")
    with scratch_folder() as folder, peer(folder) as name_server:
        java = rocketmq_rate(name_server)
        python = mqtemplate_rate(name_server)
        report("RocketMQ's Java client -> RocketMQ 5.5.0, 1 thread", java, "/s", "the peer")
        report("sync_send of the remote broker -> RocketMQ 5.5.0, 1 thread", python, "/s", "")
        report("  of the Java client", python / java, "x", ">= 0.5x")


if __name__ == "__main__":
    run(main)
