"""Topics that are created and deleted, groups that are created, messages that are sent: on each kind of broker."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqtemplate.clock import VirtualClock
from mqtemplate.errors import DestinationError, MessageError, UnknownNameError
from mqtemplate.operations import BrokerAccess
from mqtemplate.operations.audit import AuditLog
from mqtemplate.operations.changes import Change, carry_out
from mqtemplate.operations.creation import GroupCreated, MessageDraft, MessageSent, TopicCreated, TopicDeleted
from mqtemplate.operations.offsets import OffsetPosition
from mqtemplate.operations.undo import undo_change, why_not_undone
from mqtemplate.pending import PendingQuery
from tests.waiting import eventually


@pytest.fixture
def audit(tmp_path: Path) -> AuditLog:
    return AuditLog(tmp_path / "changes.jsonl", VirtualClock(1_000_000), user="anna")


def make(change: Change, audit: AuditLog) -> str:
    return carry_out(change, audit).id


def send(access: BrokerAccess, audit: AuditLog, count: int) -> None:
    for number in range(count):
        make(MessageSent(access, MessageDraft(topic="refunds", body=b"%d" % number, keys=["k"])), audit)


def test_a_topic_is_created_and_the_undo_deletes_it(access: BrokerAccess, audit: AuditLog) -> None:
    created = TopicCreated(access, "refunds", 2)
    title, change = created.title, make(created, audit)
    queues = len(access.admin.queue_spans("refunds"))

    make(undo_change(access, audit.get(change)), audit)

    assert title == "Create topic 'refunds' with 2 queues"
    assert queues == 2
    assert "refunds" not in access.admin.topic_names()


def test_a_topic_is_deleted_with_the_offsets_of_its_groups_and_the_undo_creates_it(
    access: BrokerAccess, audit: AuditLog
) -> None:
    make(TopicCreated(access, "refunds", 3), audit)
    send(access, audit, 4)
    make(GroupCreated(access, "accounting", "refunds", OffsetPosition.EARLIEST), audit)
    lag = access.admin.group("accounting").lag
    deleted = TopicDeleted(access, "refunds")
    title, notes, change = deleted.title, deleted.preview.notes, make(deleted, audit)
    names = access.admin.topic_names()
    logged = audit.get(change)

    make(undo_change(access, logged), audit)

    assert lag == 4
    assert title == "Delete topic 'refunds' with 4 messages"
    assert notes == ("These groups lose their offsets in it: accounting.",)
    assert "refunds" not in names
    assert [(each["group"], each["before"]) for each in logged.old()] == [("accounting", 0)] * 3
    assert len(access.admin.queue_spans("refunds")) == 3


def test_a_group_is_created_at_the_end_and_the_undo_forgets_it(access: BrokerAccess, audit: AuditLog) -> None:
    make(TopicCreated(access, "refunds", 1), audit)
    send(access, audit, 3)
    change = make(GroupCreated(access, "accounting", "refunds", OffsetPosition.LATEST), audit)
    lag = access.admin.group("accounting").lag

    make(undo_change(access, audit.get(change)), audit)

    assert lag == 0
    assert "accounting" not in access.admin.groups_of("refunds")


def test_a_delayed_message_is_sent_and_the_undo_cancels_it(access: BrokerAccess, audit: AuditLog) -> None:
    draft = MessageDraft(
        topic="orders",
        body="später".encode(),
        tag="paid",
        keys=["4711"],
        properties={"region": "north"},
        due_ms=access.broker.clock.now_ms() + 3_600_000,
    )
    sent = MessageSent(access, draft)
    undo, change = sent.preview.undo, make(sent, audit)
    pending = access.broker.delayed.pending(PendingQuery(key="4711")).messages

    make(undo_change(access, audit.get(change)), audit)

    assert undo == "It can be undone while it is pending: it is cancelled."
    assert [(each.topic, each.tags, each.keys) for each in pending] == [("orders", "paid", "4711")]
    eventually(lambda: not access.broker.delayed.pending(PendingQuery(key="4711")).messages, "it is cancelled")
    assert "später" not in Path(str(audit.path)).read_text("utf-8")


def test_a_message_that_was_sent_at_once_cannot_be_undone(access: BrokerAccess, audit: AuditLog) -> None:
    change = make(MessageSent(access, MessageDraft(topic="orders", body=b"x")), audit)

    assert why_not_undone(audit.get(change)) == "the message was sent, and listeners may have handled it"


def test_more_queues_cannot_be_undone(access: BrokerAccess, audit: AuditLog) -> None:
    make(TopicCreated(access, "refunds", 1), audit)
    more = TopicCreated(access, "refunds", 2)
    change = make(more, audit)

    assert more.title == "Give topic 'refunds' 2 queues instead of 1"
    assert why_not_undone(audit.get(change)) == "queues of a topic cannot be removed"


def test_wrong_names_and_numbers_are_refused(access: BrokerAccess) -> None:
    with pytest.raises(MessageError, match="a topic has 1 to 1,024 queues, got 0"):
        TopicCreated(access, "refunds", 0)
    with pytest.raises(MessageError, match="topic 'orders' exists with 2 queues, and queues cannot be removed; give a"):
        TopicCreated(access, "orders", 2)
    with pytest.raises(MessageError, match="topic '%DLQ%billing' is a dead letter topic, which the broker manages"):
        TopicDeleted(access, "%DLQ%billing")
    with pytest.raises(DestinationError, match="belongs to the broker"):
        TopicCreated(access, "SCHEDULE_TOPIC_XXXX", 4)
    with pytest.raises(UnknownNameError, match="topic 'order' does not exist; did you mean 'orders'"):
        TopicDeleted(access, "order")
    with pytest.raises(MessageError, match=r"'a/b' is not a name of a group; give 1 to 120 letters, digits, '_'"):
        GroupCreated(access, "a/b", "orders", OffsetPosition.LATEST)
    with pytest.raises(MessageError, match="group 'billing' reads topic 'orders' already; move its offsets instead"):
        GroupCreated(access, "billing", "orders", OffsetPosition.LATEST)
    with pytest.raises(MessageError, match="topic '%RETRY%billing' is a retry topic, which the broker manages itself"):
        MessageSent(access, MessageDraft(topic="%RETRY%billing", body=b"x"))
