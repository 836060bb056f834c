"""One pending message by key, and changes together with sends, over the wire to our own server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mqtemplate import (
    OnPending,
    PendingDecision,
    PendingState,
    RocketMQTemplate,
    ScheduleChangeStatus,
    Send,
    TransactionState,
)
from mqtemplate.broker import Capability
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.errors import MessageError, PendingKeyError, UnsupportedError
from mqtemplate.message import Message, Property
from mqtemplate.pending import PendingQuery
from mqtemplate.remoting.protocol import ResponseCode
from mqtemplate.server import BrokerServerSettings, LocalCluster
from tests.brokers.remote.clients import ANYWHERE, client, server
from tests.brokers.remote.delayed.test_our_server import two_servers
from tests.server.serving import Serving
from tests.waiting import eventually


@pytest.fixture
def clients(tmp_path: Path) -> Iterator[tuple[RocketMQTemplate, RocketMQTemplate]]:
    """Two applications on one server."""
    with (
        server() as cluster,
        client(cluster.address, tmp_path / "a") as first,
        client(cluster.address, tmp_path / "b") as second,
    ):
        yield RocketMQTemplate(first), RocketMQTemplate(second)


def pending_ids(template: RocketMQTemplate, topic: str = "reminders") -> list[str]:
    return [each.msg_id for each in template.pending(topic).messages]


# --- sends --------------------------------------------------------------------------------------------


def test_a_message_of_one_application_replaces_that_of_another(
    clients: tuple[RocketMQTemplate, RocketMQTemplate],
) -> None:
    first, second = clients

    old = first.sync_send("reminders", "a", delay="1h", pending_key="cart 17")
    new = second.sync_send("reminders", "b", delay="2h", pending_key="cart 17")

    assert old.pending is not None
    assert old.pending.decision is PendingDecision.STORED
    assert new.pending is not None
    assert new.pending.decision is PendingDecision.REPLACED
    assert new.replaced == (old.handle,)
    [pending] = first.pending("reminders").messages
    assert (pending.msg_id, pending.pending_key, pending.handle) == (new.msg_id, "cart 17", new.handle)


@pytest.mark.parametrize("on_pending", [OnPending.KEEP, OnPending.POSTPONE])
def test_the_result_names_the_message_that_is_pending(
    clients: tuple[RocketMQTemplate, RocketMQTemplate], on_pending: OnPending
) -> None:
    first, second = clients
    old = first.sync_send("reminders", "a", delay="1h", pending_key="cart-17")

    result = second.sync_send("reminders", "b", delay="2h", pending_key="cart-17", on_pending=on_pending)

    assert result.msg_id == old.msg_id
    assert result.message_queue == old.message_queue
    assert pending_ids(first) == [old.msg_id]
    assert second.cancel(result.handle).status is ScheduleChangeStatus.CANCELLED


def test_a_refused_message_raises_what_the_embedded_broker_raises(
    clients: tuple[RocketMQTemplate, RocketMQTemplate],
) -> None:
    first, second = clients
    old = first.sync_send("reminders", "a", delay="1h", pending_key="cart-17")

    with pytest.raises(PendingKeyError, match="with pending_key 'cart-17' is pending for topic 'reminders'") as refused:
        second.sync_send("reminders", "b", delay="2h", pending_key="cart-17", on_pending="refuse")

    assert (refused.value.msg_id, refused.value.handle) == (old.msg_id, old.handle)
    assert pending_ids(first) == [old.msg_id]


def test_a_strict_send_is_taken_since_the_server_decides_in_one_step(
    clients: tuple[RocketMQTemplate, RocketMQTemplate],
) -> None:
    first, second = clients
    old = first.sync_send("reminders", "a", delay="1h", pending_key="cart-17", on_pending_strict=True)

    new = second.sync_send("reminders", "b", delay="1h", pending_key="cart-17", on_pending_strict=True)

    assert new.replaced == (old.handle,)


def test_each_message_of_a_batch_has_an_outcome(clients: tuple[RocketMQTemplate, RocketMQTemplate]) -> None:
    first, second = clients
    old = first.sync_send("reminders", "a", delay="1h", pending_key="cart-17")

    result = second.sync_send("reminders", ["b", "c"], delay="2h", pending_key="cart-17")

    assert result.pending is not None
    assert [each.decision for each in result.pending.each if each is not None] == [PendingDecision.REPLACED] * 2
    assert result.replaced[0] == old.handle
    assert pending_ids(first) == result.msg_id.split(",")[1:]


def test_each_verb_replaces_the_pending_message(clients: tuple[RocketMQTemplate, RocketMQTemplate]) -> None:
    first, second = clients
    first.sync_send("reminders", "a", delay="1h", pending_key="cart-17")

    result = second.async_send("reminders", "b", delay="1h", pending_key="cart-17").result()
    assert pending_ids(first) == [result.msg_id]
    first.send_one_way("reminders", "c", delay="1h", pending_key="cart-17")
    eventually(lambda: pending_ids(first) not in ([], [result.msg_id]), "the one-way message has replaced it")

    assert first.count_pending("reminders").total == 1


def test_the_commit_of_a_transaction_decides(clients: tuple[RocketMQTemplate, RocketMQTemplate]) -> None:
    """Before it, the old message is pending; after a rollback, too."""
    first, second = clients
    old = first.sync_send("reminders", "a", delay="1h", pending_key="cart-17")
    delay = {Property.TIMER_DELAY_MS: "7200000", Property.PENDING_KEY: "cart-17"}
    sends, transactions = second.broker.sends, second.broker.transactions

    for state in (TransactionState.ROLLBACK, TransactionState.COMMIT):
        half = sends.send_half(Message("reminders", b"b", dict(delay)), "carts")
        assert pending_ids(first) == [old.msg_id]
        transactions.end_transaction(half, state)

    eventually(lambda: pending_ids(first) == [half.send_result.msg_id], "the committed message has replaced it")


def test_the_commit_of_a_transaction_cancels_a_message(clients: tuple[RocketMQTemplate, RocketMQTemplate]) -> None:
    first, second = clients
    reminder = first.sync_send("reminders", "pay", delay="1h")
    sends, transactions = second.broker.sends, second.broker.transactions
    message = Message("mails", b"thanks", {Property.TIMER_DELAY_MS: "7200000", Property.CANCELS: str(reminder.handle)})

    for state in (TransactionState.ROLLBACK, TransactionState.COMMIT):
        half = sends.send_half(message, "shop")
        assert len(pending_ids(first)) == 1
        transactions.end_transaction(half, state)
    eventually(lambda: pending_ids(first, "mails") == [half.send_result.msg_id], "the commit has stored its message")
    assert pending_ids(first) == []
    late = sends.send_half(message, "shop")
    transactions.end_transaction(late, TransactionState.COMMIT)
    last = sends.send_half(Message("mails", b"next", {Property.TIMER_DELAY_MS: "7200000"}), "shop")
    transactions.end_transaction(last, TransactionState.COMMIT)
    eventually(lambda: last.send_result.msg_id in pending_ids(first, "mails"), "the last commit has ended")
    assert late.send_result.msg_id not in pending_ids(first, "mails")


def test_a_transaction_goes_to_the_server_whose_message_it_cancels(tmp_path: Path) -> None:
    with two_servers() as servers, client(servers[0].address, tmp_path) as broker:
        template = RocketMQTemplate(broker)
        sent = [template.sync_send("orders", "x", delay="1h", queue=queue) for queue in broker.queues("orders")]
        for each in sent:
            half = broker.sends.send_half(Message("orders", b"y", {Property.CANCELS: str(each.handle)}), "shop")
            assert half.send_result.message_queue.broker_name == each.message_queue.broker_name
        both = ",".join(str(each.handle) for each in sent)

        with pytest.raises(
            MessageError, match="cancels= names messages of .* and .*; one broker commits it and cancel"
        ):
            broker.sends.send_half(Message("orders", b"y", {Property.CANCELS: both}), "shop")


def test_a_namespace_has_keys_of_its_own(tmp_path: Path) -> None:
    with (
        server() as cluster,
        client(cluster.address, tmp_path, namespace="red") as red,
        client(cluster.address, tmp_path, namespace="blue") as blue,
    ):
        first, second = RocketMQTemplate(red), RocketMQTemplate(blue)
        old = first.sync_send("reminders", "a", delay="1h", pending_key="cart-17")
        other = second.sync_send("reminders", "b", delay="1h", pending_key="cart-17")

        with pytest.raises(PendingKeyError, match="topic 'reminders'"):
            first.sync_send("reminders", "c", delay="1h", pending_key="cart-17", on_pending="refuse")
        assert other.replaced == ()
        assert pending_ids(first) == [old.msg_id]


# --- changes together with sends -----------------------------------------------------------------------


def test_messages_are_stored_together_with_a_cancel(clients: tuple[RocketMQTemplate, RocketMQTemplate]) -> None:
    first, second = clients
    old = first.sync_send("reminders", "a", delay="1h", keys="4466")

    change = second.cancel(key="4466", then=[Send("mails:thanks", "b", delay="2h"), Send("audit", "c", keys="4466")])

    assert (change.status, change.count) == (ScheduleChangeStatus.CANCELLED, 1)
    assert [each.message_queue.topic for each in change.sent] == ["mails", "audit"]
    assert pending_ids(first, "mails") == [change.sent[0].msg_id]
    [stored] = first.broker.reader.messages_by_key("audit", "4466", 8)
    assert (stored.body, stored.msg_id) == (b"c", change.sent[1].msg_id)
    again = first.cancel(old.handle, then=[Send("mails:thanks", "d")])
    assert (again.count, again.sent) == (0, ())


def test_messages_are_stored_together_with_a_new_time(clients: tuple[RocketMQTemplate, RocketMQTemplate]) -> None:
    first, second = clients
    old = first.sync_send("reminders", "a", delay="1h")

    change = second.reschedule(old.handle, delay="3h", then=[Send("mails", "b", delay="2h")])

    assert (change.status, change.count, len(change.handles)) == (ScheduleChangeStatus.RESCHEDULED, 1, 1)
    assert pending_ids(first, "mails") == [change.sent[0].msg_id]


def test_a_condition_decides_about_a_send(clients: tuple[RocketMQTemplate, RocketMQTemplate]) -> None:
    first, second = clients
    old = first.sync_send("reminders", "a", delay="1h")

    holds = second.send_if(Send("mails", "b", delay="2h"), pending=old.handle)
    fails = second.send_if(Send("mails", "c", delay="2h"), delivered=old.handle)

    assert (holds.state, len(holds.sent)) == (PendingState.PENDING, 1)
    assert (fails.state, fails.sent) == (PendingState.PENDING, ())
    assert pending_ids(first, "mails") == [holds.sent[0].msg_id]


# --- several servers, and servers that do not do it ------------------------------------------------------


def test_the_key_chooses_the_server(tmp_path: Path) -> None:
    """So each application sends to the one that knows what is pending."""
    with two_servers() as servers, client(servers[0].address, tmp_path) as broker:
        template = RocketMQTemplate(broker)
        keys = [f"cart-{number}" for number in range(8)]
        names = {
            key: {
                template.sync_send("orders", key, delay="1h", pending_key=key).message_queue.broker_name
                for _ in range(3)
            }
            for key in keys
        }

        pending = template.pending("orders").messages
        assert sorted(each.pending_key or "" for each in pending) == keys
        assert all(len(each) == 1 for each in names.values())
        assert all(server.engine.delayed.count_pending(PendingQuery()).total for server in servers)


def test_a_batch_whose_keys_belong_to_two_servers_says_what_helps(tmp_path: Path) -> None:
    with two_servers() as servers, client(servers[0].address, tmp_path) as broker:
        delayed = [
            Message("orders", b"x", {Property.TIMER_DELAY_MS: "3600000", Property.PENDING_KEY: f"cart-{number}"})
            for number in range(8)
        ]

        with pytest.raises(MessageError, match="decide about its pending keys; send the messages one by one"):
            broker.sends.send_batch(delayed)


def test_a_cancel_by_key_stores_its_messages_once(tmp_path: Path) -> None:
    """Each server has a message with the key: the first one that cancels stores the others."""
    with two_servers() as servers, client(servers[0].address, tmp_path) as broker:
        template = RocketMQTemplate(broker)
        queues = broker.queues("orders")
        for queue in queues:
            template.sync_send("orders", "x", delay="1h", keys="4466", queue=queue)

        change = template.cancel(key="4466", then=[Send("orders", "paid", delay="2h")])

        assert (change.count, len(change.sent)) == (2, 1)
        assert pending_ids(template, "orders") == [change.sent[0].msg_id]


def test_a_server_that_lets_nobody_cancel_takes_no_pending_key(tmp_path: Path) -> None:
    engine = EmbeddedBroker(None, EmbeddedSettings(listen_host=ANYWHERE))
    settings = BrokerServerSettings(listen=ANYWHERE, recall_message_enable=False)
    with LocalCluster(engine, settings) as cluster, client(cluster.address, tmp_path) as broker:
        template = RocketMQTemplate(broker)

        assert Capability.PENDING_KEYS not in broker.capabilities
        with pytest.raises(
            UnsupportedError, match="a server of this library that is up to date and has recall-message-enable"
        ):
            template.sync_send("reminders", "a", delay="1h", pending_key="cart-17")


def test_such_a_server_refuses_the_properties_of_any_client() -> None:
    with Serving(BrokerServerSettings(recall_message_enable=False)) as serving:
        serving.engine.create_topic("reminders", 1)
        answer = serving.send("reminders", b"a", {Property.TIMER_DELAY_MS: "3600000", Property.PENDING_KEY: "cart-17"})

        assert answer is not None
        assert answer.code == ResponseCode.NO_PERMISSION
        assert "recall-message-enable" in (answer.remark or "")
        assert serving.engine.delayed.count_pending(PendingQuery()).total == 0


def test_a_queue_of_another_server_is_refused_for_a_message_of_then(
    clients: tuple[RocketMQTemplate, RocketMQTemplate],
) -> None:
    first, _ = clients
    old = first.sync_send("reminders", "a", delay="1h")
    elsewhere = replace(first.broker.queues("reminders")[0], broker_name="broker-z")

    with pytest.raises(MessageError, match="one server stores the change and the messages"):
        first.broker.delayed.cancel(old.handle, then=[(Message("reminders", b"b"), elsewhere)])
