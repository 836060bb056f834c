"""Messages of topics and offsets of groups, copied from the store directory of a stopped application."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from mqtemplate.broker import Broker
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import VirtualClock
from mqtemplate.errors import BrokerError, ConfigurationError
from mqtemplate.handover.run import ReadyCopier, RunProgress, RunReport
from mqtemplate.message import Message, MessageQueue, Property
from mqtemplate.operations import BrokerAccess
from mqtemplate.operations.dead_letters import LetterMarks, LetterState
from mqtemplate.topics import DLQ_TOPIC_PREFIX, RETRY_TOPIC_PREFIX

CLOCK = VirtualClock(1_764_547_200_000)


@pytest.fixture
def old() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(clock=CLOCK) as broker:
        yield broker


@pytest.fixture
def new() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(clock=CLOCK) as broker:
        yield broker


def filled(broker: Broker, topic: str = "orders", queues: int = 2, count: int = 10) -> list[MessageQueue]:
    """Send messages *count* times to each queue: ``q0-0``, ``q0-1``, …"""
    broker.create_topic(topic, queues)
    found = list(broker.queues(topic))
    for queue in found:
        for number in range(count):
            properties = {Property.KEYS: f"key-{number}", Property.TAGS: "paid", "tenant": "T"}
            broker.sends.send(Message(topic, f"q{queue.queue_id}-{number}".encode(), properties), queue)
    return found


def ready(old: EmbeddedBroker, new: Broker, report: RunReport, stop: threading.Event | None = None) -> ReadyCopier:
    progress = RunProgress(old.store.store_files, "mq1:9876")
    found = ReadyCopier(old, new, progress, report, stop=stop)
    found.prepare()
    return found


def copied(old: EmbeddedBroker, new: Broker) -> RunReport:
    report = RunReport()
    ready(old, new, report).copy()
    return report


def bodies(broker: Broker, queue: MessageQueue) -> list[str]:
    return [each.body.decode() for each in broker.reader.pull(queue, 0, 1_000).messages]


def new_queue(new: Broker, topic: str, queue_id: int) -> MessageQueue:
    return MessageQueue(topic, new.name, queue_id)


def test_unread_messages_are_in_the_same_queues_in_their_order(old: EmbeddedBroker, new: EmbeddedBroker) -> None:
    first, second = filled(old)
    old.groups.commit_offset("billing", first, 4)
    old.groups.commit_offset("billing", second, 10)

    report = copied(old, new)

    assert bodies(new, new_queue(new, "orders", 0)) == [f"q0-{number}" for number in range(4, 10)]
    assert bodies(new, new_queue(new, "orders", 1)) == []
    assert (report.copied, report.topics, report.groups) == (6, ["orders"], ["billing"])
    assert len(new.queues("orders")) == 2


def test_a_copy_keeps_id_keys_tag_and_properties(old: EmbeddedBroker, new: EmbeddedBroker) -> None:
    [queue] = filled(old, queues=1, count=1)
    [original] = old.reader.pull(queue, 0).messages

    copied(old, new)

    [found] = new.reader.pull(new_queue(new, "orders", 0), 0).messages
    assert (found.msg_id, found.keys, found.tags) == (original.msg_id, "key-0", "paid")
    assert found.user_properties == original.user_properties == {"tenant": "T"}
    assert new.reader.messages_by_key("orders", original.msg_id, unique=True)


def test_each_group_continues_at_its_first_unread_message(old: EmbeddedBroker, new: EmbeddedBroker) -> None:
    """The slowest group decides what is copied; the others continue later."""
    [queue] = filled(old, queues=1)
    old.groups.commit_offset("slow", queue, 2)
    old.groups.commit_offset("fast", queue, 7)
    old.groups.commit_offset("done", queue, 10)

    copied(old, new)

    target = new_queue(new, "orders", 0)
    offsets = {group: new.groups.committed_offset(group, target) for group in ("slow", "fast", "done")}
    assert offsets == {"slow": 0, "fast": 5, "done": 8}
    assert bodies(new, target)[5] == "q0-7"
    assert all(old.groups.committed_offset(group, queue) == 10 for group in offsets)


def test_of_a_topic_without_groups_all_messages_are_copied(old: EmbeddedBroker, new: EmbeddedBroker) -> None:
    filled(old, queues=1)

    assert copied(old, new).copied == 10


def test_a_message_that_was_delayed_is_not_delayed_again(old: EmbeddedBroker, new: EmbeddedBroker) -> None:
    old.sends.send(Message("orders", b"x", {Property.TIMER_DELIVER_MS: "1"}))
    old.sends.send(Message("orders", b"x", {Property.TIMER_DELIVER_MS: str(CLOCK.now_ms() - 1)}))

    copied(old, new)

    assert sum(span.message_count for span in new.admin().queue_spans("orders")) == 2


def test_a_retry_keeps_its_message_and_a_dead_letter_its_origin(old: EmbeddedBroker, new: EmbeddedBroker) -> None:
    retry, dead = f"{RETRY_TOPIC_PREFIX}billing", f"{DLQ_TOPIC_PREFIX}billing"
    for topic in (retry, dead):
        old.create_topic(topic, 1)
        old.sends.send(Message(topic, b"x", {Property.RETRY_TOPIC: "orders", Property.ORIGIN_MESSAGE_ID: "A1"}))

    copied(old, new)

    for topic in (retry, dead):
        [found] = new.reader.pull(new_queue(new, topic, 0), 0).messages
        assert found.properties[Property.RETRY_TOPIC] == "orders"
        assert found.properties[Property.ORIGIN_MESSAGE_ID] == "A1"


def test_a_dead_letter_that_an_operator_has_purged_is_not_copied(old: EmbeddedBroker, new: EmbeddedBroker) -> None:
    topic = f"{DLQ_TOPIC_PREFIX}billing"
    [queue] = filled(old, topic, queues=1, count=3)
    second = old.reader.pull(queue, 1, 1).messages[0]
    LetterMarks(BrokerAccess(old)).add("billing", LetterState.PURGED, [second.offset_msg_id])

    assert copied(old, new).copied == 2
    assert bodies(new, new_queue(new, topic, 0)) == ["q0-0", "q0-2"]


def test_what_arrives_later_is_copied_by_the_next_call(old: EmbeddedBroker, new: EmbeddedBroker) -> None:
    [queue] = filled(old, queues=1)
    old.groups.commit_offset("billing", queue, 10)
    copy = ready(old, new, RunReport())
    assert copy.copy() == 0

    old.sends.send(Message("orders", b"released"), queue)

    assert (copy.copy(), copy.copy()) == (1, 0)
    target = new_queue(new, "orders", 0)
    assert bodies(new, target) == ["released"]
    assert new.groups.committed_offset("billing", target) == 0
    assert old.groups.committed_offset("billing", queue) == 11


# --- a new broker that is in use ------------------------------------------------------------------


def test_a_group_that_reads_the_new_broker_skips_nothing_there(old: EmbeddedBroker, new: EmbeddedBroker) -> None:
    [queue] = filled(old, queues=1)
    old.groups.commit_offset("billing", queue, 5)
    [target] = filled(new, queues=1, count=3)
    new.groups.commit_offset("billing", target, 1)

    copied(old, new)

    assert new.groups.committed_offset("billing", target) == 1
    assert bodies(new, target) == ["q0-0", "q0-1", "q0-2", *(f"q0-{number}" for number in range(5, 10))]


def test_a_group_skips_no_message_that_another_producer_sends_meanwhile(
    old: EmbeddedBroker, new: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fast group is set to the other message: it gets some messages again, and loses none."""
    [queue] = filled(old, queues=1, count=300)
    old.groups.commit_offset("slow", queue, 0)
    old.groups.commit_offset("fast", queue, 250)
    new.create_topic("orders", 1)
    target, sends = new_queue(new, "orders", 0), new.sends
    send_batch = sends.send_batch

    def with_other(*arguments: object) -> object:
        sends.send(Message("orders", b"other"), target)
        return send_batch(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(sends, "send_batch", with_other)

    copied(old, new)

    assert new.groups.committed_offset("fast", target) == 0
    assert bodies(new, target)[0] == "other"


def test_more_queues_are_created_if_the_new_topic_has_fewer(old: EmbeddedBroker, new: EmbeddedBroker) -> None:
    filled(old, queues=3, count=1)
    new.create_topic("orders", 1)

    copied(old, new)

    assert [bodies(new, new_queue(new, "orders", number)) for number in range(3)] == [["q0-0"], ["q1-0"], ["q2-0"]]


# --- ends and continuations -----------------------------------------------------------------------


class KilledError(Exception):
    """The process ends here."""


@pytest.mark.parametrize("kill_at", range(1, 8))
def test_a_killed_run_continues_without_loss_and_without_doubles(
    old: EmbeddedBroker, new: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch, kill_at: int
) -> None:
    """The message is stored at the new broker, and the process ends before it records that."""
    first, _ = filled(old, count=350)
    old.groups.commit_offset("slow", first, 20)
    old.groups.commit_offset("fast", first, 333)
    sends, calls = new.sends, 0
    send_batch = sends.send_batch

    def send_and_end(*arguments: object) -> object:
        nonlocal calls
        result = send_batch(*arguments)  # type: ignore[arg-type]
        calls += 1
        if calls == kill_at:
            raise KilledError
        return result

    with monkeypatch.context() as patch:
        patch.setattr(sends, "send_batch", send_and_end)
        with pytest.raises(KilledError):
            copied(old, new)

    report = copied(old, new)

    assert bodies(new, new_queue(new, "orders", 0)) == [f"q0-{number}" for number in range(20, 350)]
    assert bodies(new, new_queue(new, "orders", 1)) == [f"q1-{number}" for number in range(350)]
    assert report.repeated > 0
    target = new_queue(new, "orders", 0)
    assert [new.groups.committed_offset(group, target) for group in ("slow", "fast")] == [0, 313]
    assert copied(old, new).copied == 0


def test_a_run_that_is_stopped_goes_on_later(old: EmbeddedBroker, new: EmbeddedBroker) -> None:
    filled(old, queues=1, count=350)
    stop, report = threading.Event(), RunReport()

    def stop_soon(count: int) -> None:
        stop.set()

    progress = RunProgress(old.store.store_files, "mq1:9876")
    run = ReadyCopier(old, new, progress, report, stop=stop, on_progress=stop_soon)
    run.prepare()
    run.copy()

    assert 0 < report.copied < 350
    report = copied(old, new)
    assert report.repeated == 0
    assert bodies(new, new_queue(new, "orders", 0)) == [f"q0-{number}" for number in range(350)]


def test_a_message_that_the_new_broker_refuses_stays_and_is_named(old: EmbeddedBroker) -> None:
    [queue] = filled(old, queues=1, count=2)
    large = old.sends.send(Message("orders", b"x" * 2_000), queue)
    old.sends.send(Message("orders", b"last"), queue)
    with EmbeddedBroker(settings=EmbeddedSettings(max_message_size=1_000), clock=CLOCK) as new:
        report = copied(old, new)

        assert list(report.refused) == [large.msg_id]
        assert "1000" in report.refused[large.msg_id].replace(",", "")
        assert bodies(new, new_queue(new, "orders", 0)) == ["q0-0", "q0-1", "last"]


def test_an_error_of_the_new_broker_ends_the_run_and_loses_nothing(
    old: EmbeddedBroker, new: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(old, queues=1, count=250)

    def fail(*arguments: object) -> None:
        raise BrokerError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(new.sends, "send_batch", fail)
        with pytest.raises(BrokerError, match="no answer"):
            copied(old, new)

    assert copied(old, new).copied == 250


def test_another_new_broker_than_that_of_the_earlier_run_is_refused(old: EmbeddedBroker, new: EmbeddedBroker) -> None:
    filled(old, queues=1)
    copied(old, new)

    with pytest.raises(ConfigurationError, match=r"moved messages of this directory to mq1:9876.*go on with --to mq1"):
        RunProgress(old.store.store_files, "mq2:9876")
