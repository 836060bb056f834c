"""SIGKILLs of our server at random moments while gRPC clients send, receive, acknowledge and end transactions.

The server is ``mqtemplate broker --grpc`` with SYNC_FLUSH, on one store directory for all rounds. In each round it is
killed while threads of this process, and RocketMQ's own Python client in a process, work with it; in some rounds it is
killed while it starts, or stopped by SIGTERM. All answers that the clients received are in a ledger, see
`bench.grpc_ledger`, which checks each delivery by them. At the end all messages are drained, and the files are
compared with the ledger. It ends with 1 if there is a fault.

    python -m bench.grpc_kill [--rounds N] [--seed N] [--no-python-client]
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bench.grpc_clients import Client, DeadLetterReceiver, PythonClient, Receiver, Sender, TransactionSender, World
from bench.grpc_ledger import Kind, Ledger
from bench.killed_server import DELAYED, FIFO, NORMAL, PYTHON, PYTHON_SENT, SMALL, STOP_S, TRANSACTIONS
from bench.measure import percentile, report, run, scratch_folder
from bench.peer import python_client
from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.errors import DestinationError
from mqtemplate.message import MessageExt
from mqtemplate.testing import messages_in
from mqtemplate.topics import DLQ_TOPIC_PREFIX

_DRAIN_S = 120.0
_MOST_ANSWERS, _WORK_S = 150, 10.0
"""The server is killed after a random number of answers, or this time: clients connect slowly on a busy machine."""
_ACTIONS = ("send", "receive", "ack", "change", "forward", "end")
"""Actions after whose answer the server is killed at once, in half of the rounds."""
_LATE_MS = 1_000
_PYTHON_ROUNDS = 4
"""RocketMQ's Python client is started again after one in so many rounds."""


def kill_rounds(
    folder: Path,
    rounds: int,
    seed: int,
    *,
    with_push: bool = True,
    with_python_client: bool = False,
    on_round: Callable[[int, Ledger], None] = lambda done, ledger: None,
) -> Ledger:
    """Kill the server *rounds* times while clients work, then drain all messages, and return the ledger.

    Args:
        with_push: The consumer of transactions is a push consumer. What a kill takes from it comes a minute later.
    """
    world, chance = World(folder, seed), random.Random(seed)
    topics = [NORMAL, PYTHON] if with_python_client else [NORMAL]
    with contextlib.closing(world.server) as server:
        server.start()
        server.wait_until_ready()
        other = PythonClient(world, folder) if with_python_client else None
        if other is not None:
            other.start()
        with working_clients(world, topics, with_push=with_push):
            for done in range(rounds):
                _end_server(world, chance)
                server.wait_until_ready()
                if other is not None and done % _PYTHON_ROUNDS == 0:
                    other.restart()
                on_round(done + 1, world.ledger)
            if other is not None:
                other.restart()
            _drain(world, other)
        server.stop()
    _compare(folder / "store", world, other)
    return world.ledger


def _end_server(world: World, chance: random.Random) -> None:
    """Kill or stop the server after some work, and start it again; sometimes the start is killed too."""
    server, counts = world.server, world.ledger.counts
    _wait_for_work(world, chance.randrange(1, _MOST_ANSWERS))
    time.sleep(chance.uniform(0, 0.05))
    if chance.random() < 0.07:
        server.stop()
        counts["stops"] += 1
    elif chance.random() < 0.5:
        server.kill_after_answer(chance.choice(_ACTIONS))
        counts["kills"] += 1
    else:
        server.kill()
        counts["kills"] += 1
    server.start()
    if chance.random() < 0.08:
        time.sleep(chance.uniform(0, 0.8))
        server.kill()
        counts["kills during the start"] += 1
        server.start()


@contextlib.contextmanager
def working_clients(world: World, topics: Sequence[str], *, with_push: bool) -> Iterator[None]:
    """Run the clients, and wait for their ends."""
    receivers = [Receiver(world, topic, number) for topic in (NORMAL, FIFO) for number in range(2)]
    receivers += [Receiver(world, DELAYED, 0), Receiver(world, TRANSACTIONS, 0, is_renewed=with_push)]
    clients: list[Client] = [
        *(Sender(world, topics), TransactionSender(world), *receivers),
        DeadLetterReceiver(world, NORMAL),  # the only group whose messages run out of attempts
    ]
    for client in clients:
        client.start()
    try:
        yield
    finally:
        world.is_over = True
        for client in clients:
            client.join(STOP_S)
            if client.is_alive():
                world.ledger.fault(Kind.UNEXPECTED, f"{client.name} does not end")


def _wait_for_work(world: World, answers: int) -> None:
    """Wait until clients got some more answers, or for a while."""
    counts = world.ledger.counts
    wanted, end_s = counts.total() + answers, time.monotonic() + _WORK_S
    while counts.total() < wanted and time.monotonic() < end_s:
        time.sleep(0.002)


def _drain(world: World, other: PythonClient | None) -> None:
    """Send no more, and acknowledge all messages until none is missing."""
    world.is_sending = False
    world.is_draining = True
    if other is not None:
        other.drain()
    end_s = time.monotonic() + _DRAIN_S
    while world.ledger.open() and time.monotonic() < end_s:
        time.sleep(0.1)
    if other is not None:
        other.end()


def _compare(store: Path, world: World, other: PythonClient | None) -> None:
    """Compare the topics with the ledger, and look for errors in the log of the server."""
    with EmbeddedBroker(store, SMALL) as broker:
        for topic in (NORMAL, FIFO, DELAYED, TRANSACTIONS, PYTHON):
            world.ledger.compare(topic, [each.body.decode() for each in messages_in(broker, topic)])
            world.ledger.compare_dead_letters([each.body.decode() for each in _dead_letters(broker, topic)])
            deliveries = broker.engine.pop.deliveries(topic)
            for each in () if deliveries is None else deliveries.messages:
                if each.is_renewed:  # the clients have acknowledged all that they have
                    world.ledger.fault(Kind.RENEWED, str(each))
        stored = {each.body.decode() for each in messages_in(broker, PYTHON_SENT)}
        for body in () if other is None else other.sent:
            if body not in stored:
                world.ledger.fault(Kind.LOST, f"{body}: not in {PYTHON_SENT}")
    for entry in world.ledger.open():
        world.ledger.fault(Kind.LOST, f"{entry.body}: not delivered; {entry}")
    for line in world.server.errors():
        world.ledger.fault(Kind.UNEXPECTED, f"log of the server: {line[:500]}")


def _dead_letters(broker: EmbeddedBroker, group: str) -> list[MessageExt]:
    try:
        return messages_in(broker, DLQ_TOPIC_PREFIX + group)
    except DestinationError:  # there were none
        return []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-python-client", action="store_true")
    given = parser.parse_args()
    reason = "not wanted" if given.no_python_client else python_client.fetch_client()
    if reason:
        print(f"without RocketMQ's Python client: {reason}")

    def show(done: int, ledger: Ledger) -> None:
        if done % 10 == 0 or done == given.rounds:
            found = sum(map(len, ledger.faults().values()))
            print(f"{done} rounds, {ledger.counts['sent']} messages sent, {found} faults", flush=True)

    with scratch_folder() as folder:
        ledger = kill_rounds(folder, given.rounds, given.seed, with_python_client=not reason, on_round=show)
    print(", ".join(f"{count} {name}" for name, count in sorted(ledger.counts.items())))
    late_ms = ledger.late_ms or [0]
    report("further deliveries: lateness, median", percentile(late_ms, 0.5), "ms", "< 1,000")
    report("further deliveries: lateness, largest", max(late_ms), "ms", "< 1,000")
    if max(late_ms) >= _LATE_MS:
        print(f"  {ledger.latest}")
    faults = ledger.faults()
    for kind, found in faults.items():
        report(kind.value, len(found), "", "0")
        for text in found[:5]:
            print(f"  {text}")
    if any(faults.values()):
        sys.exit(1)


if __name__ == "__main__":
    run(main)
