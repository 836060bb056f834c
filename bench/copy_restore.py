"""Kills of a process whose folder is deleted then, and restored from its copy: what is lost beside the reported lag.

A child process sends delayed messages, cancels and reschedules some, and prints each action that the broker
acknowledged, with the end of the log and the end of the copy that the lag reports. It is killed, its folder is deleted
and restored, and the next child continues there, with the same copy. After each restore:

- the log has at least what was reported as copied;
- each message that was acknowledged before the restored end is pending or in its topic, and in its topic once at most;
- no message is in its topic before its deliver time, and none that was cancelled before the restored end is there.

The same with a follower that keeps another folder current meanwhile, and takes over.

Then the rate of sends with and without a copy, and the rate of a restore beside that of ``cp``, which copies the same
store with its queues and its index, for bodies of 1 KiB and of 200 bytes. Neither finds its source in the memory of the
system. With the packages obstore and moto the rounds run a second time on an S3 server on loopback.

    python -m bench.copy_restore [ROUNDS] [MIB]
    python -m bench.copy_restore --restore-only MIB [BODY_BYTES]
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from statistics import median
from urllib.request import Request, urlopen

from bench.crash import TOPIC, settings
from bench.measure import quiet, report, run, scratch_folder
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import SystemClock, VirtualClock
from mqtemplate.copy import CopiedBroker
from mqtemplate.copy.backup import StoreSummary
from mqtemplate.copy.follower import Follower, FollowLoop
from mqtemplate.copy.restore import restore_store
from mqtemplate.engine.settings import CopyOptions
from mqtemplate.message import Message, MessageQueue, Property, create_unique_id
from mqtemplate.pending import PendingQuery, ScheduleChangeStatus
from mqtemplate.store.settings import FlushDiskType
from mqtemplate.template import RocketMQTemplate

_MODE = FlushDiskType.SYNC_FLUSH
_COUNT = 2_000
_BODIES = (1_024, 200)


def send_until_killed(folder: Path, place: CopyOptions, first: int) -> None:
    """Run the child process: send, cancel and reschedule, and print each action once it is acknowledged."""
    chance = random.Random(first)
    with CopiedBroker(folder, settings(_MODE), None, copy=place) as broker:
        template = RocketMQTemplate(broker)
        number = first
        while True:
            delay_ms = chance.randrange(1, 4_000)
            before_ms = broker.clock.now_ms()
            level = chance.choice((0, 0, 1, 2))
            due_ms = before_ms + (level * 1_000 if level else delay_ms)
            result = template.sync_send(
                TOPIC, str(number), delay_level=level, delay=None if level else f"{delay_ms}ms", keys=f"k{number}"
            )
            _print_action(broker, "sent", number, due_ms)
            if chance.random() < 0.2:
                _print_action(broker, "cancelling", number, 0)
                done = template.cancel(result.handle).status is ScheduleChangeStatus.CANCELLED
                _print_action(broker, "cancelled" if done else "kept", number, 0)
            number += 1


def _print_action(broker: CopiedBroker, action: str, number: int, due_ms: int) -> None:
    end = broker.store.end_offset  # before the lag: what other threads append meanwhile counts as not copied
    health = broker.copy_health()
    os.write(1, f"{action} {number} {due_ms} {end} {max(end - health.lag_bytes, 0)} {health.lag_ms}\n".encode())


@dataclass
class Expected:
    """The actions of all children that a restore must show."""

    due_ms: dict[int, int] = field(default_factory=dict)
    cancelled: set[int] = field(default_factory=set)
    undecided: set[int] = field(default_factory=set)


@dataclass
class Outcome:
    """Result of all rounds."""

    rounds: int = 0
    acknowledged: int = 0
    lost_within_lag: int = 0
    lag_ms: list[int] = field(default_factory=list)
    recovery_s: list[float] = field(default_factory=list)
    below_reported: int = 0
    lost: list[int] = field(default_factory=list)
    doubled: list[int] = field(default_factory=list)
    early: list[int] = field(default_factory=list)
    not_cancelled: list[int] = field(default_factory=list)


Recovery = Callable[[Path, CopyOptions], AbstractContextManager[Callable[[], StoreSummary]]]
"""Function (new folder, copy): runs while the old folder is in use, and yields what completes the new one."""


@contextmanager
def restoring(path: Path, place: CopyOptions) -> Iterator[Callable[[], StoreSummary]]:
    """Write the folder from the copy after the end of the old one."""
    yield lambda: restore_store(place.to or "", path, options=place.options, settings=settings(_MODE)).store


@contextmanager
def following(path: Path, place: CopyOptions) -> Iterator[Callable[[], StoreSummary]]:
    """Keep the folder current all the time, and promote it."""
    ended = threading.Event()
    with Follower(place.to, path, place.options, settings(_MODE)) as follower:
        loop = FollowLoop(follower, place.interval, lambda text: None)
        thread = threading.Thread(target=loop.run, args=(ended.wait,))
        thread.start()

        def promote() -> StoreSummary:
            ended.set()
            thread.join()
            return follower.promote().store

        try:
            yield promote
        finally:
            ended.set()


def kill_rounds(folder: Path, place: CopyOptions, rounds: int, recovery: Recovery) -> Outcome:
    """Kill, delete and recover, round by round."""
    chance = random.Random(1)
    outcome, expected, first = Outcome(), Expected(), 0
    for number in range(rounds):
        # A restore writes the same folder, as on a new machine in the place of the old one: another folder would go on
        # with the copy only when the killed owner has been silent for a minute. A follower has a folder of its own.
        is_same = recovery is restoring
        store, new = (folder / f"store-{0 if is_same else each}" for each in (number, number + 1))
        with recovery(new, place) as recover:
            lines = _lines_until_kill(store, place, first, chance.randrange(20, _COUNT))
            shutil.rmtree(store)
            started = time.perf_counter()
            end_offset = recover().end_offset
            outcome.recovery_s.append(time.perf_counter() - started)
        outcome.below_reported += end_offset < int(lines[-1][4])
        outcome.lag_ms.append(int(lines[-1][5]))
        first = 1 + max(int(line[1]) for line in lines)
        _note(outcome, expected, lines, end_offset)
        _check(outcome, expected, new)
        outcome.rounds += 1
    return outcome


def _lines_until_kill(store: Path, place: CopyOptions, first: int, count: int) -> list[list[str]]:
    options = [f"{name}={value}" for name, value in place.options.items()]
    with subprocess.Popen(
        [sys.executable, "-m", "bench.copy_restore", "--child", str(store), place.to or "", str(first), *options],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        text=True,
    ) as child:
        assert child.stdout is not None
        lines: list[list[str]] = []
        since_copied = 0
        for line in child.stdout:
            if line.endswith("\n"):
                lines.append(line.split())
                since_copied += int(lines[-1][4]) > 0  # the first copy is complete
            if since_copied == count:
                child.kill()
    return lines


def _note(outcome: Outcome, expected: Expected, lines: list[list[str]], restored_end: int) -> None:
    """Note the actions before the restored end. Later ones are lost, or may be there in part."""
    for action, number, due_ms, end, *_ in lines:
        outcome.acknowledged += action == "sent"
        if int(end) > restored_end:
            outcome.lost_within_lag += action == "sent"
            if action in ("cancelled", "cancelling"):
                expected.undecided.add(int(number))
        elif action == "sent":
            expected.due_ms[int(number)] = int(due_ms)
        elif action == "cancelling":
            expected.undecided.add(int(number))
        else:
            expected.undecided.discard(int(number))
            if action == "cancelled":
                expected.cancelled.add(int(number))


def _check(outcome: Outcome, expected: Expected, store: Path) -> None:
    """Compare the restored directory, opened while the clock stands still."""
    with EmbeddedBroker(store, settings(_MODE), VirtualClock(SystemClock().now_ms())) as broker:
        stored: list[tuple[int, int]] = []
        for queue in broker.queues(TOPIC):
            units = broker.store.consume_queue(TOPIC, queue.queue_id)
            for at in range(units.min_offset, units.max_offset):
                unit = units.unit(at)
                record = broker.store.read(unit.physical_offset, unit.size)
                stored.append((int(record.body), record.store_timestamp))
        pages = broker.delayed.pending(PendingQuery(topic=TOPIC), 1_000_000)
        pending = {int((each.keys or "k-1")[1:]) for each in pages.messages}
    times = Counter(number for number, _ in stored)
    found = times.keys() | pending
    outcome.lost += list(expected.due_ms.keys() - expected.cancelled - expected.undecided - found)
    outcome.doubled += [number for number, count in times.items() if count > 1] + list(times.keys() & pending)
    outcome.early += [number for number, stored_ms in stored if stored_ms < expected.due_ms.get(number, 0)]
    outcome.not_cancelled += list(expected.cancelled & found)


# --- rates --------------------------------------------------------------------------------------


def send_rates(folder: Path, rounds: int = 7, count: int = 2_000) -> tuple[list[float], list[float]]:
    """Measure sends without and with a copy, in turns. Return two figures of each: without, and with.

    They are sends per second, and processor time of the process for a send in us, with the threads of the copy.
    Messages are sent for longer than the interval of the copy, so that each round has some copies.
    """
    rates: dict[bool, list[float]] = {False: [], True: []}
    costs: dict[bool, list[float]] = {False: [], True: []}
    for number in range(rounds):
        for is_copied in (False, True):
            path = folder / f"{number}-{is_copied}"
            place = CopyOptions(to=f"file://{folder}/copy-{number}")
            broker = CopiedBroker(path, None, None, copy=place) if is_copied else EmbeddedBroker(path)
            with broker:
                template = RocketMQTemplate(broker)
                template.sync_send(TOPIC, "first")
                started, used, sent = time.perf_counter(), time.process_time(), 0
                while sent < count or time.perf_counter() - started < 3:
                    template.sync_send(TOPIC, {"order": sent, "amount": "12.50", "customer": "4466"})
                    sent += 1
                rates[is_copied].append(sent / (time.perf_counter() - started))
                costs[is_copied].append((time.process_time() - used) / sent * 1_000_000)
    return [median(rates[each]) for each in (False, True)], [median(costs[each]) for each in (False, True)]


@dataclass(frozen=True)
class RestoreTimes:
    """Wall time and processor time, in seconds, of a restore and of ``cp`` of the same store.

    Attributes:
        share: Size of the copy as a share of the log.
    """

    message_count: int
    restored: tuple[float, float]
    plain: tuple[float, float]
    share: float


def fill(folder: Path, mebibytes: int, body_bytes: int) -> None:
    """Write a store with a log of this size, and its copy."""
    place = CopyOptions(to=f"file://{folder}/copy", interval=100)
    fast = EmbeddedSettings(flush_disk_type=FlushDiskType.ASYNC_FLUSH)
    numbers = random.Random(1)
    # Far more bytes than zstd looks back, so that no body is compressed by an equal one.
    count = (32 << 20) // body_bytes
    texts = [" ".join(str(numbers.getrandbits(30)) for _ in range(body_bytes // 10)) for _ in range(count)]
    bodies = [text.encode() for text in texts]
    with CopiedBroker(folder / "store", fast, None, copy=place) as broker:
        broker.create_topic(TOPIC, 4)
        sent = 0
        while broker.store.end_offset < mebibytes << 20:
            messages = [
                Message(TOPIC, bodies[number % len(bodies)], _properties(number)) for number in range(sent, sent + 200)
            ]
            broker.sends.send_batch(messages, MessageQueue(TOPIC, broker.name, sent // 200 % 4))
            sent += 200
        while broker.copy_health().lag_bytes:
            time.sleep(0.1)


def _properties(number: int) -> dict[str, str]:
    return {
        Property.UNIQ_KEY: create_unique_id(),
        Property.KEYS: f"order-{number}",
        Property.TAGS: ("paid", "refunded", "late")[number % 3],
    }


def restore_times(folder: Path) -> RestoreTimes:
    """Measure a restore and ``cp`` of a store that `fill` has written."""
    log_bytes, copy_bytes = (_size(folder / name) for name in ("store/commitlog", "copy"))

    def copy_by_system() -> None:
        subprocess.run(["cp", "-r", str(folder / "store"), str(folder / "plain")], check=True)
        os.sync()

    found: list[StoreSummary] = []
    _forget(folder)
    plain = _seconds(copy_by_system)
    shutil.rmtree(folder / "plain")
    _forget(folder)
    restored = _seconds(lambda: found.append(restore_store(f"file://{folder}/copy", folder / "restored").store))
    shutil.rmtree(folder / "restored")
    return RestoreTimes(found[0].message_count, restored, plain, copy_bytes / log_bytes)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _forget(folder: Path) -> None:
    """Let the system write all files, and free the memory that holds their bytes."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _seconds(action: Callable[[], object]) -> tuple[float, float]:
    """Return the time of an action, and its processor time with that of child processes."""
    started, used = time.perf_counter(), sum(os.times()[:4])
    action()
    return time.perf_counter() - started, sum(os.times()[:4]) - used


# --- places -------------------------------------------------------------------------------------


@contextmanager
def _folder() -> Iterator[Path]:
    """Yield a folder by its whole path, as a URL has it."""
    with scratch_folder() as folder:
        yield folder.resolve()


@contextmanager
def s3_server() -> Iterator[Mapping[str, str] | None]:
    """Run an S3 server on loopback with a bucket, and yield the options for it; None without the packages."""
    try:
        import_module("obstore")
        server_kind = import_module("moto.server").ThreadedMotoServer
    except ImportError:
        yield None
        return
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # not a line for each request
    server = server_kind(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        address = "http://{}:{}".format(*server.get_host_and_port())
        urlopen(Request(f"{address}/bucket", method="PUT")).close()
        yield {
            "aws_endpoint": address,
            "aws_region": "us-east-1",
            "aws_access_key_id": "bench",
            "aws_secret_access_key": "bench",
        }
    finally:
        server.stop()


def _report(title: str, outcome: Outcome) -> None:
    print(
        f"{title}: {outcome.rounds} kills with the folder deleted, {outcome.acknowledged} messages acknowledged, "
        f"{outcome.lost_within_lag} of them within the lag"
    )
    report("  reported lag, median", median(outcome.lag_ms), "ms", "the interval is 200 ms")
    report("  recovery, median", median(outcome.recovery_s), "s", "")
    report("  less than reported as copied", outcome.below_reported, "", "0")
    report("  lost beyond the lag", len(outcome.lost), "", "0")
    report("  twice", len(outcome.doubled), "", "0")
    report("  early", len(outcome.early), "", "0")
    report("  cancelled, but there", len(outcome.not_cancelled), "", "0")


_RECOVERIES: dict[str, Recovery] = {"restore": restoring, "follower": following}


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    mebibytes = int(sys.argv[2]) if len(sys.argv) > 2 else 512
    for name, recovery in _RECOVERIES.items():
        with _folder() as folder:
            place = CopyOptions(to=f"file://{folder}/copy", interval=200)
            _report(f"folder, {name}", kill_rounds(folder, place, rounds, recovery))
    with s3_server() as options:
        if options is None:
            print("S3: left out, the packages obstore and moto are not installed")
        for name, recovery in () if options is None else _RECOVERIES.items():
            with _folder() as folder:
                place = CopyOptions(to=f"s3://bucket/{name}", interval=200, options=options or {})
                _report(f"S3 (moto on loopback), {name}", kill_rounds(folder, place, rounds, recovery))
    with _folder() as folder:
        (without, with_copy), (cost, cost_with_copy) = send_rates(folder)
    report("sync_send without a copy", without, "messages/s", "")
    report("sync_send with a copy each second", with_copy, "messages/s", f"at least {0.97 * without:,.0f}")
    report("  processor time of a send without a copy", cost, "us", "")
    report("  the same with a copy", cost_with_copy, "us", f"at most {1.03 * cost:,.0f}")
    for body_bytes in _BODIES:
        report_restore(mebibytes, body_bytes)


def report_restore(mebibytes: int, body_bytes: int) -> None:
    """Fill a store, and print the times of its restore."""
    with _folder() as folder:
        fill(folder, mebibytes, body_bytes)
        times = restore_times(folder)
    restored, plain = times.restored, times.plain
    print(f"restore of {mebibytes} MiB of log, {times.message_count} messages with bodies of {body_bytes} bytes")
    target = f"at least half of cp and sync: {mebibytes / plain[0] / 2:,.0f}"
    report("  rate", mebibytes / restored[0], "MiB/s", target)
    report("  its time, as a multiple of that of cp and sync", restored[0] / plain[0], "", "at most 2")
    report("  its processor time, as a multiple", restored[1] / plain[1], "", f"of {plain[1]:.2f} s")
    report("  size of the copy", 100 * times.share, "% of the log", "the bodies are random decimal numbers")


def restore_only() -> None:
    for body_bytes in [int(each) for each in sys.argv[3:4]] or _BODIES:
        report_restore(int(sys.argv[2]), body_bytes)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        quiet()
        pairs = dict(each.split("=", 1) for each in sys.argv[5:])
        send_until_killed(Path(sys.argv[2]), CopyOptions(to=sys.argv[3], interval=200, options=pairs), int(sys.argv[4]))
    elif sys.argv[1:2] == ["--restore-only"]:
        run(restore_only)
    else:
        run(main)
