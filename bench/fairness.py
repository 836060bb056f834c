"""Fairness of delayed messages: 1,000 tenants on one topic with a rate, one with far more messages than the others.

    python -m bench.fairness [--messages 20000] [--tenants 1000] [--rate 500]

Each of the other tenants has two messages, due within the time that the large tenant needs for a hundredth of its own.
The same messages are released by ``max-rate`` alone, then by ``fair-by`` as well, on the virtual clock, so lateness
depends on the order only. Printed are the lateness of the other tenants (p50, p99, most), the time in the queue that
SQS measures for quiet tenants (``ApproximateAgeOfOldestMessageInQuietGroups``: the oldest message of a quiet tenant,
looked at once a second; most and mean), the processor time, and the memory. Then four processes receive by POP from our
server with ``max_rate_per_key``: printed is the rate of each key against its limit.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from collections import Counter
from typing import Any

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
    options = parser.parse_args()
    quiet()
    print(f"{options.tenants} tenants, one with {options.messages} messages, {options.rate} released a second")
    print("shape                    p50 ms    p99 ms   most ms | quiet age: most ms   mean ms | CPU s   MB at most")
    for name, fair_by in (("max-rate", None), ("max-rate and fair-by", "tenant")):
        print(
            f"{name:22}",
            releases(options.messages, options.tenants, TopicShape(max_rate=options.rate, fair_by=fair_by)),
        )
    print_key_rates()


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


def print_key_rates() -> None:
    """Let four processes receive messages of a few keys, and print the rate of each key."""
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
        total: Counter[str] = Counter()
        for _ in members:
            total += results.get(timeout=120)
        for each in members:
            each.join()
    rates = [total[str(key)] / MEASURE_S for key in range(KEYS)]
    off = max(abs(each - KEY_RATE) for each in rates) / KEY_RATE
    text = ", ".join(f"{each:.2f}" for each in rates)
    print(f"max_rate_per_key={KEY_RATE}/s by POP over {MEMBERS} processes: {text} a second; at most {off:.1%} off")


def member(name_server: str, begin: Any, ready: Any, results: Any) -> None:
    """Receive as one process of the group, and put the number of messages of each key in the measured time."""
    quiet()
    counts: Counter[str] = Counter()

    @message_listener(
        "jobs",
        "workers",
        request_mode="POP",
        fair_by="tenant",
        max_rate_per_key=f"{KEY_RATE}/s",
        consume_from_where="CONSUME_FROM_FIRST_OFFSET",
    )
    def work(message: MessageExt) -> None:
        if 0 < begin.value <= time.time() < begin.value + MEASURE_S:
            counts[message.properties["tenant"]] += 1

    with MQApplication(work, settings={"rocketmq.name-server": name_server}, environment={}):
        ready.wait(120)
        time.sleep(WARM_UP_S + MEASURE_S + 1)
    results.put(counts)


if __name__ == "__main__":
    main()
