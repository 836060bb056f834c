"""Fairness of delayed messages: 1,000 tenants on one topic with a rate, one with far more messages than the others.

    python -m bench.fairness [--messages 20000] [--tenants 1000] [--rate 500] [--runs 5] [--part releases|limits]

Each of the other tenants has two messages, due within the time that the large tenant needs for a hundredth of its own.
The same messages are released by ``max-rate`` alone, then by ``fair-by`` as well, on the virtual clock, so lateness
depends on the order only. Printed are the lateness of the other tenants (p50, p99, most), the time in the queue that
SQS measures for quiet tenants (``ApproximateAgeOfOldestMessageInQuietGroups``: the oldest message of a quiet tenant,
looked at once a second; most and mean), the processor time, and the memory. Each shape has a process of its own, so the
memory is that of one shape. Then four processes receive by POP from our server with ``max_rate_per_key``, some times:
printed is the rate of each key against its limit, the median of the runs and the worst, and how long the machine had no
core for this process: what a key cannot get meanwhile is lost. ``kill -USR1`` on a process prints what its threads do.
"""

from __future__ import annotations

import argparse
import faulthandler
import multiprocessing
import resource
import signal
import statistics
import time
from collections import defaultdict
from itertools import pairwise
from typing import Any, NamedTuple

from bench.measure import percentile, quiet, scratch_folder
from mqtemplate import MessageExt, MQApplication, message_listener
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import VirtualClock
from mqtemplate.delay.settings import TopicShape
from mqtemplate.message import Message, MessageQueue
from mqtemplate.store.settings import FlushDiskType
from mqtemplate.testing import Harness
from tests.server.process import BrokerProcess

BATCH = 500
MEMBERS = 4
KEYS = 5
KEY_RATE = 20
WARM_UP_S, MEASURE_S = 4.0, 15.0


def main() -> None:
    """Run the bench."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--messages", type=int, default=20_000, help="messages of the large tenant")
    parser.add_argument("--tenants", type=int, default=1_000)
    parser.add_argument("--rate", type=int, default=500)
    parser.add_argument("--runs", type=int, default=5, help="runs of the limit of a key")
    parser.add_argument("--part", choices=("releases", "limits"), help="only one of the two parts")
    options = parser.parse_args()
    start_process()
    if options.part != "limits":
        print_releases(options.messages, options.tenants, options.rate)
    if options.part != "releases":
        print_key_rates(options.runs)


def start_process() -> None:
    """Prepare a process of the bench: warnings only, and what its threads do on ``kill -USR1``."""
    quiet()
    faulthandler.register(signal.SIGUSR1)


# --- releases ------------------------------------------------------------------------------------


def print_releases(count: int, tenants: int, rate: int) -> None:
    """Release the messages by each shape, and print a row for each."""
    print(f"{tenants} tenants, one with {count} messages, {rate} released a second")
    print("shape                    p50 ms    p99 ms   most ms | quiet age: most ms   mean ms | CPU s   MB at most")
    for name, fair_by in (("max-rate", None), ("max-rate and fair-by", "tenant")):
        shape = TopicShape(max_rate=rate, fair_by=fair_by)
        with multiprocessing.get_context("spawn").Pool(1, start_process) as pool:
            print(f"{name:22}", pool.apply(releases, (count, tenants, shape)), flush=True)


def releases(count: int, tenants: int, shape: TopicShape) -> str:
    """Return a row of results for one shape."""
    clock = VirtualClock()
    settings = EmbeddedSettings(topic_shapes={"mails": shape}, flush_disk_type=FlushDiskType.ASYNC_FLUSH)
    span_ms = max(1_000, count * 10 // int(shape.max_rate or 1))
    late: list[int] = []
    ages: list[int] = []
    start_s = time.process_time()
    with scratch_folder() as folder, EmbeddedBroker(folder, settings, clock) as broker:
        harness = Harness(broker)
        start_ms = clock.now_ms() + 60_000
        send(broker, [("large", start_ms)] * count)
        due = [(f"quiet-{number}", start_ms + number * span_ms // tenants) for number in range(1, tenants)]
        send(broker, due * 2)
        waiting = sorted(time_ms for _, time_ms in due * 2)
        harness.advance("59s")
        queue, at = MessageQueue("mails", broker.name, 0), 0
        while len(late) < len(waiting):
            harness.advance("1s")
            while messages := broker.reader.pull(queue, at, 1_000).messages:
                at += len(messages)
                late += [lateness_ms(each) for each in messages if each.properties["tenant"] != "large"]
            # The other tenants leave about in the order of their due times: the oldest is the first that has not left.
            ages.append(max(0, clock.now_ms() - waiting[len(late)]) if len(late) < len(waiting) else 0)
    memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1_024
    row = [percentile(late, 0.5), percentile(late, 0.99), max(late)]
    return (
        "".join(f"{each:10.0f}" for each in row)
        + f" | {max(ages):17} {sum(ages) / len(ages):9.0f} | {time.process_time() - start_s:5.1f} {memory_mb:8.0f}"
    )


def send(broker: EmbeddedBroker, messages: list[tuple[str, int]]) -> None:
    """Send messages, given as tenant and due time, in batches to one queue."""
    broker.create_topic("mails", 1)
    for start in range(0, len(messages), BATCH):
        part = messages[start : start + BATCH]
        batch = [Message("mails", b"x" * 100, {"tenant": name, "TIMER_DELIVER_MS": str(ms)}) for name, ms in part]
        broker.sends.send_batch(batch)


def lateness_ms(message: MessageExt) -> int:
    """Return by how much a message was released after it was due."""
    return message.store_timestamp - (message.deliver_timestamp or 0)


# --- the limit of a key over processes -----------------------------------------------------------


class KeyRun(NamedTuple):
    """One run of the limit of a key.

    Attributes:
        rates: Messages a second of each key.
        pause_s: The longest time between two messages of a key.
        starved_s: The longest time by which this process woke up too late: the machine had no core for it.
    """

    rates: list[float]
    pause_s: float
    starved_s: float

    @property
    def over(self) -> float:
        """The part of its limit by which the fastest key was above it; negative if none was."""
        return max(self.rates) / KEY_RATE - 1

    @property
    def under(self) -> float:
        """The part of its limit by which the slowest key was below it."""
        return 1 - min(self.rates) / KEY_RATE


def print_key_rates(runs: int) -> None:
    """Measure the rate of each key some times, and print how far the keys were off their limit."""
    print(f"max_rate_per_key={KEY_RATE}/s by POP over {MEMBERS} processes, {KEYS} keys, {MEASURE_S:.0f} s a run")
    done = []
    for _ in range(runs):
        done.append(run := key_run())
        text = ", ".join(f"{each:.2f}" for each in run.rates)
        print(f"{text} a second; longest pause {run.pause_s:.2f} s, this process waited for a core", end=" ")
        print(f"{run.starved_s:.2f} s", flush=True)
    for name, found in (("above", [each.over for each in done]), ("below", [each.under for each in done])):
        print(f"{name} its limit: {statistics.median(found):.1%} in the median run, {max(found):.1%} in the worst")


def key_run() -> KeyRun:
    """Let four processes receive messages of a few keys, and return the rate of each key."""
    context = multiprocessing.get_context("spawn")
    with scratch_folder() as folder, BrokerProcess(folder) as broker:
        application = MQApplication(settings={"rocketmq.name-server": str(broker.name_server)}, environment={})
        with application as app:
            app.broker.create_topic("jobs", 4)
            for key in range(KEYS):
                for _ in range(int(KEY_RATE * (WARM_UP_S + MEASURE_S) * 3) // 50):
                    app.broker.sends.send_batch([Message("jobs", b"x", {"tenant": str(key)}) for _ in range(50)])
        results = context.Queue()
        begin, ready = context.Value("d", 0.0), context.Barrier(MEMBERS + 1)
        given = (str(broker.name_server), begin, ready, results)
        members = [context.Process(target=member, args=given, daemon=True) for _ in range(MEMBERS)]
        for each in members:
            each.start()
        ready.wait(120)
        begin.value = time.time() + WARM_UP_S
        starved_s = wait_until(begin.value + MEASURE_S)
        times: dict[str, list[float]] = {}
        for _ in members:
            for key, found in results.get(timeout=120).items():
                times.setdefault(key, []).extend(found)
        for each in members:
            each.join(120)
            assert each.exitcode == 0, f"a member did not end: {each.exitcode}; its threads: kill -USR1 {each.pid}"
    in_order = [sorted(times.get(str(key), [])) for key in range(KEYS)]
    spans = [[begin.value, *each, begin.value + MEASURE_S] for each in in_order]
    pause_s = max(after - before for each in spans for before, after in pairwise(each))
    return KeyRun([len(each) / MEASURE_S for each in in_order], pause_s, starved_s)


def wait_until(time_s: float) -> float:
    """Wait; return the longest time by which a sleep of 10 ms was too long."""
    longest = 0.0
    while (now_s := time.time()) < time_s:
        time.sleep(0.01)
        longest = max(longest, time.time() - now_s - 0.01)
    return longest


def member(name_server: str, begin: Any, ready: Any, results: Any) -> None:
    """Receive as one process of the group, and put the times of the messages of each key in the measured time."""
    start_process()
    times: dict[str, list[float]] = defaultdict(list)

    @message_listener(
        "jobs",
        "workers",
        request_mode="POP",
        fair_by="tenant",
        max_rate_per_key=f"{KEY_RATE}/s",
        consume_from_where="CONSUME_FROM_FIRST_OFFSET",
    )
    def work(message: MessageExt) -> None:
        now_s = time.time()
        if 0 < begin.value <= now_s < begin.value + MEASURE_S:
            times[message.properties["tenant"]].append(now_s)

    with MQApplication(work, settings={"rocketmq.name-server": name_server}, environment={}):
        ready.wait(120)
        time.sleep(WARM_UP_S + MEASURE_S + 1)
    results.put(dict(times))


if __name__ == "__main__":
    main()
