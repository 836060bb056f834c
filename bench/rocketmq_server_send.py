"""RocketMQ's Java client sends 1 KiB synchronously: to mqtemplate's server and to RocketMQ 5.5.0, same flush mode.

python -m bench.rocketmq_server_send [SECONDS]

With an argument it kills the server again and again for that time while Java clients send, instead of measuring. It
counts the acknowledged messages that are lost.
"""

from __future__ import annotations

import sys
import time
from itertools import islice
from pathlib import Path
from statistics import median

from bench.measure import BODY, report, run, scratch_folder
from bench.peer.java_client import JavaClient
from bench.peer.jvm import java_program, unavailable_reason
from bench.peer.rocketmq import NameServer, RocketMQ
from mqtemplate.store.settings import FlushDiskType
from tests.conformance.servers import BrokerProcess

_ROUND_SECONDS = 4
_ROUNDS = 3
_THREADS = (1, 16)


def rocketmq_rates(folder: Path, mode: FlushDiskType) -> dict[int, float]:
    """Return the messages per second of RocketMQ for each number of threads."""
    with NameServer() as name_server, RocketMQ(folder, name_server, {"flushDiskType": mode.value}, for_speed=True):
        return {threads: _client_rate(name_server.address, threads) for threads in _THREADS}


def mqtemplate_rates(folder: Path, mode: FlushDiskType) -> dict[int, float]:
    """Return the messages per second of mqtemplate's server in its own process."""
    with BrokerProcess(folder, flush_disk_type=mode) as server:
        return {threads: _client_rate(server.address, threads) for threads in _THREADS}


def _client_rate(address: str, threads: int) -> float:
    arguments = (address, "orders", str(threads), str(len(BODY)), "1", str(_ROUND_SECONDS), str(_ROUNDS))
    with java_program("Throughput", *arguments) as lines:
        return median(float(line.split()[0]) for line in lines)


def measure_loss(folder: Path, seconds: float) -> None:
    """Run rounds of some hundred messages and a SIGKILL. Then read all messages."""
    acknowledged: list[str] = []
    kills, deadline = 0, time.monotonic() + seconds
    while time.monotonic() < deadline:
        with (
            BrokerProcess(folder) as server,
            java_program("Flood", server.address, "flood", "16", f"round {kills}") as lines,
        ):
            acknowledged += islice(lines, 500 + 37 * (kills % 20))
            server.kill()
            acknowledged += lines
        kills += 1
    with BrokerProcess(folder) as server, JavaClient(server) as client:
        client.connect()
        found = {message.body.decode() for message in client.read("flood")}
    lost = {line.strip() for line in acknowledged} - found
    report("kills while Java clients sent", kills, "", "")
    report("acknowledged messages", len(acknowledged), "", "")
    report("  of these lost", len(lost), "", "0")


def main() -> None:
    if (reason := unavailable_reason()) is not None:
        raise SystemExit(f"not measured: {reason}")
    if len(sys.argv) > 1:
        with scratch_folder() as folder:
            measure_loss(folder, float(sys.argv[1]))
        return
    for mode in (FlushDiskType.ASYNC_FLUSH, FlushDiskType.SYNC_FLUSH):
        with scratch_folder() as folder:
            peer = rocketmq_rates(folder / "peer", mode)
            own = mqtemplate_rates(folder / "ours", mode)
        for threads, target in zip(_THREADS, (">= 0.8x", ">= 0.4x"), strict=True):
            what = f"{mode.value}, Java client, {threads} thread{'s' * (threads > 1)}"
            report(f"RocketMQ 5.5.0, {what}", peer[threads], "/s", "the peer")
            report(f"mqtemplate's server, {what}", own[threads], "/s", "")
            report("  of RocketMQ", own[threads] / peer[threads], "x", target)


if __name__ == "__main__":
    run(main)
