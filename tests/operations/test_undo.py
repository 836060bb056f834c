"""Changes with a preview and an audit line, and their undoing: offsets, pending messages, dead letters."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import VirtualClock
from mqtemplate.errors import MessageError
from mqtemplate.message import Message, Property
from mqtemplate.operations import (
    BrokerAccess,
    DeadLetters,
    DelayedOperations,
    LetterFilter,
    LetterState,
    OffsetPosition,
    OffsetTarget,
    PendingAction,
    PendingChange,
    plan_reset,
)
from mqtemplate.operations.audit import AuditLog, LoggedChange
from mqtemplate.operations.changes import Change, ChangeResult, UnconfirmedChangeError, carry_out, check_confirmed
from mqtemplate.operations.delayed import PendingMessagesChange
from mqtemplate.operations.letter_changes import LetterAction, LettersChange
from mqtemplate.operations.offsets import GroupForgotten, reset_change
from mqtemplate.operations.undo import undo_change, why_not_undone
from mqtemplate.pending import PendingQuery
from tests.operations.brokers import HOUR_MS


@pytest.fixture
def audit() -> AuditLog:
    return AuditLog(None, VirtualClock())


def made(change: Change, audit: AuditLog) -> LoggedChange:
    return audit.get(carry_out(change, audit, "10.0.0.7").id)


def committed(access: BrokerAccess) -> list[int | None]:
    return [access.broker.groups.committed_offset("billing", queue) for queue in access.broker.queues("orders")]


def due(access: BrokerAccess) -> dict[str | None, int]:
    return {each.keys: each.deliver_ms for each in access.broker.delayed.pending(PendingQuery(), 1_000).messages}


def change_of(access: BrokerAccess, change: PendingChange) -> Change:
    return PendingMessagesChange(access, lambda of: DelayedOperations(of).all(PendingQuery()), change, {"filter": {}})


# --- offsets ------------------------------------------------------------------------------------


def test_a_reset_is_shown_with_its_messages_and_undone(access: BrokerAccess, audit: AuditLog) -> None:
    changes = plan_reset(access, "billing", "orders", OffsetTarget(position=OffsetPosition.LATEST))
    reset = reset_change(access, "billing", changes, topic="orders")

    preview = reset.preview
    assert (preview.count, preview.skipped, preview.again, preview.topics) == (4, 4, 0, {"orders": 4})
    assert [(each.before, each.after) for each in preview.offsets] == [(3, 5), (3, 5)]
    assert preview.first_ms is not None
    assert reset.title == "Set 2 offsets of group 'billing': skip 4 messages"
    logged = made(reset, audit)
    assert committed(access) == [5, 5]
    assert [(each["queue"], each["before"], each["after"]) for each in logged.old()] == [(0, 3, 5), (1, 3, 5)]

    undo = undo_change(access, logged)
    assert (undo.preview.again, undo.title) == (4, "Set 2 offsets of group 'billing': deliver 4 messages again")
    undone = made(undo, audit)
    assert committed(access) == [3, 3]
    assert why_not_undone(audit.get(logged.id)) == f"it was undone already, by change {undone.id}"

    made(undo_change(access, undone), audit)
    assert committed(access) == [5, 5]


def test_a_forgotten_group_gets_its_offsets_again(access: BrokerAccess, audit: AuditLog) -> None:
    forgotten = GroupForgotten(access, "billing")
    assert (forgotten.preview.count, forgotten.needs_confirmation) == (4, True)
    logged = made(forgotten, audit)
    assert committed(access) == [None, None]

    made(undo_change(access, logged), audit)

    assert committed(access) == [3, 3]


def test_a_queue_without_an_offset_before_gets_its_first_one_again(audit: AuditLog) -> None:
    with EmbeddedBroker() as broker:
        broker.create_topic("orders", 1)
        for _ in range(3):
            broker.sends.send(Message("orders", b"x"))
        [queue] = broker.queues("orders")
        broker.groups.commit_offset("others", queue, 0)
        access = BrokerAccess(broker)
        broker.groups.commit_offset("billing", broker.queues("orders")[0], 3)
        logged = _logged_without_offset(audit, broker.name)

        undo = undo_change(access, logged)

        assert undo.preview.again == 3
        assert undo.preview.notes == (
            f"queue orders/{broker.name}/0 had no offset; it gets that of its first message.",
        )


def _logged_without_offset(audit: AuditLog, broker: str) -> LoggedChange:
    old = [{"topic": "orders", "broker": broker, "queue": 0, "before": None, "after": 3}]
    with audit.change("offsets.reset", "10.0.0.7", old, group="billing") as entry:
        pass
    return audit.get(entry.id)


# --- pending messages ---------------------------------------------------------------------------


def test_pending_messages_are_shown_by_topic_and_tag_with_their_times(access: BrokerAccess) -> None:
    change = change_of(access, PendingChange(PendingAction.CANCEL))
    times = due(access)

    preview = change.preview

    assert (preview.count, preview.topics, preview.tags) == (4, {"reminders": 4}, {"reminder": 3, "": 1})
    assert (preview.first_ms, preview.last_ms, preview.time_name) == (min(times.values()), max(times.values()), "due")
    assert change.title == "Cancel 4 pending messages"


def test_shifted_messages_get_their_old_times_again(access: BrokerAccess, audit: AuditLog) -> None:
    before = due(access)
    logged = made(change_of(access, PendingChange(PendingAction.SHIFT, HOUR_MS)), audit)
    assert due(access) == {key: time + HOUR_MS for key, time in before.items()}

    undo = undo_change(access, logged)
    assert undo.title == "Give 4 pending messages the old deliver times"
    undone = made(undo, audit)
    assert due(access) == before

    made(undo_change(access, undone), audit)
    assert due(access) == {key: time + HOUR_MS for key, time in before.items()}


def test_messages_that_were_delivered_or_cancelled_since_are_left_alone(access: BrokerAccess, audit: AuditLog) -> None:
    logged = made(change_of(access, PendingChange(PendingAction.SHIFT, HOUR_MS)), audit)
    assert DelayedOperations(access).cancel("due-1").count == 1

    undo = undo_change(access, logged)

    assert undo.preview.count == 3
    assert undo.preview.notes == ("1 of the messages are not pending any more, and stay as they are.",)


def test_cancelled_messages_come_back_as_copies_with_new_ids_due_at_the_old_times(
    access: BrokerAccess, audit: AuditLog
) -> None:
    before, pending = due(access), DelayedOperations(access)
    ids = {each.keys: each.msg_id for each in pending.all(PendingQuery())}
    logged = made(change_of(access, PendingChange(PendingAction.CANCEL)), audit)
    assert due(access) == {}

    undo = undo_change(access, logged)
    assert undo.title == "Send copies of 4 cancelled messages with new ids, due at the old times"
    undone = made(undo, audit)

    assert due(access) == before
    [copy] = pending.find("due-30")
    stored = pending.stored(copy)
    assert stored is not None
    assert (stored.body, copy.tags, copy.topic) == (b"in 30 hours", "reminder", "reminders")
    assert copy.msg_id != ids["due-30"]
    assert stored.properties["cancel_undone_of"] == ids["due-30"]
    with pytest.raises(MessageError, match="cannot be undone: copies were sent: cancel them by their keys or ids"):
        undo_change(access, undone)


def test_a_copy_keeps_the_pending_key_and_another_message_under_it(access: BrokerAccess, audit: AuditLog) -> None:
    """The undo of a cancel is no new request: what was sent under the key since then stays."""
    sends, pending = access.open_for_changes().sends, access.broker.delayed

    def message(body: bytes, key: str) -> Message:
        properties = {Property.KEYS: body.decode(), Property.PENDING_KEY: key, Property.TIMER_DELAY_MS: str(HOUR_MS)}
        return Message("carts", body, properties)

    for number in (1, 2):
        sends.send(message(b"old-%d" % number, f"cart-{number}"))
    of_carts = PendingQuery(topic="carts")
    cancel = PendingChange(PendingAction.CANCEL)
    logged = made(PendingMessagesChange(access, lambda of: DelayedOperations(of).all(of_carts), cancel, {}), audit)
    sends.send(message(b"new-2", "cart-2"))

    undo = undo_change(access, logged)
    notes, undone = undo.preview.notes, made(undo, audit)

    assert notes == ("2 of them have a pending key: none is sent while another is pending under its key.",)
    assert undone.facts["sent"] == undone.facts["kept"] == 1
    found = {each.keys: each.pending_key for each in pending.pending(of_carts).messages}
    assert found == {"old-1": "cart-1", "new-2": "cart-2"}
    later = sends.send(message(b"new-1", "cart-1"))
    assert len(later.replaced) == 1


@pytest.mark.parametrize("sent", [0, 1, 3])
def test_an_undo_that_was_interrupted_sends_each_copy_once_when_it_is_repeated(
    access: BrokerAccess, audit: AuditLog, monkeypatch: pytest.MonkeyPatch, sent: int
) -> None:
    """The response to a send is lost as well: the copy is stored, and the undo does not know it."""
    before = due(access)
    logged = made(change_of(access, PendingChange(PendingAction.CANCEL)), audit)
    sends = access.open_for_changes().sends
    with monkeypatch.context() as patch:
        left = iter(range(sent))
        send = type(sends).send

        def send_until_cut(self: object, message: Message, *args: object, **options: object) -> object:
            result = send(sends, message, *args, **options)  # type: ignore[arg-type]
            if next(left, None) is None:
                raise ConnectionResetError("the connection was cut")
            return result

        patch.setattr(type(sends), "send", send_until_cut)
        with pytest.raises(ConnectionResetError):
            made(undo_change(access, logged), audit)
    assert len(due(access)) == sent + 1

    again = undo_change(access, audit.get(logged.id))

    assert again.preview.count == 4 - sent - 1
    assert again.preview.notes == (f"{sent + 1} of the messages have a copy already, of an undo that was interrupted.",)
    if not again.preview.is_empty:
        made(again, audit)
    assert due(access) == before
    found = list(DelayedOperations(access).all(PendingQuery()))
    assert (len(found), len({each.msg_id for each in found})) == (4, 4)


def test_a_cancel_that_has_failed_restores_no_message_that_is_pending(access: BrokerAccess, audit: AuditLog) -> None:
    """A copy beside it would be delivered twice."""
    change = change_of(access, PendingChange(PendingAction.CANCEL))
    with suppress(OSError), audit.change(change.action, None, change.old_values()):
        assert DelayedOperations(access).cancel("due-2").count == 1
        raise OSError("disk full")

    undo = undo_change(access, audit.recent(1)[0])

    assert undo.preview.count == 1
    assert undo.preview.notes == ("3 of the messages were not cancelled: they are pending, or were delivered.",)


def test_a_copy_of_a_message_that_was_due_meanwhile_is_delivered_at_once(audit: AuditLog) -> None:
    clock = VirtualClock()
    with EmbeddedBroker(clock=clock) as broker:
        access = BrokerAccess(broker)
        broker.sends.send(Message("reminders", b"x", {Property.TIMER_DELAY_MS: str(HOUR_MS), Property.KEYS: "k"}))
        logged = made(change_of(access, PendingChange(PendingAction.CANCEL)), audit)
        clock.move_ms(2 * HOUR_MS)

        undo = undo_change(access, logged)
        assert undo.preview.notes == ("1 of them were due meanwhile, and are delivered at once.",)
        made(undo, audit)

        assert due(access) == {}
        assert [each.body for each in broker.reader.messages_by_key("reminders", "k", 9)] == [b"x"]


def test_a_change_reaches_no_more_messages_than_its_preview_showed(access: BrokerAccess, audit: AuditLog) -> None:
    change = change_of(access, PendingChange(PendingAction.CANCEL))

    with pytest.raises(MessageError, match="the preview showed 3, and the change would reach more of them now"):
        carry_out(change, audit, "10.0.0.7", expected=3)

    assert len(due(access)) == 4
    assert audit.recent(1) == []


def test_a_change_of_many_needs_the_number_of_its_preview(access: BrokerAccess) -> None:
    change = change_of(access, PendingChange(PendingAction.CANCEL))

    with pytest.raises(UnconfirmedChangeError, match="^Cancel 4 pending messages: look at the preview with dryRun"):
        check_confirmed(change, None)
    with pytest.raises(UnconfirmedChangeError, match="the preview showed 2, and the change would reach 4; nothing was"):
        check_confirmed(change, 2)
    check_confirmed(change, 4)


def test_one_message_that_was_named_needs_no_confirmation(access: BrokerAccess) -> None:
    pending = DelayedOperations(access)
    [one] = pending.find("due-2")
    named = PendingMessagesChange(access, lambda _: [one], PendingChange(PendingAction.CANCEL), {}, is_named=True)

    assert not named.needs_confirmation
    check_confirmed(named, None)


# --- dead letters -------------------------------------------------------------------------------


def letters(access: BrokerAccess, state: LetterState | None = LetterState.OPEN) -> list[str | None]:
    return sorted(each.message.keys or "" for each in DeadLetters(access).find("billing", LetterFilter(state=state)))


def change_of_letters(access: BrokerAccess, action: LetterAction) -> LettersChange:
    return LettersChange(access, "billing", list(DeadLetters(access).find("billing")), action)


def test_purged_dead_letters_are_open_again(access: BrokerAccess, audit: AuditLog) -> None:
    change = change_of_letters(access, LetterAction.PURGE)
    assert (change.preview.count, change.preview.topics, change.preview.tags) == (
        3,
        {"orders": 3},
        {"open": 2, "paid": 1},
    )
    logged = made(change, audit)
    assert letters(access) == []

    undo = undo_change(access, logged)
    assert undo.title == "Give 3 dead letters the state of before the purge"
    result: ChangeResult = carry_out(undo, audit, "10.0.0.7")

    assert (result.text, letters(access)) == ("3 dead letters are as before", ["order-0", "order-1", "order-2"])


def test_a_resend_is_not_undone(access: BrokerAccess, audit: AuditLog) -> None:
    logged = made(change_of_letters(access, LetterAction.RESEND), audit)

    with pytest.raises(
        MessageError,
        match=rf"change {logged.id} \(dead_letters.resend\) cannot be undone: the messages were sent, and listeners",
    ):
        undo_change(access, logged)


def test_a_change_without_an_opposite_is_not_undone(access: BrokerAccess, audit: AuditLog, tmp_path: Path) -> None:
    with audit.change("schedule.pause", "10.0.0.7") as entry:
        pass

    with pytest.raises(MessageError, match=r"schedule.pause has no undo; make the opposite change"):
        undo_change(access, audit.get(entry.id))
