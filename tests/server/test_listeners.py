"""Listeners over the wire: retries, dead letters and changes of position on our server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue

from mqtemplate import EmbeddedBroker, EmbeddedSettings, MessageExt, MQApplication, message_listener
from mqtemplate.message import HostAddress, MessageQueue
from mqtemplate.server import BrokerServerSettings, LocalCluster
from tests.waiting import PATIENCE_S, eventually

ANYWHERE = HostAddress("127.0.0.1", 0)


@contextmanager
def running(*listeners: object) -> Iterator[MQApplication]:
    """Application of a server that has the topic ``orders`` with one queue."""
    engine = EmbeddedBroker(None, EmbeddedSettings(listen_host=ANYWHERE))
    with engine, LocalCluster(engine, BrokerServerSettings(listen=ANYWHERE)) as cluster:
        engine.create_topic("orders", 1)
        settings = {"rocketmq.name-server": str(cluster.address)}
        with MQApplication(*listeners, settings=settings, environment={}) as app:
            yield app


def test_a_retry_has_its_exact_delay_and_a_dead_letter_its_cause() -> None:
    tries: SimpleQueue[MessageExt] = SimpleQueue()
    dead: SimpleQueue[MessageExt] = SimpleQueue()

    @message_listener("orders", "billing", retry=["1200ms"], id="bill", consume_from_where="CONSUME_FROM_FIRST_OFFSET")
    def bill(message: MessageExt) -> None:
        tries.put(message)
        raise RuntimeError("card declined")

    @message_listener("%DLQ%billing", "support", consume_from_where="CONSUME_FROM_FIRST_OFFSET")
    def support(message: MessageExt) -> None:
        dead.put(message)

    with running(bill, support) as app:
        app.broker.create_topic("%DLQ%billing", 1)
        sent = app.template.sync_send("orders:paid", "bad")
        first, second = (tries.get(timeout=PATIENCE_S) for _ in range(2))
        letter = dead.get(timeout=PATIENCE_S)

    assert (first.reconsume_times, second.reconsume_times) == (0, 1)
    assert second.store_timestamp >= first.store_timestamp + 1_200
    assert (letter.body, letter.tags, letter.msg_id) == (b"bad", "paid", sent.msg_id)
    assert letter.user_properties["dead_letter_message"] == "card declined"
    assert letter.user_properties["dead_letter_attempts"] == "2"
    assert letter.user_properties["dead_letter_listener"] == "bill"


def test_a_position_can_be_changed_while_messages_are_prefetched() -> None:
    received: SimpleQueue[str] = SimpleQueue()

    @message_listener("orders", "billing", id="bill", consume_from_where="CONSUME_FROM_FIRST_OFFSET")
    def bill(message: str) -> None:
        received.put(message)

    with running(bill) as app:
        [container] = app.containers
        queue = MessageQueue("orders", app.broker.name, 0)
        for text in ("one", "two", "three"):
            app.template.sync_send("orders", text)
        assert {received.get(timeout=PATIENCE_S) for _ in range(3)} == {"one", "two", "three"}

        container.seek(queue, 2)
        assert received.get(timeout=PATIENCE_S) == "three"
        container.rewind("1h")
        assert {received.get(timeout=PATIENCE_S) for _ in range(3)} == {"one", "two", "three"}
        container.pause()
        app.template.sync_send("orders", "skipped")
        container.seek(queue, 4)
        container.resume()
        app.template.sync_send("orders", "last")

        assert received.get(timeout=PATIENCE_S) == "last"
        eventually(lambda: app.broker.groups.committed_offset("billing", queue) == 5, "all messages are committed")
