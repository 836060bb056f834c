"""The embedded broker, beyond the contract of the `Broker` interface."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mqtemplate.broker import Capability, Consumer, ConsumerSpec, MessageModel
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import SystemClock, VirtualClock
from mqtemplate.errors import (
    BrokerClosedError,
    CorruptRecordError,
    DelayError,
    DestinationError,
    ListenerError,
    MessageError,
    StoreFormatError,
    StoreFullError,
)
from mqtemplate.message import Message, MessageExt, MessageQueue
from mqtemplate.results import SendStatus
from mqtemplate.selectors.sql92 import Sql92Selector
from mqtemplate.selectors.tags import Selector, TagSelector
from mqtemplate.store.files.disk import Disk
from mqtemplate.store.files.folder_store_files import FolderStoreFiles
from mqtemplate.store.settings import FlushDiskType
from mqtemplate.testing import Harness
from tests.waiting import PATIENCE_S, eventually

ALL = TagSelector()
SMALL = EmbeddedSettings(mapped_file_size_commit_log=1 << 20, mapped_file_size_consume_queue=2_000)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(tmp_path, SMALL, VirtualClock()) as broker:
        yield broker


def pull_all(broker: EmbeddedBroker, topic: str) -> list[MessageExt]:
    found = []
    for queue in broker.queues(topic):
        found += broker.reader.pull(queue, broker.reader.min_offset(queue), 1_000).messages
    return found


def join(broker: EmbeddedBroker, selector: Selector = ALL, **spec: Any) -> Consumer:
    return broker.groups.subscribe(ConsumerSpec(**{"group": "g", "subscriptions": {"orders": selector}, **spec}))


def read_one(broker: EmbeddedBroker, **spec: Any) -> MessageQueue:
    """Send a message, join, and commit after the message; return its queue."""
    broker.sends.send(Message("orders", b"x"))
    member = join(broker, **spec)
    (message,) = member.poll(10)
    member.commit(message.message_queue, 1)
    return message.message_queue


@pytest.mark.feature("B14")
def test_a_send_result_identifies_the_message(broker: EmbeddedBroker) -> None:
    """By status, ids, queue and queue offset; the offset message id is address and physical offset in hex."""
    result = broker.sends.send(Message("orders", b"x"))

    (message,) = pull_all(broker, "orders")
    assert result.send_status is SendStatus.SEND_OK
    assert result.msg_id == message.msg_id
    assert result.offset_msg_id == message.offset_msg_id == "7F00000100002A9F" + "0" * 16
    assert (result.message_queue, result.queue_offset) == (message.message_queue, 0)


def test_messages_go_to_the_queues_in_turn(broker: EmbeddedBroker) -> None:
    used = [broker.sends.send(Message("orders", b"x")).message_queue.queue_id for _ in range(8)]

    assert used == [0, 1, 2, 3] * 2


def test_a_send_keeps_the_message_id_and_does_not_change_the_message(broker: EmbeddedBroker) -> None:
    message = Message("orders", b"x", {"UNIQ_KEY": "mine", "TAGS": "a", "colour": "red"})

    result = broker.sends.send(message)

    assert result.msg_id == "mine"
    assert message.properties == {"UNIQ_KEY": "mine", "TAGS": "a", "colour": "red"}
    assert pull_all(broker, "orders")[0].properties == message.properties


@pytest.mark.feature("G8", "G9")
def test_a_send_to_a_system_topic_is_refused(broker: EmbeddedBroker) -> None:
    """Only the broker stores messages in the topics of the delay services."""
    for topic in ("SCHEDULE_TOPIC_XXXX", "rmq_sys_wheel_timer"):
        with pytest.raises(DestinationError, match=r"belongs to the broker; send to the topic the message is for"):
            broker.sends.send(Message(topic, b"x"))


@pytest.mark.feature("G9", "D28")
def test_broker_properties_of_a_producer_are_removed(broker: EmbeddedBroker) -> None:
    """A copied TIMER_OUT_MS would disable the delay; a copied REAL_TOPIC would change the topic."""
    forged = {"REAL_TOPIC": "elsewhere", "TIMER_OUT_MS": "1", "TAGS": "a"}

    broker.sends.send(Message("orders", b"x", forged))

    assert set(pull_all(broker, "orders")[0].properties) == {"TAGS", "UNIQ_KEY"}


def test_the_error_for_a_large_body_has_both_sizes(tmp_path: Path) -> None:
    with (
        EmbeddedBroker(None, EmbeddedSettings(max_message_size=100), VirtualClock()) as broker,
        pytest.raises(
            MessageError, match=r"the body for 'orders' has 101 bytes, allowed are 100.*raise max-message-size"
        ),
    ):
        broker.sends.send(Message("orders", bytes(101)))


def test_a_queue_of_another_topic_is_refused(broker: EmbeddedBroker) -> None:
    with pytest.raises(
        DestinationError, match=r"is not a queue of the topic; broker 'broker-a' has queues 0..3 of 'orders'"
    ):
        broker.sends.send(Message("orders", b"x"), MessageQueue("orders", "broker-a", 9))


def test_timers_can_be_disabled() -> None:
    with EmbeddedBroker(None, EmbeddedSettings(timer_wheel_enable=False), VirtualClock()) as broker:
        assert Capability.TIMER not in broker.capabilities
        with pytest.raises(DelayError, match="has no timers; set mqtemplate.broker.timer-wheel-enable to true"):
            broker.sends.send(Message("orders", b"x", {"TIMER_DELAY_MS": "10"}))


def test_the_error_of_a_broker_that_is_not_running_names_the_solution() -> None:
    with pytest.raises(BrokerClosedError, match=r"not running; call start\(\) first"):
        EmbeddedBroker(None, clock=VirtualClock()).sends.send(Message("orders", b"x"))


@pytest.mark.feature("E3")
def test_the_schedule_topic_exists_from_the_start_with_18_queues(broker: EmbeddedBroker, tmp_path: Path) -> None:
    """One queue for each of RocketMQ's levels, independent of the level table."""
    table = json.loads((tmp_path / "config/topics.json").read_text())["topicConfigTable"]

    assert table["SCHEDULE_TOPIC_XXXX"]["writeQueueNums"] == 18


@pytest.mark.feature("C4")
def test_one_broker_has_levels_and_timers(broker: EmbeddedBroker) -> None:
    """Both of RocketMQ's delay services deliver to the real topic."""
    clock = broker.clock
    assert isinstance(clock, VirtualClock)
    broker.sends.send(Message("orders", b"level", {"DELAY": "1"}))
    broker.sends.send(Message("orders", b"timer", {"TIMER_DELAY_MS": "700"}))

    delivered = []
    for _ in range(2):
        clock.move_ms(700)
        for service in broker.services():
            service.step()
        delivered.append({message.body for message in pull_all(broker, "orders")})

    assert delivered == [{b"timer"}, {b"timer", b"level"}]


def test_after_a_kill_messages_are_read_without_a_send(tmp_path: Path) -> None:
    """Consumers see flushed messages only. So the recovery flushes, since the process may never send."""
    killed = EmbeddedBroker(tmp_path, SMALL, VirtualClock())
    killed.start()
    killed.sends.send(Message("orders", b"kept"))
    killed.store.release()

    with EmbeddedBroker(tmp_path, SMALL, VirtualClock()) as broker:
        consumer = join(broker)
        assert [message.body for message in consumer.poll(10)] == [b"kept"]


def test_a_start_that_fails_releases_the_lock_of_the_store_directory(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path, SMALL, VirtualClock()) as broker:
        broker.sends.send(Message("orders", b"kept"))
    table = tmp_path / "config/consumerOffset.json"
    table.write_text("{broken")

    with pytest.raises(StoreFormatError, match="consumerOffset.json is not JSON"):
        EmbeddedBroker(tmp_path, SMALL, VirtualClock()).start()

    table.unlink()
    with EmbeddedBroker(tmp_path, SMALL, VirtualClock()) as broker:
        assert [message.body for message in pull_all(broker, "orders")] == [b"kept"]


def test_a_corrupt_message_is_reported_once_and_the_others_are_read(broker: EmbeddedBroker, tmp_path: Path) -> None:
    broker.create_topic("orders", 1)
    for body in (b"a", b"b", b"c"):
        broker.sends.send(Message("orders", body * 40))
    (_, second, _) = pull_all(broker, "orders")
    with (tmp_path / "commitlog" / f"{0:020d}").open("r+b") as file:
        file.seek(second.physical_offset + 100)
        file.write(b"!")
    consumer = join(broker)

    assert [message.body[:1] for message in consumer.poll(10)] == [b"a"]
    with pytest.raises(CorruptRecordError, match=rf"bad record at physical offset {second.physical_offset}"):
        consumer.poll(10)
    assert [message.body[:1] for message in consumer.poll(10)] == [b"c"]


@pytest.mark.feature("U14")
def test_a_member_with_another_subscription_or_message_model_is_refused(broker: EmbeddedBroker) -> None:
    """In RocketMQ the second subscription replaces the first, and messages are lost without an error."""
    join(broker)

    with pytest.raises(
        ListenerError, match=r"group 'g' subscribes to orders:\* and to orders:paid; .*a group of its own"
    ):
        join(broker, TagSelector("paid"))
    with pytest.raises(ListenerError, match="members with CLUSTERING and with BROADCASTING"):
        join(broker, message_model=MessageModel.BROADCASTING)


def test_the_new_queues_of_a_topic_are_assigned(broker: EmbeddedBroker) -> None:
    broker.create_topic("orders", 1)
    consumer = join(broker)

    broker.create_topic("orders", 3)

    assert sorted(queue.queue_id for queue in consumer.assignment() if queue.topic == "orders") == [0, 1, 2]


def two_members(broker: EmbeddedBroker) -> tuple[Consumer, Consumer, MessageQueue]:
    """Return two members of a group, and a queue that the second one has got from the first."""
    broker.create_topic("orders", 2)
    first = join(broker)
    second = join(broker)
    return first, second, max(queue for queue in second.assignment() if queue.topic == "orders")


def test_a_late_commit_of_the_previous_member_does_not_replace_the_commits_of_the_next(broker: EmbeddedBroker) -> None:
    first, second, queue = two_members(broker)
    second.commit(queue, 3)

    first.commit(queue, 1)

    assert broker.groups.committed_offset("g", queue) == 3


def test_the_previous_member_commits_while_it_has_the_queue_locked(broker: EmbeddedBroker) -> None:
    """The next one waits for the lock, and continues after that commit."""
    first, second, queue = two_members(broker)
    assert first.lock(queue)

    first.commit(queue, 1)

    assert second.committed(queue) == 1


def test_a_late_seek_of_the_previous_member_does_not_count_when_the_queue_returns(broker: EmbeddedBroker) -> None:
    first, second, queue = two_members(broker)
    for body in (b"0", b"1"):
        broker.sends.send(Message("orders", body), queue)

    first.seek(queue, 0)
    second.commit(queue, 1)
    second.close()

    assert [message.body for message in first.poll(10)] == [b"1"]


def test_a_poll_returns_when_another_member_gets_a_queue() -> None:
    """The caller discards the messages that it has of that queue: the other member handles them."""
    with EmbeddedBroker() as broker, ThreadPoolExecutor(1) as pool:
        first = join(broker)
        polled = pool.submit(first.poll, 10, PATIENCE_S * 10_000)

        join(broker)

        assert polled.result(PATIENCE_S) == []


def test_each_broadcasting_member_has_its_own_offsets_and_they_survive_a_restart(tmp_path: Path) -> None:
    clock, member = VirtualClock(), {"message_model": MessageModel.BROADCASTING, "instance_name": "one"}
    with EmbeddedBroker(tmp_path, SMALL, clock) as broker:
        queue = read_one(broker, **member)
        assert broker.groups.committed_offset("g", queue) is None

    with EmbeddedBroker(tmp_path, SMALL, clock) as broker:
        assert join(broker, **member).poll(10) == []


@pytest.mark.parametrize(
    ("instance_name", "folder"), [("..", "%2E%2E"), ("../../../evil", "..%2F..%2F..%2Fevil"), ("a b@c+d", "a%20b@c+d")]
)
def test_the_instance_name_of_a_member_is_quoted_in_the_name_of_its_file(
    tmp_path: Path, instance_name: str, folder: str
) -> None:
    """It may come from the host name or from another setting, and must not lead out of the folder."""
    store = tmp_path / "a" / "b" / "store"
    with EmbeddedBroker(store, SMALL, VirtualClock()) as broker:
        read_one(broker, group="%g|", message_model=MessageModel.BROADCASTING, instance_name=instance_name)

    assert (store / "broadcast" / folder / "%g|.json").is_file()


@pytest.mark.parametrize("mode", FlushDiskType)
def test_one_consumer_receives_the_messages_of_many_producer_threads(tmp_path: Path, mode: FlushDiskType) -> None:
    with EmbeddedBroker(tmp_path, EmbeddedSettings(flush_disk_type=mode)) as broker:
        consumer = join(broker)
        with ThreadPoolExecutor(8) as pool:
            results = pool.map(lambda number: broker.sends.send(Message("orders", str(number).encode())), range(200))
            received: list[bytes] = []
            while len(received) < 200:
                messages = consumer.poll(50, 30_000)
                assert messages
                received += [message.body for message in messages]
            assert all(result.send_status is SendStatus.SEND_OK for result in results)

    assert sorted(map(int, received)) == list(range(200))


@pytest.mark.parametrize("mode", FlushDiskType)
def test_async_and_one_way_messages_become_visible_by_themselves(tmp_path: Path, mode: FlushDiskType) -> None:
    with EmbeddedBroker(tmp_path, EmbeddedSettings(flush_disk_type=mode)) as broker:
        broker.create_topic("orders", 1)
        (queue,) = broker.queues("orders")

        future = broker.sends.send_async([Message("orders", b"a")])
        broker.sends.send_one_way(Message("orders", b"b"))

        assert future.result(30).send_status is SendStatus.SEND_OK
        assert broker.reader.pull(queue, 0, wait_ms=30_000).messages[0].body == b"a"
        assert broker.reader.pull(queue, 1, wait_ms=30_000).messages[0].body == b"b"


class SlowCheckpoint(Disk):
    """A disk that waits before it makes the names of queue files durable, which each checkpoint does."""

    def __init__(self) -> None:
        self.started, self.go_on = threading.Event(), threading.Event()

    def sync_folder(self, folder: Path) -> None:
        if "orders" in folder.parts:
            self.started.set()
            assert self.go_on.wait(PATIENCE_S)
        super().sync_folder(folder)


def test_producers_do_not_wait_for_a_checkpoint(tmp_path: Path) -> None:
    disk, settings = SlowCheckpoint(), EmbeddedSettings(checkpoint_interval_ms=1)
    with EmbeddedBroker(store_files=FolderStoreFiles(tmp_path, disk), settings=settings) as broker:
        broker.sends.send(Message("orders", b"a"))
        assert disk.started.wait(PATIENCE_S)
        try:
            assert (
                broker.sends.send_async([Message("orders", b"b")]).result(PATIENCE_S).send_status is SendStatus.SEND_OK
            )
        finally:
            disk.go_on.set()


def test_a_waiting_poll_ends_when_the_broker_is_closed() -> None:
    broker = EmbeddedBroker(None)
    broker.start()
    consumer = join(broker)
    with ThreadPoolExecutor(1) as pool:
        polling = threading.Event()

        def poll() -> object:
            polling.set()
            return consumer.poll(10, 30_000)

        waiting = pool.submit(poll)
        assert polling.wait(PATIENCE_S)
        broker.close()
        with pytest.raises(BrokerClosedError, match="this member of group 'g' was closed"):
            waiting.result(30)


@pytest.mark.parametrize("selector", [TagSelector("paid"), Sql92Selector("price > 5")], ids=repr)
def test_one_poll_skips_all_messages_that_a_selector_does_not_match(broker: EmbeddedBroker, selector: Selector) -> None:
    """Also across queue files. On a virtual clock there would be no second poll."""
    broker.create_topic("orders", 1)
    unmatched = Message("orders", b"open", {"TAGS": "open", "price": "1"})
    for _ in range(60):
        broker.sends.send_batch([unmatched] * 100)
    last = broker.sends.send(Message("orders", b"paid", {"TAGS": "paid", "price": "9"}))
    consumer = join(broker, selector)

    [message] = consumer.poll(32)

    assert message.queue_offset == last.queue_offset == 6_000
    assert consumer.position(last.message_queue) == 6_001


def test_a_poll_with_a_selector_returns_at_most_max_count_messages(broker: EmbeddedBroker) -> None:
    broker.create_topic("orders", 1)
    for number in range(200):
        broker.sends.send(Message("orders", b"%d" % number, {"price": str(number)}))
    consumer = join(broker, Sql92Selector("price >= 100"))

    pages = [[message.body for message in consumer.poll(30)] for _ in range(4)]

    assert [len(page) for page in pages] == [30, 30, 30, 10]
    assert sum(pages, []) == [b"%d" % number for number in range(100, 200)]


def test_a_waiting_pull_skips_all_messages_that_a_selector_does_not_match() -> None:
    with EmbeddedBroker(None, SMALL, SystemClock()) as broker:
        broker.create_topic("orders", 1)
        for _ in range(50):
            broker.sends.send_batch([Message("orders", b"open", {"TAGS": "open"})] * 100)
        last = broker.sends.send(Message("orders", b"paid", {"TAGS": "paid"}))

        page = broker.reader.pull(last.message_queue, 0, wait_ms=20_000, selector=TagSelector("paid"))

    assert [message.body for message in page.messages] == [b"paid"]


# --- members that receive by POP ------------------------------------------------------------------


def test_a_member_that_joins_while_the_last_one_leaves_keeps_its_messages(
    broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have one session, whose end made the messages of the new member visible again: they came twice."""
    spec, pop, received = ConsumerSpec(group="billing", subscriptions={"orders": ALL}), broker.engine.pop, list[Any]()
    leaving = broker.pop.join(spec)
    broker.sends.send(Message("orders", b"first"))
    end_session, lock = pop.end_session, broker._pop._lock

    def join_and_receive() -> None:
        broker.pop.join(spec)
        received.extend(broker.pop.receive("billing", "orders", 1, 60_000, 0, None, auto_renew=True))

    joining = threading.Thread(target=join_and_receive)

    def end_while_another_one_joins(session: str) -> None:
        monkeypatch.setattr(pop, "end_session", end_session)
        joining.start()
        if lock.acquire(blocking=False):  # nothing keeps it from joining now
            lock.release()
            joining.join()
        end_session(session)

    monkeypatch.setattr(pop, "end_session", end_while_another_one_joins)
    leaving.close()
    joining.join()
    Harness(broker).advance("10s")

    assert len(received) == 1
    assert broker.pop.receive("billing", "orders", 1, 60_000, 0, None) == []


def test_a_receive_that_waits_ends_although_the_broker_cannot_write_its_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It began after the others had ended, and no thread of the broker was left to end it."""
    broker, found = EmbeddedBroker(tmp_path / "store", SMALL, SystemClock()), list[Any]()
    broker.start()
    broker.pop.join(ConsumerSpec(group="billing", subscriptions={"orders": ALL}))
    thread = threading.Thread(
        target=lambda: found.append(broker.pop.receive("billing", "orders", 1, 60_000, 3_600_000, None)), daemon=True
    )
    thread.start()
    eventually(lambda: broker.engine.pop.count_held("billing", "orders") == 1, "the receive waits")
    monkeypatch.setattr(broker.engine.pop, "end_holds", lambda: None)
    monkeypatch.setattr(broker.store, "take_checkpoint", full)

    with pytest.raises(StoreFullError):
        broker.close()

    eventually(lambda: not thread.is_alive(), "the receive has ended")
    assert found == [[]]


def full() -> None:
    raise StoreFullError("no space")
