"""Members come and go while messages flow: each message is handled, whoever has its queue at the moment."""

from __future__ import annotations

import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mqtemplate.broker import ConsumeFromWhere, ConsumerSpec
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings, RemoteBroker, RemoteSettings
from mqtemplate.message import HostAddress, Message
from mqtemplate.selectors.tags import TagSelector
from mqtemplate.server import BrokerServerSettings, LocalCluster

ANYWHERE = HostAddress("127.0.0.1", 0)
MESSAGES = 2_000
SPEC = ConsumerSpec(
    group="billing",
    subscriptions={"orders": TagSelector()},
    consume_from_where=ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET,
)


class Ledger:
    """What was handled, by all members together."""

    def __init__(self) -> None:
        self.handled: Counter[bytes] = Counter()
        self.is_whole = threading.Event()
        self._lock = threading.Lock()

    def add(self, bodies: list[bytes]) -> None:
        with self._lock:
            self.handled.update(bodies)
            if len(self.handled) == MESSAGES:
                self.is_whole.set()


def life(broker: RemoteBroker, ledger: Ledger, polls: int) -> None:
    """One member's: so many polls, each committed when its messages are handled, then it leaves."""
    member = broker.subscribe(SPEC)
    for _ in range(polls):
        if ledger.is_whole.is_set():
            break
        messages = member.poll(32, 50)
        ledger.add([message.body for message in messages])
        for queue in {message.message_queue for message in messages}:
            member.commit(queue, 1 + max(m.queue_offset for m in messages if m.message_queue == queue))
    member.close()


def lives(broker: RemoteBroker, ledger: Ledger, chance: random.Random) -> None:
    while not ledger.is_whole.is_set():
        life(broker, ledger, chance.randrange(1, 12))


def test_no_message_is_lost_while_members_come_and_go(tmp_path: Path) -> None:
    engine = EmbeddedBroker(None, EmbeddedSettings(listen_host=ANYWHERE))
    ledger = Ledger()
    with LocalCluster(engine, BrokerServerSettings(listen=ANYWHERE)) as cluster:
        settings = RemoteSettings(name_servers=(str(cluster.address),), offset_path=tmp_path)
        with RemoteBroker(settings) as one, RemoteBroker(settings) as other, ThreadPoolExecutor(5) as pool:
            one.create_topic("orders", 5)
            running = [
                pool.submit(lives, broker, ledger, random.Random(seed))
                for seed, broker in enumerate((one, one, other, other))
            ]
            for number in range(MESSAGES):
                one.send(Message("orders", b"%d" % number), timeout_ms=10_000)
            was_whole = ledger.is_whole.wait(60)
            ledger.is_whole.set()
            for each in running:
                each.result(60)

    missing = {b"%d" % number for number in range(MESSAGES)} - ledger.handled.keys()
    assert (was_whole, missing) == (True, set())
