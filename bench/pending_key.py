"""One pending message by key: rates of sends, memory and look-ups with many keys, and races with the release.

    python -m bench.pending_key [--keys 200000] [--races 20000] [--kills 10] [--only rates|keys|races]

- Rates: `sync_send` of a delayed message without a pending key, with a fresh key, and with a key under which another
  message is pending, which it replaces. Each in a process of its own, in turns; medians. Processor time counts all
  threads, with indexing and the timing wheel, until nothing is left to do.
- Keys: so many messages pending, each with its own key. Memory, restart and look-up, beside the same messages without
  keys. A look-up is a send with ``on_pending="keep"``, which stores nothing, less what any send costs before it.
- Races: each message is due within moments when a second call replaces, postpones, keeps or refuses it, cancels or
  reschedules it together with a send, or sends under the condition that it is pending. Half of the races are threads of
  a process that owns a folder, half are processes with a server over the wire. The owner and the server are killed with
  SIGKILL and started again, one time in four with ``SYNC_FLUSH``. A model says which messages each outcome leaves. A
  call whose answer a kill has taken may have happened or not. No release may be early. A million races with a hundred
  kills (``--only races --races 1000000 --kills 100``) take less than half an hour on two cores.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from bench.hand_over_application import Journal
from bench.hand_over_kill import KilledProcess
from bench.measure import BODY, quiet, report, resident_mib, run, scratch_folder
from bench.peer.rocketmq import free_port
from mqtemplate.broker import Broker
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings, RemoteBroker, RemoteSettings
from mqtemplate.errors import MQTemplateError, PendingKeyError
from mqtemplate.message import Message, MessageExt, MessageQueue, Property
from mqtemplate.pending import PendingDecision, PendingQuery, PendingState, ScheduleChangeStatus
from mqtemplate.store.settings import FlushDiskType
from mqtemplate.template import RocketMQTemplate

_TOPIC = "reminders"
_ASYNC = EmbeddedSettings(flush_disk_type=FlushDiskType.ASYNC_FLUSH)
_SYNC = EmbeddedSettings(flush_disk_type=FlushDiskType.SYNC_FLUSH)
_DAY_MS = 86_400_000


def child(*arguments: str) -> dict[str, Any]:
    """Run a part in a process of its own, and return what it prints."""
    command = [sys.executable, "-m", "bench.pending_key", "--part", *arguments]
    return dict(json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout))


# --- rates ------------------------------------------------------------------------------------------

_ROUNDS = 3
_FLUSHES = ("async", "sync")
_SENDS = {"async": 5_000, "sync": 1_000}
_REPLACED_KEYS = 2_000
_FORMS = ("plain", "fresh", "replace")


def send_rate(flush: str, form: str) -> None:
    """In its own process: send, and print the rate of the thread and the processor time of a send."""
    count, chance = _SENDS[flush], random.Random(17)
    with scratch_folder() as folder, EmbeddedBroker(folder, _ASYNC if flush == "async" else _SYNC) as broker:
        send = RocketMQTemplate(broker).sync_send
        keys = [f"cart-{chance.randrange(_REPLACED_KEYS)}" for _ in range(count)]
        if form == "fresh":
            keys = [f"fresh-{number}" for number in range(count)]
        for number in range(_REPLACED_KEYS):
            broker.sends.send_batch([_keyed(f"cart-{number}", _DAY_MS)])
        broker.store.index.catch_up()
        cpu_s, start_s = time.process_time(), time.perf_counter()
        if form == "plain":
            for _ in keys:
                send(_TOPIC, BODY, delay="1h")
        else:
            for key in keys:
                send(_TOPIC, BODY, delay="1h", pending_key=key)
        seconds = time.perf_counter() - start_s
        broker.delayed.count_pending(PendingQuery(before_ms=0))  # reads what is not on the wheel yet
        broker.store.index.catch_up()
        cpu_us = (time.process_time() - cpu_s) / count * 1e6
        print(json.dumps({"rate": count / seconds, "cpu_us": cpu_us}), flush=True)


def measure_rates() -> None:
    for flush in _SENDS:
        found: dict[str, list[dict[str, float]]] = defaultdict(list)
        for _ in range(_ROUNDS):
            for form in _FORMS:
                found[form].append(child("rate", flush, form))
        medians = {
            form: {name: statistics.median(each[name] for each in parts) for name in ("rate", "cpu_us")}
            for form, parts in found.items()
        }
        report(f"{flush} flush: sends without a key", medians["plain"]["rate"], "/s", "")
        report("  processor time of a send", medians["plain"]["cpu_us"], "us", "")
        for form, name in (("fresh", "a fresh key"), ("replace", "a key that replaces")):
            ratio = medians[form]["rate"] / medians["plain"]["rate"]
            report(f"  rate with {name}, relative", ratio, "x", ">= 0.7x")
            report("    processor time of a send", medians[form]["cpu_us"], "us", "")
            cpu_ratio = medians["plain"]["cpu_us"] / medians[form]["cpu_us"]
            report("    sends in a second of processor time, relative", cpu_ratio, "x", "")


# --- many keys --------------------------------------------------------------------------------------

_BATCH = 1_000
_SMALL = 1_000
_LOOKS = 2_000


def _keyed(key: str | None, delay_ms: int, body: bytes = b"x" * 200) -> Message:
    properties = {Property.TIMER_DELAY_MS: str(delay_ms)}
    if key is not None:
        properties[Property.PENDING_KEY] = key
    return Message(_TOPIC, body, properties)


def fill(folder: Path, count: int, *, has_keys: bool) -> None:
    """In its own process: store messages, and print the growth of memory, the rate, and the time of look-ups."""
    with EmbeddedBroker(folder, _ASYNC) as broker:
        broker.sends.send(_keyed("first" if has_keys else None, _DAY_MS))
        time.sleep(1.5)
        before_mib, start_s = resident_mib(anonymous_only=True), time.perf_counter()
        for first in range(0, count, _BATCH):
            numbers = range(first, first + _BATCH)
            keys = [f"cart-{number}" if has_keys else None for number in numbers]
            broker.sends.send_batch(
                [_keyed(key, _DAY_MS + n * 7_919 % _DAY_MS) for n, key in zip(numbers, keys, strict=True)]
            )
        seconds = time.perf_counter() - start_s
        broker.delayed.count_pending(PendingQuery(before_ms=0))
        broker.store.index.catch_up()
        result = {"growth_mib": resident_mib(anonymous_only=True) - before_mib, "rate": count / seconds}
        if has_keys:
            result |= look_up(broker, count)
            result["looked_mib"] = resident_mib(anonymous_only=True) - before_mib
        print(json.dumps(result), flush=True)


def look_up(broker: EmbeddedBroker, count: int) -> dict[str, float]:
    """Return microseconds of this thread: to keep what is pending, and to find that nothing is."""
    chance, send = random.Random(17), RocketMQTemplate(broker).sync_send
    kept = [f"cart-{chance.randrange(count)}" for _ in range(_LOOKS)]
    start_s = time.thread_time()
    for key in kept:
        send(_TOPIC, "x", delay="1h", pending_key=key, on_pending="keep")
    kept_s = time.thread_time() - start_s
    start_s = time.thread_time()
    for number in range(_LOOKS):
        send(_TOPIC, "x", delay="1h", pending_key=f"new-{number}", on_pending="keep")
    return {"keep_us": kept_s / _LOOKS * 1e6, "new_us": (time.thread_time() - start_s) / _LOOKS * 1e6}


def restart(folder: Path) -> None:
    """In its own process: print the time from the start of a broker to the delivery of a new timer."""
    before_mib, start_s, cpu_s = resident_mib(anonymous_only=True), time.perf_counter(), time.process_time()
    with EmbeddedBroker(folder, _ASYNC) as broker:
        queue = broker.queues("probe")[0]
        broker.sends.send(Message("probe", b"x", {Property.TIMER_DELAY_MS: "1"}), queue)
        while broker.reader.max_offset(queue) == 0:
            time.sleep(0.001)
        seconds, cpu = time.perf_counter() - start_s, time.process_time() - cpu_s
        grown = resident_mib(anonymous_only=True) - before_mib
        print(json.dumps({"seconds": seconds, "cpu_s": cpu, "growth_mib": grown}), flush=True)


def measure_keys(count: int) -> None:
    with scratch_folder() as folder:
        small = child("fill", str(folder / "small"), str(_SMALL), "1")
        plain = child("fill", str(folder / "plain"), str(count), "0")
        keyed = child("fill", str(folder / "keyed"), str(count), "1")
        starts = {name: child("restart", str(folder / name)) for name in ("plain", "keyed")}
    report(f"{count:,} pending without keys: memory", plain["growth_mib"], "MiB", "")
    report(f"{count:,} pending, each with its key: memory", keyed["growth_mib"], "MiB", "")
    report("  more with keys", keyed["looked_mib"] - plain["growth_mib"], "MiB", "<= 64 MiB")
    report("  stored in batches, without keys", plain["rate"], "/s", "")
    report("  stored in batches, with keys", keyed["rate"], "/s", "")
    report("  restart to first delivery, without keys", starts["plain"]["seconds"], "s", "")
    report("  restart to first delivery, with keys", starts["keyed"]["seconds"], "s", "as before")
    report("    its processor time, without keys", starts["plain"]["cpu_s"], "s", "")
    report("    its processor time, with keys", starts["keyed"]["cpu_s"], "s", "as before")
    report("    its memory, with keys", starts["keyed"]["growth_mib"], "MiB", "")
    for name, text in (("keep_us", "a send that keeps the pending one"), ("new_us", "a send with a new key")):
        report(f"  {text}, {_SMALL:,} keys", small[name], "us", "")
        report(f"  {text}, {count:,} keys", keyed[name], "us", f"{small[name]:.0f} us")


# --- races: the racers ------------------------------------------------------------------------------

_THREADS = 4
_PROCESSES = 2
_RACES_OF_BATCH = 100
_QUEUES = 4
_FIRST_DUE_MS = 600
_MOST_AHEAD_MS = 10_000
_FIRST_GAP_MS = 10.0
_GAP = 1.2
_PAUSE_S = 1.0  # after an answer that a kill has taken
_SYNC_SHARE = 0.25  # of the runs between two kills
_SHIFT_MS = 2.0
_MOST_SHIFT_MS = 500.0
_LATER_MS = 60
_TIMEOUT_MS = 10_000
_LATE = "LATE"

MODEL: dict[str, dict[str, tuple[int, int]]] = {
    # action -> its outcome -> how often the old message and the new one are delivered
    "replace": {"REPLACED": (0, 1), _LATE: (1, 1)},
    "postpone": {"POSTPONED": (1, 0), _LATE: (1, 1)},
    "keep": {"KEPT": (1, 0), _LATE: (1, 1)},
    "refuse": {"REFUSED": (1, 0), _LATE: (1, 1)},
    "cancel": {"CANCELLED": (0, 1), _LATE: (1, 0)},
    "reschedule": {"RESCHEDULED": (1, 1), _LATE: (1, 0)},
    "send if pending": {"PENDING": (1, 1), _LATE: (1, 0)},
}
_MOVES = {"POSTPONED", "RESCHEDULED"}


def opened(name: str) -> Broker:
    """Return a broker by its name in the arguments: ``async:DIR``, ``sync:DIR``, or the address of a name server."""
    flush, _, folder = name.partition(":")
    if flush in _FLUSHES:
        return EmbeddedBroker(folder, _ASYNC if flush == "async" else _SYNC)
    return RemoteBroker(
        RemoteSettings(name_servers=(name,), request_timeout_ms=_TIMEOUT_MS, retry_times_when_send_failed=0)
    )


_ACTIONS = list(MODEL)


class Race(NamedTuple):
    """A message that is stored, and the action that races with its release."""

    name: str
    due_ms: int
    action: str
    handle: str


class Racer:
    """One thread's races. It writes each to the journal before it and after it."""

    def __init__(self, broker: Broker, journal: Journal, name: str) -> None:
        self._broker = broker
        self._journal = journal
        self._name = name
        self._chance = random.Random(name)
        self._shift_ms = 0.0
        self._gap_ms = _FIRST_GAP_MS
        self._ahead_ms = _FIRST_DUE_MS
        self._lag_ms = 0

    def race(self, count: int) -> None:
        """Store the messages of a batch while those before it wait for their races: a thread is never idle for long."""
        before: list[Race] = []
        for first in range(0, count, _RACES_OF_BATCH):
            names = [f"{self._name}-{n}" for n in range(first, min(first + _RACES_OF_BATCH, count))]
            races = self._store_batch(names, before[-1].due_ms if before else 0)
            self._run_batch(before)
            before = races
        self._run_batch(before)

    def _store_batch(self, names: list[str], after_ms: int) -> list[Race]:
        """Store messages that fall due one after the other, the first one after *after_ms*."""
        first_ms = max(self._broker.clock.now_ms() + self._ahead_ms, after_ms + self._lag_ms)
        due_ms = [first_ms + int(index * self._gap_ms) for index in range(len(names))]
        actions = [self._chance.choice(_ACTIONS) for _ in names]
        self._journal.write(names=names, due=due_ms, actions=actions)
        messages = [self._old(name, due) for name, due in zip(names, due_ms, strict=True)]
        try:
            given = (self._broker.sends.send_batch(messages, timeout_ms=_TIMEOUT_MS).handle or "").split(",")
        except MQTemplateError:  # the server was killed: each of them is stored or not
            time.sleep(_PAUSE_S)
            return []
        if len(given) < len(names):  # a message that is due when it arrives has no handle, and no race
            self._ahead_ms = min(2 * self._ahead_ms, _MOST_AHEAD_MS)
            return []
        return [Race(*each) for each in zip(names, due_ms, actions, given, strict=True)]

    def _run_batch(self, races: list[Race]) -> None:
        acting_s = 0.0
        for name, due, action, handle in races:
            left_s = (due + self._shift_ms) / 1_000 - time.time()
            if left_s > 0:
                time.sleep(left_s)
            start_s = time.perf_counter()
            self._act(name, action, handle)
            acting_s += time.perf_counter() - start_s
        if races:
            self._gap_ms = min(_GAP * acting_s * 1_000 / len(races), 100.0)
            self._lag_ms = max(0, self._broker.clock.now_ms() - races[-1].due_ms)

    def _old(self, name: str, due_ms: int) -> Message:
        properties = {
            Property.KEYS: name,
            Property.PENDING_KEY: name,
            Property.TIMER_DELIVER_MS: str(due_ms),
        }
        return Message(_TOPIC, b"old", properties)

    def _act(self, name: str, action: str, handle: str) -> None:
        due_ms = self._broker.clock.now_ms() + _LATER_MS
        self._journal.write(name=name, due=due_ms)
        try:
            outcome = self._outcome(name, action, handle, due_ms)
        except MQTemplateError as error:
            print(f"{action} {name}: {error!r:.300}", file=sys.stderr, flush=True)
            time.sleep(0.1)
            return
        step_ms = -_SHIFT_MS if outcome == _LATE else _SHIFT_MS
        self._shift_ms = max(-_MOST_SHIFT_MS, min(self._shift_ms + step_ms, _MOST_SHIFT_MS))
        self._journal.write(name=name, outcome=outcome)

    def _outcome(self, name: str, action: str, handle: str, due_ms: int) -> str:
        """Do the action, and return its outcome as the model names it."""
        delayed, new = self._broker.delayed, Message(_TOPIC, b"new", {Property.KEYS: name})
        if action == "send if pending":
            state = delayed.send_if([(new, None)], PendingState.PENDING, handle).state
            return _LATE if state is PendingState.DELIVERED else state.name
        if action in ("cancel", "reschedule"):
            is_cancel = action == "cancel"
            then = [(new, None)]
            change = delayed.cancel(handle, then=then) if is_cancel else delayed.reschedule(handle, due_ms, then=then)
            return _LATE if change.status is ScheduleChangeStatus.ALREADY_DELIVERED else change.status.name
        rule = {Property.PENDING_KEY: name, Property.ON_PENDING: action, Property.TIMER_DELIVER_MS: str(due_ms)}
        try:
            result = self._broker.sends.send(Message(_TOPIC, b"new", new.properties | rule), timeout_ms=_TIMEOUT_MS)
        except PendingKeyError:
            return "REFUSED"
        assert result.pending is not None
        is_late = result.pending.decision is PendingDecision.STORED and result.pending.already_delivered
        return _LATE if is_late else result.pending.decision.name


def race(name: str, journal: Path, racer: str, count: int) -> None:
    """In its own process: race in several threads."""
    with opened(name) as broker:
        print("started", flush=True)
        racers = [Racer(broker, Journal(journal), f"{racer}.{number}") for number in range(_THREADS)]
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(lambda each: each.race(count // _THREADS), racers))
    print("{}", flush=True)


# --- races: the kills and the model -----------------------------------------------------------------


@dataclass
class Faults:
    """Names of races with a fault.

    Attributes:
        other: Races whose outcome the model does not have.
    """

    lost: list[str] = field(default_factory=list)
    both: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    early: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    unanswered: int = 0
    kills: int = 0

    @property
    def count(self) -> int:
        """Number of faults."""
        return sum(map(len, (self.lost, self.both, self.twice, self.early, self.other)))


@dataclass
class RaceRecord:
    """One race, as the journal has it.

    Attributes:
        moved_ms: Due time of the action; None if it did not begin.
    """

    action: str
    due_ms: int
    moved_ms: int | None = None
    outcome: str | None = None

    def allowed(self) -> set[tuple[int, int]]:
        """Return the numbers of deliveries of both messages that the model allows."""
        model = MODEL[self.action]
        if self.outcome is not None:
            return {model[self.outcome]} if self.outcome in model else set()
        if self.moved_ms is not None:
            return {(1, 0), *model.values()}
        return {(0, 0), (1, 0)}  # the answer to the first send was lost, or the owner was killed before the action


def read_journal(path: Path) -> dict[str, RaceRecord]:
    found: dict[str, RaceRecord] = {}
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        if "names" in entry:
            rows = zip(entry["names"], entry["actions"], entry["due"], strict=True)
            found |= {name: RaceRecord(action, due) for name, action, due in rows}
        elif "due" in entry:
            found[entry["name"]].moved_ms = entry["due"]
        else:
            found[entry["name"]].outcome = entry["outcome"]
    return found


def compare(records: dict[str, RaceRecord], delivered: Sequence[MessageExt]) -> Faults:
    """Compare what was delivered with the model."""
    faults, times = Faults(), defaultdict[tuple[str, bytes], list[int]](list)
    for message in delivered:
        times[message.keys or "", message.body].append(message.store_timestamp)
    for name, record in records.items():
        old, new = times[name, b"old"], times[name, b"new"]
        counts, allowed = (len(old), len(new)), record.allowed()
        faults.outcomes[record.action, record.outcome or "no answer"] += 1
        faults.unanswered += record.outcome is None
        if not allowed:
            faults.other.append(name)
        elif max(counts) > 1:
            faults.twice.append(name)
        elif counts not in allowed:
            (faults.both if sum(counts) > min(map(sum, allowed)) else faults.lost).append(name)
        due_ms = record.moved_ms if record.outcome in _MOVES else record.due_ms
        if old and due_ms is not None and old[0] < due_ms:
            faults.early.append(name)
    return faults


def delivered_in(broker: Broker) -> Iterator[MessageExt]:
    """Wait until nothing is pending, and yield all messages of the topic."""
    while broker.delayed.count_pending(PendingQuery(topic=_TOPIC)).total:
        time.sleep(0.1)
    for queue in broker.queues(_TOPIC):
        yield from _messages(broker, queue)


def _messages(broker: Broker, queue: MessageQueue) -> Iterator[MessageExt]:
    at, end = 0, broker.reader.max_offset(queue)
    while at < end:
        result = broker.reader.pull(queue, at, 1_000)
        yield from result.messages
        at = result.next_begin_offset


def _racer(name: str, journal: Path, racer: str, count: int) -> KilledProcess:
    command = [sys.executable, "-m", "bench.pending_key", "--part", "race", name, str(journal), racer, str(count)]
    return KilledProcess(command, "started", journal.with_suffix(".log"))


def race_with_owner(folder: Path, count: int, kills: int, chance: random.Random) -> Faults:
    """Threads race in the process that owns the folder. It is killed and started again."""
    stores, journal = {flush: f"{flush}:{folder / 'store'}" for flush in _FLUSHES}, folder / "owner.journal"
    journal.touch()
    with opened(stores["async"]) as broker:
        broker.create_topic(_TOPIC, _QUEUES)
    for number in range(kills):
        racer = _racer(stores[_next_flush(chance)], journal, f"k{number}", 10 * count)
        racer.wait_until_ready()
        threading.Event().wait(chance.uniform(0.8, 0.8 + 2))
        racer.kill()
    left = max(_THREADS, count - len(read_journal(journal)))
    _end(_racer(stores["async"], journal, "last", left))
    with opened(stores["async"]) as broker:
        faults = compare(read_journal(journal), list(delivered_in(broker)))
    faults.kills = kills
    return faults


def _next_flush(chance: random.Random) -> str:
    return "sync" if chance.random() < _SYNC_SHARE else "async"


def _configure(folder: Path, flush: str) -> None:
    text = f"mqtemplate:\n  broker: {{flush-disk-type: {flush.upper()}_FLUSH}}\n"
    (folder / "application.yml").write_text(text)


def race_with_server(folder: Path, count: int, kills: int, chance: random.Random) -> Faults:
    """Processes race over the wire. The server is killed and started again."""
    names = f"127.0.0.1:{free_port()}"
    _configure(folder, "async")
    command = [sys.executable, "-m", "mqtemplate", "broker", "--config", str(folder), "--store", str(folder / "server")]
    listen = ("--listen", f"127.0.0.1:{free_port()}", "--name-server", names)
    journals = [folder / f"wire{number}.journal" for number in range(_PROCESSES)]
    with ExitStack() as stack:
        server = KilledProcess([*command, *listen], "listens on", folder / "server.log")
        stack.callback(server.kill)
        server.wait_until_ready()
        with opened(names) as broker:
            broker.create_topic(_TOPIC, _QUEUES)
        racers = []
        for number, journal in enumerate(journals):
            journal.touch()
            racers.append(_racer(names, journal, f"p{number}", count // _PROCESSES))
        for racer in racers:
            racer.wait_until_ready()
        done = 0
        while done < kills and any(racer.is_running for racer in racers):
            threading.Event().wait(chance.uniform(1, 4))
            server.kill()
            _configure(folder, _next_flush(chance))
            server.start()
            server.wait_until_ready()
            done += 1
        for racer in racers:
            _end(racer)
        records = {name: each for journal in journals for name, each in read_journal(journal).items()}
        with opened(names) as broker:
            faults = compare(records, list(delivered_in(broker)))
        faults.kills = done
        return faults


def _end(racer: KilledProcess) -> None:
    if racer.end(None) != 0:
        raise RuntimeError(f"a racer has failed: {racer.log_text[-2_000:]}")


def measure_races(count: int, kills: int, seed: int) -> int:
    """Race, print the results, and return the number of faults."""
    chance, faults = random.Random(seed), 0
    ways = {"threads of the folder's owner": race_with_owner, "processes over the wire": race_with_server}
    for way, races in ways.items():
        with scratch_folder() as folder:
            start_s = time.perf_counter()
            found = races(folder, count // 2, kills // 2, chance)
            seconds = time.perf_counter() - start_s
        report(f"races, {way}", found.outcomes.total(), "", "")
        report("  in one second, with the restarts", found.outcomes.total() / seconds, "/s", "")
        report("  kills", found.kills, "", "")
        report("  without an answer", found.unanswered, "", "")
        for action, model in MODEL.items():
            shares = ", ".join(f"{outcome} {found.outcomes[action, outcome]:,}" for outcome in model)
            print(f"    {action}: {shares}")
        for name in ("lost", "both", "twice", "early", "other"):
            report(f"  {name}", len(getattr(found, name)), "", "0")
            for race_name in getattr(found, name)[:5]:
                print(f"    {race_name}")
        faults += found.count
    return faults


# --- the parts --------------------------------------------------------------------------------------


def run_part(part: str, *arguments: str) -> None:
    """Run a part in its own process."""
    if part == "rate":
        send_rate(*arguments)
    elif part == "fill":
        fill(Path(arguments[0]), int(arguments[1]), has_keys=arguments[2] == "1")
    elif part == "restart":
        restart(Path(arguments[0]))
    else:
        race(arguments[0], Path(arguments[1]), arguments[2], int(arguments[3]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=200_000)
    parser.add_argument("--races", type=int, default=20_000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=20_261_129)
    parser.add_argument("--only", choices=("rates", "keys", "races"))
    arguments = parser.parse_args()
    if arguments.only in (None, "rates"):
        measure_rates()
    if arguments.only in (None, "keys"):
        measure_keys(arguments.keys)
    if arguments.only in (None, "races") and measure_races(arguments.races, arguments.kills, arguments.seed):
        sys.exit("there are races with another outcome than the model's")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--part"]:
        quiet()
        run_part(*sys.argv[2:])
    else:
        run(main)
