"""sync_send to Apache RocketMQ 5.5.0, one thread, 1 KiB, ASYNC_FLUSH: the remote broker and RocketMQ's Python client.

The remote broker connects to the broker. RocketMQ's client can only use RocketMQ's proxy, on the same machine.

python -m bench.rocketmq_python_client
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from bench.measure import BODY, rate, report, run, scratch_folder
from bench.peer.java_client import JavaClient
from bench.peer.jvm import unavailable_reason
from bench.peer.proxy import Proxy, fetch_proxy
from bench.peer.python_client import CLIENT, fetch_client, python_program
from bench.peer.rocketmq import NameServer, RocketMQ
from mqtemplate.brokers import RemoteBroker, RemoteSettings
from mqtemplate.template import RocketMQTemplate

_TOPIC = "orders"
_ROUND_SECONDS = 5  # The first round is a warm-up of the proxy.
_ROUNDS = 3
_MESSAGES = 5_000


@contextmanager
def peer(folder: Path) -> Iterator[NameServer]:
    """Run the broker that both clients use, with the topic. Its disk work is the same for both."""
    with NameServer() as name_server, RocketMQ(folder, name_server, {"flushDiskType": "ASYNC_FLUSH"}, for_speed=True):
        with JavaClient(name_server) as tools:
            tools.connect()
            tools.create_topic(_TOPIC)
        yield name_server


def rocketmq_rate(name_server: NameServer) -> float:
    """Return the messages per second of RocketMQ's Python client. The proxy runs only for this measurement."""
    with Proxy(name_server, for_speed=True) as proxy:
        arguments = (proxy.address, _TOPIC, str(len(BODY)), str(_ROUND_SECONDS), str(_ROUNDS))
        with python_program("throughput", *arguments) as lines:
            return median(float(line) for line in lines)


def mqtemplate_rate(name_server: NameServer) -> float:
    """Return the messages per second of ``template.sync_send`` with a remote broker."""
    with RemoteBroker(RemoteSettings(name_servers=(name_server.address,))) as broker:
        send = RocketMQTemplate(broker).sync_send

        def work(count: int) -> None:
            for _ in range(count):
                send(_TOPIC, BODY)

        return rate(work, _MESSAGES)


def main() -> None:
    if (reason := unavailable_reason() or fetch_proxy() or fetch_client()) is not None:
        raise SystemExit(f"not measured: {reason}")
    with scratch_folder() as folder, peer(folder) as name_server:
        own = mqtemplate_rate(name_server)  # First, so that the broker is warm for the other client.
        client = rocketmq_rate(name_server)
    report(f"{CLIENT} -> RocketMQ's proxy 5.5.0, 1 thread", client, "/s", "the peer")
    report("sync_send of the remote broker -> RocketMQ 5.5.0, 1 thread", own, "/s", "")
    report("  of the Python client", own / client, "x", ">= 20x")


if __name__ == "__main__":
    run(main)
