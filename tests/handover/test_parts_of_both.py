"""Transactions, requests, schedules, outbox, operators, and the life of both brokers during a hand-over."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from mqtemplate import ScheduledRun, Schedules, message_listener, scheduled, transaction_listener
from mqtemplate.broker import ConsumerSpec
from mqtemplate.broker.hand_over import HandOverError, HandOverPhase
from mqtemplate.brokers import EmbeddedBroker, RemoteBroker, RemoteSettings
from mqtemplate.clock import SystemClock, VirtualClock
from mqtemplate.errors import (
    BrokerClosedError,
    ConfigurationError,
    ListenerError,
    RemoteConnectError,
    SendError,
    StoreLockedError,
    UnknownNameError,
    UnsupportedError,
)
from mqtemplate.handover import HandOverBroker, HandOverOptions
from mqtemplate.handover.consuming import HandOverConsumer
from mqtemplate.message import Message, MessageExt, MessageQueue, Property
from mqtemplate.outbox import SQLAlchemyOutbox, outbox_tables
from mqtemplate.pending import PendingQuery
from mqtemplate.results import TransactionState
from mqtemplate.selectors.tags import TagSelector
from mqtemplate.testing import Harness
from tests.handover.brokers import MOVES, TwoBrokers, bodies
from tests.waiting import PATIENCE_S

SHOP = {"rocketmq.producer.group": "shop"}


def read(brokers: TwoBrokers, topic: str) -> dict[str, list[str]]:
    """Return the bodies of all messages of a topic by the name of their broker."""
    found: dict[str, list[str]] = {}
    for span in brokers.both.admin().queue_spans(topic):
        messages = brokers.both.reader.pull(span.queue, span.min_offset).messages
        found.setdefault(span.queue.broker_name, []).extend(bodies(messages))
    return found


def stored_at(broker: EmbeddedBroker) -> list[str]:
    """Return the bodies of the orders at one broker, in the order in which they came."""
    found = [message for queue in broker.queues("orders") for message in broker.reader.pull(queue, 0).messages]
    return bodies(sorted(found, key=lambda message: message.physical_offset))


# --- sends ----------------------------------------------------------------------------------------


def test_a_send_with_a_pending_key_is_refused(brokers: TwoBrokers) -> None:
    """What is pending under the key may be in either broker, or between them."""
    with brokers.application() as app:
        options = {"delay": "1m", "pending_key": "cart"}
        for send in (
            lambda: app.template.sync_send("orders", "one", **options),
            lambda: app.template.async_send("orders", "one", **options).result(),
            lambda: app.template.sync_send("orders", ["one", "two"], **options),
            lambda: app.template.send_one_way("orders", "one", **options),
        ):
            with pytest.raises(UnsupportedError) as caught:
                send()
            assert "pending_key='cart' of a message for 'orders', during a hand-over" in str(caught.value)
            assert "send it without the key, or after the hand-over is confirmed" in str(caught.value)

        assert app.template.count_pending().total == 0


def test_sends_go_to_the_new_broker_from_the_first_moment(brokers: TwoBrokers) -> None:
    brokers.send_old("orders", "old 1")
    with brokers.application() as app:
        app.template.sync_send("orders", "new 1")
        app.template.async_send("orders", "new 2").result()
        app.template.send_one_way("orders", "new 3")
        app.template.sync_send("orders", ["new 4", "new 5"])

        found = read(brokers, "orders")

    assert found["old:broker-a"] == ["old 1"]
    assert sorted(found["broker-a"]) == [f"new {number}" for number in range(1, 6)]


def test_topics_of_the_old_broker_are_created_with_their_number_of_queues(brokers: TwoBrokers) -> None:
    brokers.old.create_topic("orders", 7)
    brokers.new.start()
    brokers.new.create_topic("invoices", 3)
    brokers.old.create_topic("invoices", 5)

    with brokers.both:
        counts = {topic: len(brokers.both.queues(topic)) for topic in ("orders", "invoices")}

    assert counts["orders"] == 7
    assert counts["invoices"] == 5  # it gets the queues that it lacks


def test_a_topic_that_only_the_new_broker_has_is_not_created_in_the_old_one(brokers: TwoBrokers) -> None:
    @message_listener(topic="news", consumer_group="readers")
    def read_news(text: str) -> None: ...

    with brokers.application(read_news) as app:
        app.template.sync_send("news", "1")
        brokers.harness(app).run_until_idle()

        assert "news" not in brokers.old.topic_names()


# --- transactions ---------------------------------------------------------------------------------


class Transactions:
    """Transaction listener whose local transactions are open until a check."""

    checked: list[str]

    def __init__(self) -> None:
        self.checked = []

    def execute_local_transaction(self, message: Message, arg: object) -> TransactionState:
        return TransactionState.UNKNOWN

    def check_local_transaction(self, message: MessageExt) -> TransactionState:
        self.checked.append(f"{message.body.decode()} of {message.broker_name}")
        return TransactionState.COMMIT


def test_open_transactions_are_checked_by_the_broker_that_has_them(brokers: TwoBrokers) -> None:
    listener = transaction_listener()(Transactions)
    with brokers.before(listener, **SHOP) as app:
        app.template.send_in_transaction("orders", "old")
    app = brokers.application(listener, **SHOP)
    with app:
        app.template.send_in_transaction("orders", "new")
        brokers.harness(app).advance("1m")

        assert sorted(app.get(listener).checked) == ["new of broker-a", "old of old:broker-a"]
        assert read(brokers, "orders") == {"old:broker-a": ["old"], "broker-a": ["new"]}


def test_a_checker_is_registered_at_both_brokers_or_at_none(brokers: TwoBrokers) -> None:
    brokers.both.start()
    brokers.new.transactions.check_transactions("shop", lambda message: TransactionState.COMMIT)

    with pytest.raises(ListenerError, match="'shop'"):
        brokers.both.transactions.check_transactions("shop", lambda message: TransactionState.COMMIT)

    brokers.old.transactions.check_transactions("shop", lambda message: TransactionState.COMMIT).close()


# --- requests -------------------------------------------------------------------------------------


def test_a_reply_goes_to_the_broker_that_has_the_request(brokers: TwoBrokers) -> None:
    """A process without the setting has sent one of the requests, and still waits for its reply."""

    @message_listener(topic="prices", consumer_group="pricing", consume_from_where="CONSUME_FROM_FIRST_OFFSET")
    def price(article: str) -> str:
        return f"price of {article}"

    of_old = brokers.old.requests.request(Message("prices", b"an old request"), timeout_ms=60_000)
    app = brokers.application(price)
    with app:
        of_new = brokers.both.requests.request(Message("prices", b"a new request"), timeout_ms=60_000)
        brokers.harness(app).run_until_idle()

        assert of_old.result(0).body == b"price of an old request"
        assert of_new.result(0).body == b"price of a new request"


def test_a_request_whose_sender_is_gone_is_handled_and_its_reply_is_dropped(brokers: TwoBrokers) -> None:
    """As without a hand-over: nothing waits for the reply, so the error of the send says so."""
    brokers.old.requests.request(Message("prices", b"?"), timeout_ms=1_000)
    Harness(brokers.old).advance("2s")
    brokers.both.start()
    [span] = [each for each in brokers.both.admin().queue_spans("prices") if each.message_count]
    [request] = brokers.both.reader.pull(span.queue, 0).messages

    with pytest.raises(SendError):
        brokers.both.requests.reply(request, b"too late")


# --- schedules and outbox -------------------------------------------------------------------------


@pytest.mark.parametrize("options", [HandOverOptions(), MOVES], ids=["released by the old broker", "moved"])
def test_a_schedule_runs_each_time_once_over_both_brokers(options: HandOverOptions) -> None:
    """The run that waits in the old broker is run, and the next one is sent to the new broker."""
    brokers = TwoBrokers(options=options)
    runs: list[int] = []

    @scheduled(every="10s", name="tick")
    def tick(run: ScheduledRun) -> None:
        runs.append(int(run.scheduled_at.timestamp()))

    with brokers.before(tick) as app:
        Harness(app).advance("35s")
    assert len(runs) == 3
    app = brokers.application(tick)
    with app:
        brokers.harness(app).advance("1m")
        waiting = brokers.both.delayed.pending(PendingQuery(topic="mqtemplate-schedules")).messages

    assert [later - earlier for earlier, later in itertools.pairwise(runs)] == [10] * (len(runs) - 1)
    assert len(runs) == 9
    assert [message.broker for message in waiting] == ["broker-a"]
    brokers.close()


def test_the_pause_of_a_schedule_goes_on(brokers: TwoBrokers) -> None:
    runs: list[int] = []

    @scheduled(every="10s", name="tick")
    def tick() -> None:
        runs.append(1)

    with brokers.before(tick) as app:
        app.get(Schedules).pause("tick")
    app = brokers.application(tick)
    with app:
        brokers.harness(app).advance("1m")

    assert runs == []


def test_an_outbox_relays_to_the_new_broker_and_changes_messages_of_both(brokers: TwoBrokers, tmp_path: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path}/shop.db")
    metadata = sa.MetaData()
    outbox_tables(metadata)
    metadata.create_all(engine)
    brokers.delay_old("orders", "old", 3_600_000, key="o-1")
    app = brokers.application()
    with app:
        harness = brokers.harness(app)
        outbox = SQLAlchemyOutbox(engine, app.template)
        harness.add(outbox.relay)

        with Session(engine) as session, session.begin():
            outbox.send(session, "orders", "new", keys="o-2")
            outbox.cancel(session, key="o-1")
        harness.run_until_idle()

        assert read(brokers, "orders")["broker-a"] == ["new"]
        assert brokers.both.delayed.count_pending(PendingQuery(topic="orders")).total == 0
    engine.dispose()


def test_messages_with_pending_keys_wait_in_an_outbox_until_the_hand_over_has_ended(
    brokers: TwoBrokers, tmp_path: Path
) -> None:
    """The refusal is one for a time. The others go on, changes concern those that wait, and their order stays."""
    engine = sa.create_engine(f"sqlite:///{tmp_path}/shop.db")
    metadata = sa.MetaData()
    outbox_tables(metadata)
    metadata.create_all(engine)
    keyed = {"delay": "1h", "on_pending": "replace"}

    def waiting() -> list[str]:
        with engine.connect() as connection:
            return [text for (text,) in connection.execute(sa.text("SELECT error FROM mqtemplate_outbox ORDER BY id"))]

    with brokers.application() as app:
        harness = brokers.harness(app)
        outbox = SQLAlchemyOutbox(engine, app.template)
        outbox.on_start()
        with Session(engine) as session, session.begin():
            outbox.send(session, "orders", "first", pending_key="cart", **keyed)
            outbox.send(session, "orders", "cancelled", pending_key="other", keys="o-1", **keyed)
            outbox.send(session, "orders", "moved", pending_key="third", keys="o-2", **keyed)
            outbox.send(session, "orders", "without a key")
        harness.run_until_idle()
        assert read(brokers, "orders")["broker-a"] == ["without a key"]
        reasons = waiting()
        assert reasons[0].startswith("waits: pending_key='cart' of a message for 'orders', during a hand-over")
        assert reasons[1:] == ["waits: a message with a pending key waits before this one"] * 2

        with Session(engine) as session, session.begin():
            outbox.cancel(session, key="o-1")
            outbox.reschedule(session, key="o-2", delay="3h")
        harness.advance("1m")
        assert len(waiting()) == 2
        outbox.on_stop()

    with brokers._application(brokers.new) as app:
        outbox = SQLAlchemyOutbox(engine, app.template)
        outbox.on_start()
        with Session(engine) as session, session.begin():
            outbox.send(session, "orders", "newest", pending_key="cart", **keyed)
        harness = Harness(app)
        harness.advance("15s")
        assert waiting() == []
        assert app.template.count_pending().total == 2
        harness.advance("2h")
        assert stored_at(brokers.new) == ["without a key", "newest"]
        harness.advance("1h")
        assert stored_at(brokers.new) == ["without a key", "newest", "moved"]
        outbox.on_stop()
    engine.dispose()


# --- operators ------------------------------------------------------------------------------------


def test_operators_see_topics_and_groups_of_both_brokers(brokers: TwoBrokers) -> None:
    @message_listener(topic="orders", consumer_group="billing")
    def bill(text: str) -> None: ...

    brokers.old.create_topic("orders", 1)
    brokers.send_old("orders", "1", "2")
    brokers.old.create_topic("archive", 1)
    app = brokers.application(bill)
    with app:
        brokers.send_new("orders", "3")
        admin = brokers.both.admin()

        assert {"orders", "archive"} <= set(admin.topic_names())
        assert admin.topic("orders").message_count == 3
        assert admin.groups_of("orders") == ["billing"]
        lags = {each.queue.broker_name: each.lag for each in admin.progress("billing", "orders")}
        assert lags == {"old:broker-a": 2, "broker-a": 1}
        brokers.harness(app).run_until_idle()
        assert admin.group("billing").lag == 0


def test_operators_move_the_offsets_of_a_group_at_either_broker(brokers: TwoBrokers) -> None:
    brokers.old.create_topic("orders", 1)
    brokers.send_old("orders", "1", "2")
    brokers.both.start()
    brokers.send_new("orders", "3")
    old, new = MessageQueue("orders", "old:broker-a", 0), MessageQueue("orders", "broker-a", 0)

    brokers.both.admin().set_offsets("billing", {old: 1, new: 1})

    assert brokers.old.groups.committed_offset("billing", MessageQueue("orders", "broker-a", 0)) == 1
    assert brokers.both.groups.committed_offset("billing", old) == 1
    assert brokers.both.groups.committed_offset("billing", new) == 1


def test_an_unknown_name_is_unknown_at_both_brokers(brokers: TwoBrokers) -> None:
    brokers.old.create_topic("orders", 1)
    brokers.both.start()
    admin = brokers.both.admin()

    with pytest.raises(UnknownNameError, match="topic 'order' does not exist; did you mean 'orders'"):
        admin.queue_spans("order")
    with pytest.raises(UnknownNameError, match="group 'billing' does not exist"):
        admin.group("billing")
    with pytest.raises(UnknownNameError, match="topic 'order' does not exist"):
        admin.delete_topic("order")


def test_a_topic_and_a_group_are_deleted_at_both_brokers(brokers: TwoBrokers) -> None:
    brokers.old.create_topic("orders", 1)
    brokers.both.start()
    for groups in (brokers.old.groups, brokers.new.groups):
        groups.commit_offset("billing", MessageQueue("orders", "broker-a", 0), 0)

    brokers.both.admin().forget_group("billing")
    brokers.both.delete_topic("orders")

    assert "orders" not in brokers.both.topic_names()
    assert brokers.both.admin().group_names() == []


def test_messages_of_both_brokers_are_found_by_key_and_id(brokers: TwoBrokers) -> None:
    sent = brokers.old.sends.send(Message("orders", b"old", {Property.KEYS: "o-1"}))
    brokers.both.start()
    brokers.clock.set_ms(brokers.clock.now_ms() + 1)
    brokers.both.sends.send(Message("orders", b"new", {Property.KEYS: "o-1"}))
    reader = brokers.both.reader

    found = reader.messages_by_key("orders", "o-1")

    assert [(message.body, message.broker_name) for message in found] == [
        (b"new", "broker-a"),
        (b"old", "old:broker-a"),
    ]
    assert bodies(reader.messages_by_key("orders", sent.msg_id, unique=True)) == ["old"]
    assert len(reader.messages_by_key("orders", "o-1", 1)) == 1


# --- start, close and outage ----------------------------------------------------------------------


def test_a_folder_that_another_process_uses_is_refused_with_what_to_do(tmp_path: Path) -> None:
    clock = VirtualClock()
    options = HandOverOptions(origin="mqtemplate.hand-over.from: embedded:./data")
    with EmbeddedBroker(tmp_path, clock=clock):
        both = HandOverBroker(EmbeddedBroker(tmp_path, clock=clock), EmbeddedBroker(None, clock=clock), options)
        with pytest.raises(StoreLockedError) as refused:
            both.start()

    text = str(refused.value)
    assert "the old broker of the hand-over (mqtemplate.hand-over.from: embedded:./data) does not start" in text
    assert "is in use by" in text
    assert "stop that process, perhaps the application without the setting" in text
    assert "run a server over the folder (mqtemplate broker), and give its host:port to each of them" in text


def test_if_the_new_broker_does_not_start_the_old_one_is_closed(tmp_path: Path) -> None:
    clock = SystemClock()
    nobody = RemoteBroker(RemoteSettings(name_servers=("127.0.0.1:1",)), clock)
    both = HandOverBroker(EmbeddedBroker(tmp_path, clock=clock), nobody)

    with pytest.raises(RemoteConnectError):
        both.start()

    with EmbeddedBroker(tmp_path, clock=clock):  # its lock is free
        pass


def test_the_text_of_an_old_server_that_does_not_answer_says_what_to_do() -> None:
    nobody = RemoteBroker(RemoteSettings(name_servers=("127.0.0.1:1",)))
    both = HandOverBroker(
        nobody, EmbeddedBroker(None), HandOverOptions(origin="mqtemplate.hand-over.from: 127.0.0.1:1")
    )

    with pytest.raises(RemoteConnectError) as refused:
        both.start()

    assert "the old broker of the hand-over (mqtemplate.hand-over.from: 127.0.0.1:1) does not start" in str(
        refused.value
    )
    assert "start it, or remove mqtemplate.hand-over if that broker is empty" in str(refused.value)


def test_one_broker_cannot_be_the_old_and_the_new_one() -> None:
    clock = VirtualClock()
    with EmbeddedBroker(None, clock=clock) as broker:
        both = HandOverBroker(broker, broker, MOVES)
        with pytest.raises(ConfigurationError, match="the old and the new broker of the hand-over are one"):
            both.start()


def test_an_old_broker_that_moves_to_another_one_is_refused() -> None:
    brokers = TwoBrokers(options=MOVES)
    brokers.old.hand_over.begin("mq1:9876")

    with pytest.raises(HandOverError, match="a hand-over to mq1:9876 is RUNNING, so none to the new broker can start"):
        brokers.both.start()
    brokers.close()


def test_a_confirmed_hand_over_starts_and_says_that_the_setting_can_go(caplog: pytest.LogCaptureFixture) -> None:
    brokers = TwoBrokers(options=MOVES)
    brokers.old.hand_over.begin("the new broker")
    brokers.old.hand_over.change(HandOverPhase.CONFIRMED)

    with brokers.both:
        brokers.send_new("orders", "new 1")

    assert "remove mqtemplate.hand-over" in caplog.text
    brokers.close()


def test_a_receive_that_waits_for_both_leaves_no_thread(tmp_path: Path) -> None:
    """Also if it ends after its member has left the group."""
    old, new = EmbeddedBroker(tmp_path), EmbeddedBroker(None)
    with HandOverBroker(old, new) as both:
        for broker in (old, new):
            broker.create_topic("orders", 1)
        both.pop.join(ConsumerSpec(group="web", subscriptions={"orders": TagSelector("*")}))

        assert both.pop.receive("web", "orders", 1, 10_000, 1, None) == []

        assert [thread.name for thread in threading.enumerate() if thread.name == "mqtemplate-hand-over-web"] == []


def test_the_health_names_the_broker_that_is_out(brokers: TwoBrokers) -> None:
    with brokers.both:
        assert brokers.both.outage() is None
        assert brokers.both.unreachable() == {"old:broker-a": None, "broker-a": None}


def test_closed_brokers_say_so(brokers: TwoBrokers) -> None:
    brokers.both.start()
    brokers.both.close()
    brokers.both.close()

    with pytest.raises(BrokerClosedError):
        brokers.both.sends.send(Message("orders", b""))


def test_a_member_needs_no_old_broker_that_has_nothing_for_it(brokers: TwoBrokers) -> None:
    """So a listener of a new topic is as without a hand-over."""
    brokers.both.start()
    spec = ConsumerSpec(group="readers", subscriptions={"news": TagSelector("*")})

    member = brokers.both.groups.subscribe(spec)

    assert {queue.broker_name for queue in member.assignment()} == {"broker-a"}
    with pytest.raises(UnknownNameError):
        brokers.old.admin().queue_spans("%RETRY%readers")


def test_settings_of_a_broker_that_has_no_reservations_are_refused() -> None:
    """Such as a cluster of RocketMQ as the old broker."""

    class WithoutReservations(EmbeddedBroker):
        @property
        def hand_over(self):  # type: ignore[no-untyped-def]
            raise UnsupportedError("broker 'broker-a', a RemoteBroker, cannot reserve its pending messages")

    clock = VirtualClock()
    options = HandOverOptions(origin="mqtemplate.hand-over.from: mq1:9876", mover=MOVES.mover)
    both = HandOverBroker(WithoutReservations(None, clock=clock), EmbeddedBroker(None, clock=clock), options)

    with pytest.raises(UnsupportedError) as refused:
        both.start()

    assert str(refused.value).startswith("mqtemplate.hand-over.from: mq1:9876: broker 'broker-a'")
    assert "Let it deliver what it has, then change the address" in str(refused.value)


# --- topics that the new broker lacks -------------------------------------------------------------


def test_the_start_gives_the_new_broker_the_queues_and_the_rights_of_the_old_topics(brokers: TwoBrokers) -> None:
    """A topic that exists at the new broker keeps its rights: an administrator has set them there."""
    brokers.old.create_topic("archive", 6)
    brokers.old.admin().set_topic_rights("archive", is_readable=True, is_writable=False)
    brokers.old.create_topic("orders", 8)
    brokers.new.start()
    brokers.new.create_topic("orders", 2)
    brokers.new.admin().set_topic_rights("orders", is_readable=False, is_writable=True)

    brokers.both.start()

    found = brokers.new.admin().topic_settings()
    archive, orders = found["archive"], found["orders"]
    assert (archive.queue_count, archive.is_readable, archive.is_writable) == (6, True, False)
    assert (orders.queue_count, orders.is_readable, orders.is_writable) == (8, False, True)


def test_queues_are_not_added_if_another_number_is_allowed(brokers: TwoBrokers) -> None:
    brokers.with_options(allow_other_queue_count=True)
    brokers.old.create_topic("orders", 8)
    brokers.new.start()
    brokers.new.create_topic("orders", 2)

    brokers.both.start()

    assert len(brokers.new.queues("orders")) == 2


def test_a_group_whose_first_offset_the_new_broker_has_lost_skips_nothing_at_the_next_start() -> None:
    """A broker stores offsets some seconds late. A kill before that loses those of a group that has read nothing."""
    brokers = TwoBrokers(options=MOVES)
    brokers.send_old("orders", "old")
    brokers.old.groups.commit_offset("billing", brokers.old.queues("orders")[0], 0)
    brokers.new.start()
    brokers.fill_new("orders", 2)
    brokers.clock.move_ms(600_000)
    brokers.both.start()
    queue = brokers.new.queues("orders")[0]
    assert brokers.new.groups.committed_offset("billing", queue) == 2  # not what others have sent before

    brokers.new.admin().forget_group("billing")
    brokers.send_new("orders", "sent during the hand-over")
    brokers.clock.move_ms(600_000)
    brokers.reopen_both()
    brokers.both.start()

    assert brokers.new.groups.committed_offset("billing", queue) == 2
    brokers.close()


# --- wakes -----------------------------------------------------------------------------------------


def test_a_poll_that_does_not_wait_leaves_a_wake_to_the_next_that_waits() -> None:
    """A member of both brokers polls each of them without waiting first: it waited for 5 s after such a wake."""
    with ThreadPoolExecutor() as pool, EmbeddedBroker() as broker:
        broker.create_topic("orders", 1)
        member = broker.groups.subscribe(ConsumerSpec(group="billing", subscriptions={"orders": TagSelector()}))
        member.wake()

        assert member.poll(1) == []
        assert pool.submit(member.poll, 1, 3_600_000).result(PATIENCE_S) == []
        member.close()


def test_a_wake_of_the_member_at_the_old_broker_ends_the_wait_for_both() -> None:
    """It wakes its caller after a rebalance: the new queues were locked after up to 5 s."""
    order: Any = None  # no queue is locked
    with ThreadPoolExecutor() as pool, EmbeddedBroker() as old_broker, EmbeddedBroker() as new_broker:
        spec = ConsumerSpec(group="billing", subscriptions={"orders": TagSelector()})
        for broker in (old_broker, new_broker):
            broker.create_topic("orders", 1)
        old, new = old_broker.groups.subscribe(spec), new_broker.groups.subscribe(spec)
        member = HandOverConsumer(spec, old, new, order, is_virtual=False)

        for _ in range(2):
            polled = pool.submit(member.poll, 1, 3_600_000)
            old.wake()
            assert polled.result(PATIENCE_S) == []
        member.close()
