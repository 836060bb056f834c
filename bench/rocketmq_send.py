"""sync_send, 1 KiB: the embedded broker, and Apache RocketMQ 5.5.0 with its Java client, with the same flush mode.

python -m bench.rocketmq_send
"""

from __future__ import annotations

import threading
from pathlib import Path
from statistics import median

from bench.measure import BODY, rate, report, run, scratch_folder
from bench.peer.jvm import java_program, unavailable_reason
from bench.peer.rocketmq import NameServer, RocketMQ
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.store.settings import FlushDiskType
from mqtemplate.template import RocketMQTemplate

_ROUND_SECONDS = 4
_ROUNDS = 3


def rocketmq_rates(folder: Path, mode: FlushDiskType, thread_counts: tuple[int, ...]) -> dict[int, float]:
    """Return the messages per second of RocketMQ for each number of threads."""
    options = {"flushDiskType": mode.value}
    with NameServer() as name_server, RocketMQ(folder, name_server, options, for_speed=True):
        return {threads: _client_rate(name_server, threads) for threads in thread_counts}


def _client_rate(name_server: NameServer, threads: int) -> float:
    body, batch = str(len(BODY)), "1"
    arguments = (name_server.address, "orders", str(threads), body, batch, str(_ROUND_SECONDS), str(_ROUNDS))
    with java_program("Throughput", *arguments) as lines:
        return median(float(line.split()[0]) for line in lines)


def mqtemplate_rate(folder: Path, mode: FlushDiskType, threads: int) -> float:
    """Return the messages per second of the embedded broker."""
    with EmbeddedBroker(folder, EmbeddedSettings(flush_disk_type=mode)) as broker:
        send = RocketMQTemplate(broker).sync_send

        def work(count: int) -> None:
            for _ in range(count):
                send("orders:paid", BODY)

        def work_of_threads(count: int) -> None:
            senders = [threading.Thread(target=work, args=(count // threads,)) for _ in range(threads)]
            for sender in senders:
                sender.start()
            for sender in senders:
                sender.join()

        return rate(work, 50_000) if threads == 1 else rate(work_of_threads, 32_000)


def main() -> None:
    if (reason := unavailable_reason()) is not None:
        raise SystemExit(f"not measured: {reason}")
    with scratch_folder() as folder:
        peer = rocketmq_rates(folder / "peer-async", FlushDiskType.ASYNC_FLUSH, (1, 32))
        one = mqtemplate_rate(folder / "mqtemplate-async", FlushDiskType.ASYNC_FLUSH, 1)
        report("RocketMQ, ASYNC_FLUSH, Java client, 1 thread", peer[1], "/s", "the peer")
        report("RocketMQ, ASYNC_FLUSH, Java client, 32 threads", peer[32], "/s", "the peer")
        report("sync_send, ASYNC_FLUSH, 1 thread", one, "/s", "")
        report("  of RocketMQ with 1 thread", one / peer[1], "x", ">= 15x")
        report("  of RocketMQ with 32 threads", one / peer[32], "x", ">= 2.5x")
    with scratch_folder() as folder:
        peer_sync = rocketmq_rates(folder / "peer-sync", FlushDiskType.SYNC_FLUSH, (32,))[32]
        many = mqtemplate_rate(folder / "mqtemplate-sync", FlushDiskType.SYNC_FLUSH, 32)
        report("RocketMQ, SYNC_FLUSH, Java client, 32 threads", peer_sync, "/s", "the peer")
        report("sync_send, SYNC_FLUSH, 32 threads", many, "/s", "")
        report("  of RocketMQ with 32 threads", many / peer_sync, "x", ">= 1.5x")


if __name__ == "__main__":
    run(main)
