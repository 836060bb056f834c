"""What an embedded broker promises beyond the contract of the port."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mqtemplate.broker import Capability, ConsumerSpec, MessageModel
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import SystemClock, VirtualClock
from mqtemplate.errors import (
    BrokerClosedError,
    CorruptRecordError,
    DelayError,
    DestinationError,
    ListenerError,
    MessageError,
    OffsetOutOfRangeError,
    StoreFormatError,
)
from mqtemplate.message import Message, MessageExt, MessageQueue
from mqtemplate.results import PullStatus, SendStatus
from mqtemplate.selectors.sql92 import Sql92Selector
from mqtemplate.selectors.tags import Selector, TagSelector
from mqtemplate.store import FlushDiskType

ALL = TagSelector()
SMALL = EmbeddedSettings(mapped_file_size_commit_log=1 << 20, mapped_file_size_consume_queue=2_000)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(tmp_path, SMALL, VirtualClock()) as broker:
        yield broker


def drain(broker: EmbeddedBroker, topic: str) -> list[MessageExt]:
    found = []
    for queue in broker.queues(topic):
        found += broker.pull(queue, broker.min_offset(queue), 1_000).messages
    return found


@pytest.mark.feature("B14")
def test_a_result_tells_where_the_message_is(broker: EmbeddedBroker) -> None:
    """Status and ids; the offset id is address and physical offset in hex."""
    result = broker.send(Message("orders", b"x"))

    (message,) = drain(broker, "orders")
    assert result.send_status is SendStatus.SEND_OK
    assert result.msg_id == message.msg_id
    assert result.offset_msg_id == message.offset_msg_id == "7F00000100002A9F" + "0" * 16
    assert (result.message_queue, result.queue_offset) == (message.message_queue, 0)


def test_queues_take_turns(broker: EmbeddedBroker) -> None:
    used = [broker.send(Message("orders", b"x")).message_queue.queue_id for _ in range(8)]

    assert used == [0, 1, 2, 3] * 2


def test_a_message_keeps_its_id_and_is_not_changed(broker: EmbeddedBroker) -> None:
    message = Message("orders", b"x", {"UNIQ_KEY": "mine", "TAGS": "a", "colour": "red"})

    result = broker.send(message)

    assert result.msg_id == "mine"
    assert message.properties == {"UNIQ_KEY": "mine", "TAGS": "a", "colour": "red"}
    assert drain(broker, "orders")[0].properties == message.properties


@pytest.mark.feature("G8", "G9")
def test_topics_belong_to_users_or_to_the_broker(broker: EmbeddedBroker) -> None:
    """Nobody puts a message into the schedule topic by hand."""
    for topic in ("SCHEDULE_TOPIC_XXXX", "rmq_sys_wheel_timer"):
        with pytest.raises(DestinationError, match=r"belongs to the broker; send to the topic the message is for"):
            broker.send(Message(topic, b"x"))


@pytest.mark.feature("G9", "D28")
def test_the_brokers_own_properties_are_not_taken_from_senders(broker: EmbeddedBroker) -> None:
    """A copied TIMER_OUT_MS would switch the delay off, a copied REAL_TOPIC send it elsewhere."""
    forged = {"REAL_TOPIC": "elsewhere", "TIMER_OUT_MS": "1", "TAGS": "a"}

    broker.send(Message("orders", b"x", forged))

    assert set(drain(broker, "orders")[0].properties) == {"TAGS", "UNIQ_KEY"}


def test_a_body_over_the_maximum_says_both_sizes(tmp_path: Path) -> None:
    with (
        EmbeddedBroker(None, EmbeddedSettings(max_message_size=100), VirtualClock()) as broker,
        pytest.raises(
            MessageError, match=r"the body for 'orders' has 101 bytes, allowed are 100.*raise max-message-size"
        ),
    ):
        broker.send(Message("orders", bytes(101)))


def test_a_batch_of_two_topics_is_refused(broker: EmbeddedBroker) -> None:
    with pytest.raises(MessageError, match=r"names 'a' and 'b'; send two batches"):
        broker.send_batch([Message("a", b"x"), Message("b", b"x")])
    with pytest.raises(MessageError, match="the batch is empty"):
        broker.send_batch([])
    assert drain(broker, "a") == []


def test_a_queue_of_another_topic_is_refused(broker: EmbeddedBroker) -> None:
    with pytest.raises(
        DestinationError, match=r"is no queue of the topic; broker 'broker-a' has queues 0..3 of 'orders'"
    ):
        broker.send(Message("orders", b"x"), MessageQueue("orders", "broker-a", 9))


def test_timers_can_be_switched_off() -> None:
    with EmbeddedBroker(None, EmbeddedSettings(timer_wheel_enable=False), VirtualClock()) as broker:
        assert Capability.TIMER not in broker.capabilities
        with pytest.raises(DelayError, match="has no timers; set mqtemplate.broker.timer-wheel-enable to true"):
            broker.send(Message("orders", b"x", {"TIMER_DELAY_MS": "10"}))


def test_a_broker_that_is_not_running_says_what_to_do() -> None:
    with pytest.raises(BrokerClosedError, match=r"not running; call start\(\) first"):
        EmbeddedBroker(None, clock=VirtualClock()).send(Message("orders", b"x"))


@pytest.mark.feature("E3")
def test_the_schedule_topic_exists_from_the_start_with_18_queues(broker: EmbeddedBroker, tmp_path: Path) -> None:
    """One queue for each of upstream's levels, whatever the table says."""
    table = json.loads((tmp_path / "config/topics.json").read_text())["topicConfigTable"]

    assert table["SCHEDULE_TOPIC_XXXX"]["writeQueueNums"] == 18


@pytest.mark.feature("C4")
def test_levels_and_timers_wait_side_by_side_in_one_broker(broker: EmbeddedBroker) -> None:
    """The core has both of upstream's engines, and both end in the real topic."""
    clock = broker.clock
    assert isinstance(clock, VirtualClock)
    broker.send(Message("orders", b"level", {"DELAY": "1"}))
    broker.send(Message("orders", b"timer", {"TIMER_DELAY_MS": "700"}))

    arrived = []
    for _ in range(2):
        clock.move_ms(700)
        for service in broker.services():
            service.step()
        arrived.append({message.body for message in drain(broker, "orders")})

    assert arrived == [{b"timer"}, {b"timer", b"level"}]


def test_pulling_outside_a_queue_says_where_to_go_on(broker: EmbeddedBroker) -> None:
    queue = broker.send(Message("orders", b"x")).message_queue

    with pytest.raises(OffsetOutOfRangeError, match=r"holds offsets 0..0, asked was 7; go on from 1") as caught:
        broker.pull(queue, 7)

    assert caught.value.next_offset == 1


def test_a_selector_skips_and_says_so(broker: EmbeddedBroker) -> None:
    queue = broker.send(Message("orders", b"x", {"TAGS": "new"})).message_queue

    result = broker.pull(queue, 0, selector=TagSelector("paid"))

    assert (result.pull_status, result.next_begin_offset) == (PullStatus.NO_MATCHED_MSG, 1)


def test_tags_that_only_share_a_hash_are_told_apart(broker: EmbeddedBroker) -> None:
    """ "Aa" and "BB" have one Java hash, which is all that the queue keeps."""
    broker.create_topic("orders", 1)
    queue = broker.send(Message("orders", b"1", {"TAGS": "Aa"})).message_queue
    broker.send(Message("orders", b"2", {"TAGS": "BB"}))

    assert [message.body for message in broker.pull(queue, 0, selector=TagSelector("BB")).messages] == [b"2"]


def test_what_was_acknowledged_is_there_after_a_restart(tmp_path: Path) -> None:
    clock = VirtualClock()
    with EmbeddedBroker(tmp_path, SMALL, clock) as broker:
        broker.send(Message("orders", b"kept"))
        consumer = broker.subscribe(ConsumerSpec(group="g", subscriptions={"orders": ALL}))
        (message,) = consumer.poll(10)
        consumer.commit(message.message_queue, message.queue_offset + 1)
        broker.send(Message("orders", b"next"))

    with EmbeddedBroker(tmp_path, SMALL, clock) as broker:
        consumer = broker.subscribe(ConsumerSpec(group="g", subscriptions={"orders": ALL}))
        assert [message.body for message in consumer.poll(10)] == [b"next"]


def test_after_a_kill_messages_are_read_without_anybody_sending(tmp_path: Path) -> None:
    """Readers see what is flushed: the recovery flushes what it found, since a process may only consume."""
    killed = EmbeddedBroker(tmp_path, SMALL, VirtualClock())
    killed.start()
    killed.send(Message("orders", b"kept"))
    killed.store.release()

    with EmbeddedBroker(tmp_path, SMALL, VirtualClock()) as broker:
        consumer = broker.subscribe(ConsumerSpec(group="g", subscriptions={"orders": ALL}))
        assert [message.body for message in consumer.poll(10)] == [b"kept"]


def test_a_start_that_fails_half_way_gives_the_folder_free(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path, SMALL, VirtualClock()) as broker:
        broker.send(Message("orders", b"kept"))
    table = tmp_path / "config/consumerOffset.json"
    table.write_text("{broken")

    with pytest.raises(StoreFormatError, match="consumerOffset.json is not JSON"):
        EmbeddedBroker(tmp_path, SMALL, VirtualClock()).start()

    table.unlink()
    with EmbeddedBroker(tmp_path, SMALL, VirtualClock()) as broker:
        assert [message.body for message in drain(broker, "orders")] == [b"kept"]


def test_a_damaged_message_is_told_once_and_its_neighbours_are_read(broker: EmbeddedBroker, tmp_path: Path) -> None:
    broker.create_topic("orders", 1)
    for body in (b"a", b"b", b"c"):
        broker.send(Message("orders", body * 40))
    (_, second, _) = drain(broker, "orders")
    with (tmp_path / "commitlog" / f"{0:020d}").open("r+b") as file:
        file.seek(second.physical_offset + 100)
        file.write(b"!")
    consumer = broker.subscribe(ConsumerSpec(group="g", subscriptions={"orders": ALL}))

    assert [message.body[:1] for message in consumer.poll(10)] == [b"a"]
    with pytest.raises(CorruptRecordError, match=rf"bad record at physical offset {second.physical_offset}"):
        consumer.poll(10)
    assert [message.body[:1] for message in consumer.poll(10)] == [b"c"]


@pytest.mark.feature("U14")
def test_a_group_with_two_subscriptions_is_refused(broker: EmbeddedBroker) -> None:
    """Upstream lets the second overwrite the first, and messages are lost in silence."""
    broker.subscribe(ConsumerSpec(group="g", subscriptions={"orders": ALL}))

    with pytest.raises(
        ListenerError, match=r"group 'g' subscribes to orders:\* and to orders:paid; .*a group of its own"
    ):
        broker.subscribe(ConsumerSpec(group="g", subscriptions={"orders": TagSelector("paid")}))
    with pytest.raises(ListenerError, match="members with CLUSTERING and with BROADCASTING"):
        broker.subscribe(
            ConsumerSpec(group="g", subscriptions={"orders": ALL}, message_model=MessageModel.BROADCASTING)
        )


def test_a_topic_that_grows_finds_readers(broker: EmbeddedBroker) -> None:
    broker.create_topic("orders", 1)
    consumer = broker.subscribe(ConsumerSpec(group="g", subscriptions={"orders": ALL}))

    broker.create_topic("orders", 3)

    assert sorted(queue.queue_id for queue in consumer.assignment() if queue.topic == "orders") == [0, 1, 2]


def test_broadcast_progress_is_each_members_own_and_survives(tmp_path: Path) -> None:
    clock = VirtualClock()
    spec = ConsumerSpec(
        group="g", subscriptions={"orders": ALL}, message_model=MessageModel.BROADCASTING, instance_name="one"
    )
    with EmbeddedBroker(tmp_path, SMALL, clock) as broker:
        broker.send(Message("orders", b"x"))
        member = broker.subscribe(spec)
        (message,) = member.poll(10)
        member.commit(message.message_queue, 1)
        assert broker.committed_offset("g", message.message_queue) is None

    with EmbeddedBroker(tmp_path, SMALL, clock) as broker:
        assert broker.subscribe(spec).poll(10) == []


@pytest.mark.parametrize("mode", FlushDiskType)
def test_many_threads_send_and_one_poll_waits_for_them(tmp_path: Path, mode: FlushDiskType) -> None:
    with EmbeddedBroker(tmp_path, EmbeddedSettings(flush_disk_type=mode)) as broker:
        consumer = broker.subscribe(ConsumerSpec(group="g", subscriptions={"orders": ALL}))
        with ThreadPoolExecutor(8) as pool:
            results = pool.map(lambda number: broker.send(Message("orders", str(number).encode())), range(200))
            got: list[bytes] = []
            while len(got) < 200:
                messages = consumer.poll(50, 30_000)
                assert messages
                got += [message.body for message in messages]
            assert all(result.send_status is SendStatus.SEND_OK for result in results)

    assert sorted(map(int, got)) == list(range(200))


@pytest.mark.parametrize("mode", FlushDiskType)
def test_async_and_one_way_sends_are_seen_without_anybody_waiting_for_them(tmp_path: Path, mode: FlushDiskType) -> None:
    with EmbeddedBroker(tmp_path, EmbeddedSettings(flush_disk_type=mode)) as broker:
        broker.create_topic("orders", 1)
        (queue,) = broker.queues("orders")

        future = broker.send_async([Message("orders", b"a")])
        broker.send_one_way(Message("orders", b"b"))

        assert future.result(30).send_status is SendStatus.SEND_OK
        assert broker.pull(queue, 0, wait_ms=30_000).messages[0].body == b"a"
        assert broker.pull(queue, 1, wait_ms=30_000).messages[0].body == b"b"


def test_a_poll_that_waits_ends_when_it_is_woken_or_the_broker_closes() -> None:
    broker = EmbeddedBroker(None)
    broker.start()
    consumer = broker.subscribe(ConsumerSpec(group="g", subscriptions={"orders": ALL}))
    with ThreadPoolExecutor(1) as pool:
        consumer.wake()
        assert consumer.poll(10, 30_000) == []

        polling = threading.Event()

        def poll() -> object:
            polling.set()
            return consumer.poll(10, 30_000)

        waiting = pool.submit(poll)
        assert polling.wait(30)
        broker.close()
        with pytest.raises(BrokerClosedError, match="this member of group 'g' was closed"):
            waiting.result(30)


@pytest.mark.parametrize("selector", [TagSelector("paid"), Sql92Selector("price > 5")], ids=repr)
def test_one_poll_goes_past_all_that_a_selector_leaves_out(broker: EmbeddedBroker, selector: Selector) -> None:
    """Also over the ends of queue files. On a virtual clock nobody would poll again; on a real one it took long."""
    broker.create_topic("orders", 1)
    unwanted = Message("orders", b"open", {"TAGS": "open", "price": "1"})
    for _ in range(60):
        broker.send_batch([unwanted] * 100)
    last = broker.send(Message("orders", b"paid", {"TAGS": "paid", "price": "9"}))
    consumer = broker.subscribe(ConsumerSpec(group="rare", subscriptions={"orders": selector}))

    [message] = consumer.poll(32)

    assert message.queue_offset == last.queue_offset == 6_000
    assert consumer.position(last.message_queue) == 6_001


def test_a_poll_takes_no_more_than_it_may_whatever_a_selector_leaves_out(broker: EmbeddedBroker) -> None:
    broker.create_topic("orders", 1)
    for number in range(200):
        broker.send(Message("orders", b"%d" % number, {"price": str(number)}))
    selector = Sql92Selector("price >= 100")
    consumer = broker.subscribe(ConsumerSpec(group="dear", subscriptions={"orders": selector}))

    pages = [[message.body for message in consumer.poll(30)] for _ in range(4)]

    assert [len(page) for page in pages] == [30, 30, 30, 10]
    assert sum(pages, []) == [b"%d" % number for number in range(100, 200)]


def test_a_pull_that_waits_goes_past_all_that_a_selector_leaves_out() -> None:
    with EmbeddedBroker(None, SMALL, SystemClock()) as broker:
        broker.create_topic("orders", 1)
        for _ in range(50):
            broker.send_batch([Message("orders", b"open", {"TAGS": "open"})] * 100)
        last = broker.send(Message("orders", b"paid", {"TAGS": "paid"}))

        page = broker.pull(last.message_queue, 0, wait_ms=20_000, selector=TagSelector("paid"))

    assert [message.body for message in page.messages] == [b"paid"]
