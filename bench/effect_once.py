"""SIGKILLs at random moments of a producer with an outbox and a consumer with an inbox: each effect happens once.

Two processes work on one database, SQLite or PostgreSQL, over our server on loopback. The producer stores orders, each
with its message in one transaction, and its relay sends them. The consumer stores an effect for each message, with the
message id in one transaction. In each round one of them, or both, is killed at a random moment (its start counts too)
and started again. At the end both work until nothing is left. Then each order must have exactly one effect.

    python -m bench.effect_once [ROUNDS] [SEED] [sqlite|postgresql]
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.orm import Session

from bench.measure import quiet, report, run, scratch_folder
from mqtemplate.brokers.remote.broker import RemoteBroker  # noqa: F401  # imported before the forks, so they start quickly
from mqtemplate.context import MQApplication, service
from mqtemplate.listener import message_listener
from mqtemplate.message import MessageExt
from mqtemplate.outbox.sqlalchemy import SQLAlchemyInbox, SQLAlchemyOutbox, outbox_tables
from mqtemplate.template import RocketMQTemplate
from tests.outbox.postgres import binaries, postgres_server
from tests.server.process import BrokerProcess

_LONGEST_LIFE_S = 0.5
_START_S = 60.0
_KILLED_AFTER_START = 0.8  # share of the rounds; in the others the start is hit, too
_DRAIN_S = 300.0

METADATA = sa.MetaData()
outbox_tables(METADATA)
_SERIAL = sa.BigInteger().with_variant(sa.Integer, "sqlite")
ORDERS = sa.Table("orders", METADATA, sa.Column("id", _SERIAL, primary_key=True), sa.Column("text", sa.Text))
EFFECTS = sa.Table("effects", METADATA, sa.Column("id", _SERIAL, primary_key=True), sa.Column("order_id", sa.Integer))
REPEATS = sa.Table("repeats", METADATA, sa.Column("id", _SERIAL, primary_key=True), sa.Column("order_id", sa.Integer))

_CHECKS = {
    "orders": "SELECT count(*) FROM orders",
    "lost effects": "SELECT count(*) FROM orders WHERE id NOT IN (SELECT order_id FROM effects)",
    "repeated effects": "SELECT count(*) - count(DISTINCT order_id) FROM effects",
    "effects without an order": "SELECT count(*) FROM effects WHERE order_id NOT IN (SELECT id FROM orders)",
    "messages left in the outbox": "SELECT count(*) FROM mqtemplate_outbox",
    "repeats that the inbox recognised": "SELECT count(*) FROM repeats",
}


def open_engine(url: str) -> sa.Engine:
    """Return an engine; on SQLite writers of the other process may wait for each other."""
    is_sqlite = url.startswith("sqlite")
    engine = sa.create_engine(url, connect_args={"timeout": 30} if is_sqlite else {})
    if is_sqlite:

        @sa.event.listens_for(engine, "connect")
        def use_wal(connection: object, _record: object) -> None:
            connection.execute("PRAGMA journal_mode=WAL")  # type: ignore[attr-defined]  # a connection of sqlite3

    return engine


def produce(url: str, name_server: str, ready: Connection, *, adds_orders: bool) -> None:
    """Store orders with their messages until the process is killed."""
    engine = open_engine(url)

    @service
    def outbox(template: RocketMQTemplate) -> SQLAlchemyOutbox:
        return SQLAlchemyOutbox(engine, template, lease="1s")  # a killed relay is followed soon by the next one

    with MQApplication(outbox, settings={"rocketmq.name-server": name_server}, environment={}) as app:
        box = app.get(SQLAlchemyOutbox)
        ready.send(None)
        while True:
            if adds_orders:
                with Session(engine) as session, session.begin():
                    inserted = session.execute(ORDERS.insert().values(text="tea"))
                    box.send(session, "orders", str(inserted.inserted_primary_key[0]), hash_key="one customer")  # type: ignore[attr-defined]
            time.sleep(0.004)


def consume(url: str, name_server: str, ready: Connection) -> None:
    """Store an effect for each message until the process is killed."""
    engine, inbox = open_engine(url), SQLAlchemyInbox()

    @message_listener(
        topic="orders",
        consumer_group="billing",
        consume_from_where="CONSUME_FROM_FIRST_OFFSET",
        retry=["1s"],
        max_reconsume_times=1_000,
    )
    def bill(order_id: int, message: MessageExt) -> None:
        with Session(engine) as session, session.begin():
            table = EFFECTS if inbox.is_new(session, message) else REPEATS
            session.execute(table.insert().values(order_id=order_id))

    settings = {
        "rocketmq.name-server": name_server,
        # Progress is stored each 5 s by default. A consumer that lives shorter would read the first messages forever.
        "mqtemplate.cluster.persist-consumer-offset-interval-ms": 200,
    }
    with MQApplication(bill, settings=settings, environment={}):
        ready.send(None)
        signal.pause()


class Pair:
    """Producer and consumer in forked processes. This process has no thread, so a fork is safe and quick."""

    def __init__(self, url: str, name_server: str) -> None:
        self._url, self._name_server = url, name_server
        self._fork = multiprocessing.get_context("fork")
        self.adds_orders = True
        self._processes: dict[str, BaseProcess] = {}
        self._ready: dict[str, Connection] = {}

    def start(self, name: str) -> None:
        """Start ``producer`` or ``consumer``."""
        target: Callable[..., None] = produce if name == "producer" else consume
        options = {"adds_orders": self.adds_orders} if name == "producer" else {}
        self._ready[name], ready = self._fork.Pipe(duplex=False)
        arguments = (target, self._url, self._name_server, ready)
        process = self._fork.Process(target=_silent, args=arguments, kwargs=options)
        process.start()
        ready.close()
        self._processes[name] = process

    def wait_until_ready(self) -> None:
        """Wait until both processes have finished their start."""
        for name, ready in self._ready.items():
            assert ready.poll(_START_S), f"the {name} did not start"

    def kill(self, name: str) -> None:
        """Kill a process, wherever it is."""
        process = self._processes.pop(name)
        process.kill()
        process.join()
        process.close()


def _silent(target: Callable[..., None], *arguments: object, **options: bool) -> None:
    """Run in a child whose warnings about broken connections and locks would hide the result."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    target(*arguments, **options)


@contextmanager
def database(kind: str, folder: Path) -> Iterator[str]:
    """Create an empty database with the tables, and yield its URL."""
    if kind == "sqlite":
        url = f"sqlite:///{folder.absolute()}/shop.db"
        _create_tables(url)
        yield url
        return
    with postgres_server() as url:
        _create_tables(url)
        yield url


def _create_tables(url: str) -> None:
    engine = open_engine(url)
    METADATA.create_all(engine)
    engine.dispose()


def kill_rounds(url: str, folder: Path, rounds: int, seed: int) -> dict[str, int]:
    """Kill and start processes for some rounds, let them finish, and return the counts of `_CHECKS`."""
    chance = random.Random(seed)
    with BrokerProcess(folder) as server:
        pair = Pair(url, str(server.name_server))
        pair.start("producer")
        pair.start("consumer")
        for done in range(rounds):
            if done and done % 100 == 0:
                print(f"{done} rounds are done", flush=True)
            if chance.random() < _KILLED_AFTER_START:
                pair.wait_until_ready()
            time.sleep(chance.uniform(0, _LONGEST_LIFE_S))
            for name in chance.choice([["producer"], ["consumer"], ["producer", "consumer"]]):
                pair.kill(name)
                pair.start(name)
        pair.kill("producer")
        pair.adds_orders = False
        pair.start("producer")
        counts = _drained(url)
        pair.kill("producer")
        pair.kill("consumer")
    return counts


def _drained(url: str) -> dict[str, int]:
    """Wait until nothing is missing, or nothing has changed for a while; return the counts."""
    deadline = time.monotonic() + _DRAIN_S
    while True:
        counts = _counts(url)
        if not (counts["lost effects"] or counts["messages left in the outbox"]) or time.monotonic() > deadline:
            time.sleep(2)  # a repeat that is still on its way must not have an effect either
            return _counts(url)
        time.sleep(0.5)


def _counts(url: str) -> dict[str, int]:
    engine = open_engine(url)
    with engine.connect() as connection:
        counts = {name: connection.execute(sa.text(query)).scalar_one() for name, query in _CHECKS.items()}
    engine.dispose()
    return counts


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    for kind in sys.argv[3:4] or ["sqlite", "postgresql"]:
        if kind == "postgresql" and binaries() is None:
            print("PostgreSQL is not installed (apt-get install postgresql): left out")
            continue
        begin = time.monotonic()
        with scratch_folder() as folder, database(kind, folder) as url:
            counts = kill_rounds(url, folder, rounds, seed)
        took = f"{time.monotonic() - begin:.0f} s"
        print(f"{kind}, seed {seed}: {rounds} rounds in {took}, {counts['orders']} orders with a message each")
        for name, count in counts.items():
            if name != "orders":
                report(f"  {name}", count, "", "above 0" if name.startswith("repeats") else "0")


if __name__ == "__main__":
    quiet()
    run(main)
