"""The core of a server, without a connection: what a server of any protocol calls, and what it gets back."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import VirtualClock
from mqtemplate.engine.checkers import TransactionCheck
from mqtemplate.engine.clients import GroupChanged
from mqtemplate.engine.delayed import NotRecallableError
from mqtemplate.errors import StoreError
from mqtemplate.message import Message, MessageExt, MessageQueue, SendSequence, parse_offset_msg_id
from mqtemplate.remoting.protocol import ResponseCode, Version
from mqtemplate.remoting.protocol.bodies.group import ConsumerData
from mqtemplate.remoting.protocol.messages import decode_messages, encode_batch, encode_properties_text
from mqtemplate.remoting.protocol.sequenced import encode_queue_batches, read_queue_batches
from mqtemplate.results import TransactionState
from mqtemplate.server import AclSettings, BrokerServerSettings
from mqtemplate.server.acl.access import AccessControl
from mqtemplate.server.acl.settings import Account, Right
from mqtemplate.server.core.producers import ClientTransactionEnd
from mqtemplate.server.core.sends import ClientSend, ClientSendBack
from mqtemplate.server.core.server_core import ServerCore
from mqtemplate.server.pulls.pull_checks import ClientPull
from mqtemplate.server.pulls.pull_hold import HeldPull
from mqtemplate.server.pulls.raw_reader import RawPull
from mqtemplate.server.requests.caller import Caller
from mqtemplate.server.requests.refusal import RefusedError, code_of_error
from mqtemplate.server.state.remote_clients import RemoteClients
from tests.server.core.callers import PlainChannel
from tests.server.serving import subscription

SHOP = Account(access_key="shop-owner", secret_key="a-secret-key", topic_perms={"orders": Right.PUB | Right.SUB})
READER = Account(access_key="billing-reader", secret_key="another-secret", group_perms={"billing": Right.SUB})


@pytest.fixture
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(None, None, VirtualClock()) as broker:
        yield broker


@pytest.fixture
def core(broker: EmbeddedBroker) -> ServerCore:
    return core_of(broker)


def core_of(
    broker: EmbeddedBroker,
    acl: AclSettings | None = None,
    pause: Callable[[], None] = lambda: None,
    **settings: Any,
) -> ServerCore:
    core = ServerCore(broker.engine, BrokerServerSettings(**settings), AccessControl(acl), pause)
    core.topics.create_system_topics()
    core.groups.load()
    return core


def a_send(topic: str = "orders", body: bytes = b"hello", caller: Caller | None = None, **fields: Any) -> ClientSend:
    properties = encode_properties_text(fields.pop("properties", {}))
    return ClientSend(caller or PlainChannel(1).caller(), topic, body, properties, **{"queue_id": 0, **fields})


def read(core: ServerCore, topic: str) -> list[MessageExt]:
    """Return the messages in queue 0, when they are durable."""
    core.raw.store.flush()
    found = core.raw.pull(core.checks.query(ClientPull("reader", topic, 0, 32), None), 0)
    return decode_messages(found.body, "broker-a")


# --- sends --------------------------------------------------------------------------------------------


def test_a_send_creates_its_topic_and_returns_the_position(core: ServerCore) -> None:
    send = a_send(properties={"UNIQ_KEY": "7F01"}, sys_flag=0x7FFFFFFF, born_timestamp=5)

    missing = core.sends.existing_topic(send)
    stored, queue_id = core.sends.store(send)
    again, _ = core.sends.store(send, core.sends.existing_topic(send))

    assert (missing, core.sends.existing_topic(send)) == (None, "orders")
    assert (queue_id, stored.queue_offset, stored.msg_id, again.queue_offset) == (0, 0, "7F01", 1)
    message = read(core, "orders")[0]
    assert (message.body, message.born_timestamp, str(message.born_host)) == (b"hello", 5, "192.0.2.7:4001")
    assert message.offset_msg_id == stored.offset_msg_id


def test_a_batch_is_stored_with_one_id_for_each_message(core: ServerCore) -> None:
    messages = [Message("orders", b"%d" % number, {"UNIQ_KEY": f"7F0{number}"}) for number in range(3)]
    send = a_send(body=encode_batch(messages), is_batch=True)

    stored, _ = core.sends.store(send)

    assert core.sends.checked_count(send, "orders") == 3
    assert stored.msg_id == "7F00,7F01,7F02"
    assert [message.body for message in read(core, "orders")] == [b"0", b"1", b"2"]


@pytest.mark.parametrize(
    ("times", "max_times", "version", "topic"),
    [
        (16, None, Version.V5_5_0, "%RETRY%billing"),
        (17, None, Version.V5_5_0, "%DLQ%billing"),
        (3, 2, Version.V5_5_0, "%DLQ%billing"),
        (3, 2, Version.V3_1_8_SNAPSHOT, "%RETRY%billing"),  # so old a client cannot choose the number
    ],
)
def test_a_retry_after_the_last_one_is_a_dead_letter(
    core: ServerCore, times: int, max_times: int | None, version: int, topic: str
) -> None:
    caller = PlainChannel(1).caller(version=version)
    send = a_send("%RETRY%billing", caller=caller, reconsume_times=times, max_reconsume_times=max_times)

    core.sends.store(send)

    assert core.sends.existing_topic(send) == topic
    assert [message.body for message in read(core, topic)] == [b"hello"]


def test_a_consumer_sends_a_message_back(core: ServerCore) -> None:
    """First to the retry topic, delayed; after the last retry to the dead letter topic."""
    stored, _ = core.sends.store(a_send())
    offset = parse_offset_msg_id(stored.offset_msg_id)[1]
    caller = PlainChannel(2).caller()

    retry = core.send_backs.check(ClientSendBack(caller, "billing", offset, {}))
    letter = core.send_backs.check(ClientSendBack(caller, "billing", offset, {"why": "late"}, delay_level=-1))
    assert retry is not None
    assert letter is not None
    core.send_backs.store(retry)
    core.send_backs.store(letter)

    assert (retry.topic, letter.topic) == ("%RETRY%billing", "%DLQ%billing")
    (dead,) = read(core, "%DLQ%billing")
    assert (dead.body, dead.properties["why"]) == (b"hello", "late")


def test_a_message_that_the_caller_may_not_read_cannot_be_sent_back(broker: EmbeddedBroker) -> None:
    """The text names the request as the protocol of the caller does; the code is for its version."""
    core = core_of(broker, AclSettings(accounts=(SHOP, READER)))
    stored, _ = core.sends.store(a_send(caller=PlainChannel(1, "shop-owner").caller()))
    offset = parse_offset_msg_id(stored.offset_msg_id)[1]

    for version, code in ((Version.V5_5_0, ResponseCode.NO_PERMISSION), (Version.V4_9_4, ResponseCode.SYSTEM_ERROR)):
        with pytest.raises(RefusedError) as refused:
            core.send_backs.check(
                ClientSendBack(PlainChannel(2, "billing-reader").caller(version=version), "billing", offset, {})
            )

        assert code_of_error(refused.value) == code
        assert str(refused.value) == (
            "access key 'billing-reader' has no right SUB on the topic of the message at physical offset "
            f"{offset} (SendMessage)"
        )


def test_a_sequenced_send_is_stored_once(core: ServerCore) -> None:
    message = Message("orders", b"row")
    batches = list(read_queue_batches(encode_queue_batches([(message, 0)], {"orders": "orders"})))
    sequence = SendSequence("query", 1, 0, 0)

    first, _, _ = core.sequenced_sends.store(PlainChannel(1).caller(), sequence, 5, batches)
    repeated, _, _ = core.sequenced_sends.store(PlainChannel(1).caller(), sequence, 5, batches)

    assert (first.stored, repeated.stored, repeated.repeated) == (1, 0, 1)
    assert [message.body for message in read(core, "orders")] == [b"row"]


# --- after a send -------------------------------------------------------------------------------------


def test_a_transaction_is_committed_by_its_producer(core: ServerCore) -> None:
    half, _ = core.sends.store(a_send(properties={"TRAN_MSG": "true", "PGROUP": "shop"}))
    physical_offset = parse_offset_msg_id(half.offset_msg_id)[1]
    before = read(core, "orders")
    end = ClientTransactionEnd(
        PlainChannel(1).caller(), "shop", half.queue_offset, physical_offset, TransactionState.COMMIT
    )

    ended, again = core.transaction_ends.end(end), core.transaction_ends.end(end)

    assert (before, [message.body for message in read(core, "orders")]) == ([], [b"hello"])
    assert ended is not None
    assert ended.topics == ("orders",)
    assert again is None


def test_the_end_of_a_transaction_of_another_group_is_refused(core: ServerCore) -> None:
    half, _ = core.sends.store(a_send(properties={"TRAN_MSG": "true", "PGROUP": "shop"}))
    physical_offset = parse_offset_msg_id(half.offset_msg_id)[1]

    with pytest.raises(RefusedError, match="thief") as refused:
        core.transaction_ends.end(
            ClientTransactionEnd(
                PlainChannel(1).caller(), "thief", half.queue_offset, physical_offset, TransactionState.COMMIT
            )
        )

    assert refused.value.code == ResponseCode.SYSTEM_ERROR


def test_a_delayed_message_is_recalled_by_its_handle(core: ServerCore) -> None:
    core.sends.store(a_send("invoices"))
    stored, _ = core.sends.store(a_send(properties={"UNIQ_KEY": "7F01", "DELAY": "3"}))
    assert stored.handle is not None
    core.raw.store.flush()

    with pytest.raises(
        NotRecallableError, match="the handle is for topic 'orders' of broker 'broker-a', not"
    ) as refused:
        core.recalls.recall("invoices", stored.handle)
    assert code_of_error(refused.value) == ResponseCode.ILLEGAL_OPERATION
    assert core.recalls.recall("orders", stored.handle) == "7F01"


def test_recalls_can_be_disabled(broker: EmbeddedBroker) -> None:
    with pytest.raises(RefusedError, match="recall is disabled; set recall-message-enable to true"):
        core_of(broker, recall_message_enable=False).recalls.recall("orders", "a handle")


# --- connected clients --------------------------------------------------------------------------------


def test_a_client_registers_and_is_told_of_the_next_member(broker: EmbeddedBroker, core: ServerCore) -> None:
    """`RemoteClients` notifies the members, over the channels of any protocol."""
    remote = RemoteClients(broker.engine, core.clients, core.groups, core.access, core.peer_log)
    core.clients.on_members_changed(remote.notify_members)
    first, second = PlainChannel(1), PlainChannel(2)
    consumer = ConsumerData(group_name="billing", subscription_data_set=[subscription("orders", "paid")])

    for channel in (first, second):
        registered = core.registration.register(channel, ["shop"], [consumer], without_sub=False)
        assert (registered.differences, registered.refusals) == ([], [])

    found = core.clients.subscription("billing", "orders")
    assert found is not None
    assert found.sub_string == "paid"
    assert core.clients.consumers["billing"].client_ids() == ["client@1", "client@2"]
    changed = GroupChanged("billing")
    assert (first.told, second.told) == ([changed, changed], [changed])
    assert core.topics.table.has("%RETRY%billing")


def test_a_refused_consumer_is_freed_without_the_garbage_collector(broker: EmbeddedBroker) -> None:
    """A client may send 10,000 subscriptions again and again. A collection of them would hold all threads."""

    class Watched(ConsumerData):
        """One with weak references."""

    core = core_of(broker, max_subscriptions_per_connection=1)
    consumer = Watched(group_name="billing", subscription_data_set=[subscription("orders"), subscription("returns")])
    freed = weakref.ref(consumer)

    [refusal] = core.registration.register(PlainChannel(1), (), [consumer], without_sub=False).refusals

    assert "subscriptions" in str(refusal)
    del consumer
    assert freed() is None


def test_a_client_with_many_groups_lets_other_threads_work_between_them(broker: EmbeddedBroker) -> None:
    """A heartbeat with 300 new groups was one piece of work, beside which the I/O thread answered few requests."""
    was_locked: list[bool] = []
    core = core_of(broker, pause=lambda: was_locked.append(any(lock.locked() for lock in locks)))
    tables = (core.groups.file, core.topics.table.file)
    locks = [core.clients._lock, *(lock for table in tables for lock in (table._lock, table._writing))]
    consumers = [ConsumerData(group_name=f"billing-{number}") for number in range(100)]

    core.registration.register(
        PlainChannel(1), [f"shop-{number}" for number in range(50)], consumers, without_sub=False
    )

    assert len(core.clients.consumers) == 100
    assert was_locked == [False] * (1 + 50 + 100)  # after the groups are created, and before each of them


def test_a_channel_that_closed_meanwhile_is_not_registered(core: ServerCore) -> None:
    closed = PlainChannel(1)
    closed.close("the client left")

    core.registration.register(closed, ["shop"], [ConsumerData(group_name="billing")], without_sub=False)

    assert core.clients.producers("shop") == []
    assert core.clients.consumers == {}


def test_a_producer_is_asked_for_its_transaction(broker: EmbeddedBroker, core: ServerCore) -> None:
    """The notice is a value; the channel of a protocol encodes it."""
    channel = PlainChannel(1)
    remote = RemoteClients(broker.engine, core.clients, core.groups, core.access, core.peer_log)
    core.registration.register(channel, ["shop"], [], without_sub=False)
    core.sends.store(a_send(properties={"TRAN_MSG": "true", "PGROUP": "shop"}))
    half = broker.engine.store.read_at(0)
    assert half is not None
    check = TransactionCheck("shop", "orders", 0, half)

    remote.send_check(check)

    assert channel.told == [check]


def test_a_client_id_belongs_to_the_account_that_used_it_first(broker: EmbeddedBroker) -> None:
    access = AccessControl(AclSettings(accounts=(SHOP, READER)))
    shop, reader = PlainChannel(1, "shop-owner").caller(), PlainChannel(2, "billing-reader").caller()

    access.bind_client(shop, "client@1")
    with pytest.raises(RefusedError, match="client ID 'client@1' is in use by another account; give this client"):
        access.bind_client(reader, "client@1")
    access.client_ids.forget(shop.connection.id)

    access.bind_client(reader, "client@1")


def test_a_connection_that_closed_while_its_client_was_bound_binds_no_client_id() -> None:
    """Settings of gRPC clients may wait for a file. No other account could use the ID until a restart."""
    access = AccessControl(AclSettings(accounts=(SHOP, READER)))
    leaving = PlainChannel(1, "shop-owner")
    leaving.close("the client left")

    access.bind_client(leaving.caller(), "client@1")

    access.bind_client(PlainChannel(2, "billing-reader").caller(), "client@1")


def test_a_closed_connection_holds_nothing(broker: EmbeddedBroker) -> None:
    """A server of any protocol says once that a connection is closed."""
    core = core_of(broker, AclSettings(accounts=(SHOP, READER)))
    channel, other = PlainChannel(1, "shop-owner"), PlainChannel(2, "billing-reader").caller()
    caller, queue = channel.caller(), MessageQueue("orders", "broker-a", 0)
    core.sends.store(a_send(caller=caller))
    core.access.bind_client(caller, "client@1")
    core.registration.register(channel, ["shop"], [], without_sub=False)
    core.queue_locks.lock(caller, "billing", "client@1", [queue])
    query = core.checks.query(ClientPull("billing", "orders", 0, 32), None)
    core.hold.hold(HeldPull(caller, lambda found: None, query, 1, 1, deadline_ms=0))

    core.forget(channel.id)

    assert (core.clients.producers("shop"), len(core.hold), len(core.limits.locks), len(core.limits.groups)) == (
        [],
        0,
        0,
        0,
    )
    core.access.bind_client(other, "client@1")


def test_a_queue_is_locked_for_one_client_while_its_connection_is_open(core: ServerCore) -> None:
    queue = MessageQueue("orders", "broker-a", 0)
    first, second, closed = PlainChannel(1), PlainChannel(2), PlainChannel(3)
    closed.close("the client left")

    assert core.queue_locks.lock(closed.caller(), "billing", "client@3", [queue]) == [queue]
    assert core.queue_locks.lock(first.caller(), "billing", "client@1", [queue]) == [queue]
    assert core.queue_locks.lock(second.caller(), "billing", "client@2", [queue]) == []
    core.lock_table.unlock("billing", "client@1", [queue])
    assert core.queue_locks.lock(second.caller(), "billing", "client@2", [queue]) == [queue]


# --- pulls --------------------------------------------------------------------------------------------


def test_a_held_pull_is_answered_when_a_message_is_selected(broker: EmbeddedBroker, core: ServerCore) -> None:
    core.sends.store(a_send())
    pull = ClientPull("billing", "orders", 0, 32, expression=("TAG", "paid"))
    caller, answers = PlainChannel(1).caller(), list[RawPull | StoreError]()
    core.checks.check(pull.topic, pull.queue_id, core.creations.group(caller, pull.group))
    selector = core.subscriptions.compile(*core.subscriptions.expression_of_pull(pull)).selector
    deadline_ms = broker.clock.steady_ms() + 60_000

    core.hold.hold(HeldPull(caller, answers.append, core.checks.query(pull, selector), 1, 1, deadline_ms))
    for tag in ("open", "paid"):
        stored, _ = core.sends.store(a_send(body=tag.encode(), properties={"TAGS": tag}))
        core.raw.store.confirm(stored.end, stored.topics)
        core.hold.step()

    (found,) = answers
    assert isinstance(found, RawPull)
    assert [message.body for message in decode_messages(found.body, "broker-a")] == [b"paid"]
    assert len(core.hold) == 0


def test_a_held_pull_of_a_closed_connection_is_dropped(core: ServerCore) -> None:
    core.sends.store(a_send())
    channel, answers = PlainChannel(1), list[RawPull | StoreError]()
    query = core.checks.query(ClientPull("billing", "orders", 0, 32), None)

    core.hold.hold(HeldPull(channel.caller(), answers.append, query, 1, 1, deadline_ms=0))
    core.hold.forget(channel.id)
    core.hold.step()

    assert (answers, len(core.hold)) == ([], 0)
