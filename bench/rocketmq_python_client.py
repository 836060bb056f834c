"""sync_send to Apache RocketMQ 5.5.0, one thread, 1 KiB, ASYNC_FLUSH: our remote broker beside RocketMQ's Python one.

Ours talks to the broker, theirs to RocketMQ's proxy, the only thing it can talk to; the proxy runs on the same machine.

python -m bench.rocketmq_python_client
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from bench.measure import BODY, rate, report, run, scratch_folder
from bench.peer.proxy import Proxy, fetch_proxy
from bench.peer.python_client import CLIENT, fetch_client, python_program
from bench.peer.rocketmq import JavaClient, NameServer, RocketMQ, why_not
from mqtemplate.brokers import RemoteBroker, RemoteSettings
from mqtemplate.template import RocketMQTemplate

_TOPIC = "orders"
_ROUND_SECONDS = 5  # the first round warms up the proxy
_ROUNDS = 3
_MESSAGES = 5_000


@contextmanager
def peer(folder: Path) -> Iterator[NameServer]:
    """The broker that both send to, with the topic: what it does with its disk is the same for both."""
    with NameServer() as names, RocketMQ(folder, names, {"flushDiskType": "ASYNC_FLUSH"}, for_speed=True):
        with JavaClient(names) as tools:
            tools.connect()
            tools.create_topic(_TOPIC)
        yield names


def theirs(names: NameServer) -> float:
    """Messages a second by RocketMQ's Python client, through the proxy, which lives only as long as this."""
    with Proxy(names) as proxy:
        arguments = (proxy.address, _TOPIC, str(len(BODY)), str(_ROUND_SECONDS), str(_ROUNDS))
        with python_program("throughput", *arguments) as lines:
            return median(float(line) for line in lines)


def ours(names: NameServer) -> float:
    """Messages a second by ``template.sync_send`` over a remote broker."""
    with RemoteBroker(RemoteSettings(name_servers=(names.address,))) as broker:
        send = RocketMQTemplate(broker).sync_send

        def work(count: int) -> None:
            for _ in range(count):
                send(_TOPIC, BODY)

        return rate(work, _MESSAGES)


def main() -> None:
    if (reason := why_not() or fetch_proxy() or fetch_client()) is not None:
        raise SystemExit(f"not measured: {reason}")
    with scratch_folder() as folder, peer(folder) as names:
        own = ours(names)  # first: so their broker is warm
        client = theirs(names)
    report(f"{CLIENT} -> RocketMQ's proxy 5.5.0, 1 thread", client, "/s", "the peer")
    report("sync_send of the remote broker -> RocketMQ 5.5.0, 1 thread", own, "/s", "")
    report("  of the Python client", own / client, "x", ">= 20x")


if __name__ == "__main__":
    run(main)
