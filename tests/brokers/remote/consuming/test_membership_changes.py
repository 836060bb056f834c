"""Members join and leave while messages are sent: no message is lost."""

from __future__ import annotations

import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mqtemplate.brokers import RemoteBroker
from mqtemplate.brokers.remote.consuming.consumer import RemoteConsumer
from mqtemplate.message import Message
from tests.brokers.remote.clients import client, give_up_all, join, one_queue, send_numbers, server
from tests.waiting import PATIENCE_S

MESSAGES = 2_000


class HandledMessages:
    """Messages that all members have handled together."""

    def __init__(self) -> None:
        self.counts: Counter[bytes] = Counter()
        self.is_complete = threading.Event()
        self._lock = threading.Lock()

    def add(self, bodies: list[bytes]) -> None:
        with self._lock:
            self.counts.update(bodies)
            if len(self.counts) == MESSAGES:
                self.is_complete.set()


def join_and_leave(broker: RemoteBroker, handled: HandledMessages, polls: int) -> None:
    """Join, poll a number of times, commit after each poll, and leave."""
    member = join(broker, "orders")
    for _ in range(polls):
        if handled.is_complete.is_set():
            break
        messages = member.poll(32, 50)
        handled.add([message.body for message in messages])
        for queue in {message.message_queue for message in messages}:
            member.commit(queue, 1 + max(m.queue_offset for m in messages if m.message_queue == queue))
    member.close()


def rejoin_until_complete(broker: RemoteBroker, handled: HandledMessages, chance: random.Random) -> None:
    while not handled.is_complete.is_set():
        join_and_leave(broker, handled, chance.randrange(1, 12))


def test_no_message_is_lost_while_members_join_and_leave(tmp_path: Path) -> None:
    handled = HandledMessages()
    with (
        server() as cluster,
        client(cluster.address, tmp_path) as one,
        client(cluster.address, tmp_path) as other,
        ThreadPoolExecutor(5) as pool,
    ):
        one.create_topic("orders", 5)
        running = [
            pool.submit(rejoin_until_complete, broker, handled, random.Random(seed))
            for seed, broker in enumerate((one, one, other, other))
        ]
        for number in range(MESSAGES):
            one.sends.send(Message("orders", b"%d" % number), timeout_ms=10_000)
        was_complete = handled.is_complete.wait(PATIENCE_S)
        handled.is_complete.set()  # ends the members after a failure, too
        for each in running:
            each.result(60)

    missing = {b"%d" % number for number in range(MESSAGES)} - handled.counts.keys()
    assert (was_complete, missing) == (True, set())


def test_a_commit_of_a_queue_that_is_given_up_meanwhile_is_not_kept(
    our_client: RemoteBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the queue it would come back, and precede the commits of the member that had the queue in between."""
    queue = one_queue(our_client)
    send_numbers(our_client, 4)
    member = join(our_client, "orders")
    assert isinstance(member, RemoteConsumer)
    commit = member.offsets.commit

    def commit_late(*arguments: Any) -> None:
        give_up_all(member)
        commit(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(member.offsets, "commit", commit_late)
        member.commit(queue, 1)
    our_client.groups.commit_offset("billing", queue, 3)
    with member._assigning:
        member._assign({queue})

    assert member.position(queue) == 3
