"""RocketMQ's Java client sends to our server, and to RocketMQ 5.5.0's own: 1 KiB, synchronously, same flush mode.

python -m bench.rocketmq_server_send [seconds of killing]

With an argument it measures nothing, but kills our server again and again while Java clients send, for so many seconds,
and counts what they were told was stored and is not there.
"""

from __future__ import annotations

import sys
import time
from itertools import islice
from pathlib import Path
from statistics import median

from bench.measure import BODY, report, run, scratch_folder
from bench.peer.rocketmq import JavaClient, NameServer, RocketMQ, java_program, why_not
from mqtemplate.store import FlushDiskType
from tests.conformance.servers import OurServer

_ROUND_SECONDS = 4
_ROUNDS = 3
_THREADS = (1, 16)


def theirs(folder: Path, mode: FlushDiskType) -> dict[int, float]:
    """Messages a second by RocketMQ, for each number of threads."""
    with NameServer() as names, RocketMQ(folder, names, {"flushDiskType": mode.value}, for_speed=True):
        return {threads: _client(names.address, threads) for threads in _THREADS}


def ours(folder: Path, mode: FlushDiskType) -> dict[int, float]:
    """Messages a second by our server, in a process of its own."""
    with OurServer(folder, flush_disk_type=mode) as server:
        return {threads: _client(server.address, threads) for threads in _THREADS}


def _client(address: str, threads: int) -> float:
    arguments = (address, "orders", str(threads), str(len(BODY)), "1", str(_ROUND_SECONDS), str(_ROUNDS))
    with java_program("Throughput", *arguments) as lines:
        return median(float(line) for line in lines)


def kill_again_and_again(folder: Path, seconds: float) -> None:
    """Rounds of some hundred messages and a SIGKILL, then one look at all of them."""
    told: list[str] = []
    kills, deadline = 0, time.monotonic() + seconds
    while time.monotonic() < deadline:
        with (
            OurServer(folder) as server,
            java_program("Flood", server.address, "flood", "16", f"life {kills}") as lines,
        ):
            told += islice(lines, 500 + 37 * (kills % 20))
            server.kill()
            told += lines
        kills += 1
    with OurServer(folder) as server, JavaClient(server) as client:
        client.connect()
        found = {message.body.decode() for message in client.read("flood")}
    lost = {line.strip() for line in told} - found
    report("kills while Java clients sent", kills, "", "")
    report("messages they were told were stored", len(told), "", "")
    report("  of these lost", len(lost), "", "0")


def main() -> None:
    if (reason := why_not()) is not None:
        raise SystemExit(f"not measured: {reason}")
    if len(sys.argv) > 1:
        with scratch_folder() as folder:
            kill_again_and_again(folder, float(sys.argv[1]))
        return
    for mode in (FlushDiskType.ASYNC_FLUSH, FlushDiskType.SYNC_FLUSH):
        with scratch_folder() as folder:
            peer = theirs(folder / "peer", mode)
            own = ours(folder / "ours", mode)
        for threads, target in zip(_THREADS, (">= 0.8x", ">= 0.4x"), strict=True):
            what = f"{mode.value}, Java client, {threads} thread{'s' * (threads > 1)}"
            report(f"RocketMQ 5.5.0, {what}", peer[threads], "/s", "the peer")
            report(f"our server, {what}", own[threads], "/s", "")
            report("  of RocketMQ", own[threads] / peer[threads], "x", target)


if __name__ == "__main__":
    run(main)
