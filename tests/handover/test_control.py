"""Status of a hand-over, and its changes by operators."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mqtemplate.broker.hand_over import HandOverError, HandOverPhase
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import VirtualClock
from mqtemplate.errors import BrokerError, SendError
from mqtemplate.handover.control import HandOverAction, HandOverChanged, HandOverStarted, read_status, status_lines
from mqtemplate.handover.mover import Mover
from mqtemplate.handover.plan import create_plan
from mqtemplate.message import Message, Property
from mqtemplate.operations.audit import AuditLog
from mqtemplate.operations.changes import Change, ChangeResult, carry_out

HOUR_MS = 3_600_000
CLOCK_MS = 1_764_547_200_000


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    monkeypatch.setenv("TZ", "UTC")
    return VirtualClock(CLOCK_MS)


@pytest.fixture
def old(clock: VirtualClock) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(clock=clock) as broker:
        broker.create_topic("orders", 2)
        queue = broker.queues("orders")[0]
        for _ in range(5):
            broker.sends.send(Message("orders", b"x"), queue)
        broker.groups.commit_offset("billing", queue, 2)
        for hours in (1, 2, 30):
            due = {Property.TIMER_DELAY_MS: str(hours * HOUR_MS)}
            broker.sends.send(Message("reminders", b"x", due))
        yield broker


@pytest.fixture
def new(clock: VirtualClock) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(clock=clock) as broker:
        yield broker


@pytest.fixture
def audit(clock: VirtualClock) -> AuditLog:
    return AuditLog(None, clock)


def start(old: EmbeddedBroker, new: EmbeddedBroker, audit: AuditLog) -> ChangeResult:
    plan = create_plan(old, new, source="embedded:./data", target="mq1:9876", rate=100)
    return carry_out(HandOverStarted(old, new, plan), audit, place="embedded:./data")


def change(old: EmbeddedBroker, action: HandOverAction, audit: AuditLog) -> Change:
    found = HandOverChanged(old, action)
    carry_out(found, audit, place="embedded:./data")
    return found


def test_a_start_creates_topics_and_groups_and_leaves_an_audit_line(
    old: EmbeddedBroker, new: EmbeddedBroker, audit: AuditLog
) -> None:
    start(old, new, audit)

    state = old.hand_over.state()
    assert state is not None
    assert (state.phase, state.target) == (HandOverPhase.RUNNING, "mq1:9876")
    assert len(new.queues("orders")) == 2
    line = audit.recent(10)[-1]
    assert (line.action, line.facts["source"], line.facts["target"]) == (
        "hand_over.start",
        "embedded:./data",
        "mq1:9876",
    )


def test_the_preview_of_a_start_names_what_it_creates(old: EmbeddedBroker, new: EmbeddedBroker) -> None:
    plan = create_plan(old, new, source="embedded:./data", target="mq1:9876", rate=100)

    found = HandOverStarted(old, new, plan)

    assert found.title == "Start the hand-over from embedded:./data to mq1:9876"
    assert found.preview.count == 3
    assert "topics to create: orders (2 queues), reminders (4 queues)" in found.preview.notes
    assert "groups to create: billing" in found.preview.notes


def test_the_status_has_progress_days_and_lags_of_both_brokers(
    old: EmbeddedBroker, new: EmbeddedBroker, audit: AuditLog, clock: VirtualClock
) -> None:
    assert read_status(old, new) is None
    start(old, new, audit)
    mover = Mover(old, new)
    mover.step()
    clock.set_ms(CLOCK_MS + 1_500)

    status = read_status(old, new)

    assert status is not None
    assert (status.counts.moved, status.counts.pending, status.total, status.done_ratio) == (3, 0, 3, 1.0)
    assert status.rate == 2.0
    assert [(each.name, each.old, each.new) for each in status.groups] == [("billing", 3, None)]
    assert any("billing" in text for text in status.remaining)
    assert status.document()["phase"] == "RUNNING"


def test_what_is_left_is_counted_by_day(old: EmbeddedBroker, new: EmbeddedBroker, audit: AuditLog) -> None:
    start(old, new, audit)

    status = read_status(old, new)

    assert status is not None
    assert status.days == {"2025-12-01": 2, "2025-12-02": 1}
    text = "\n".join(status_lines(status.document()))
    assert "to mq1:9876: RUNNING" in text
    assert "[----------------------------------------] 0%" in text
    assert "0 moved, 0 in transit, 3 pending" in text
    assert "left by day: 2025-12-01 2, 2025-12-02 1" in text


def test_what_the_new_broker_cannot_hold_yet_is_not_estimated(
    old: EmbeddedBroker, audit: AuditLog, clock: VirtualClock
) -> None:
    """Of three messages two are in its range: the third one moves in a month, whatever the rate."""
    old.sends.send(Message("reminders", b"x", {Property.TIMER_DELAY_MS: str(30 * 24 * HOUR_MS)}))
    with EmbeddedBroker(settings=EmbeddedSettings(timer_max_delay_sec=3 * 86_400), clock=clock) as new:
        start(old, new, audit)
        status = read_status(old, new)

    assert status is not None
    assert (status.stays, status.left_at(2.0)) == (1, 1_500)
    assert "1 of them stay until they come into the range" in "\n".join(status_lines(status.document()))


def test_an_abort_names_the_groups_that_still_read_the_new_broker(
    old: EmbeddedBroker, new: EmbeddedBroker, audit: AuditLog
) -> None:
    """The setting stays until they have consumed it."""
    start(old, new, audit)
    new.sends.send(Message("orders", b"x"))
    for queue in new.queues("orders"):
        new.groups.commit_offset("billing", queue, 0)
    old.hand_over.change(HandOverPhase.ABORTING)

    before = read_status(old, new)
    for queue in new.queues("orders"):
        new.groups.commit_offset("billing", queue, new.reader.max_offset(queue))
    after = read_status(old, new)

    assert before is not None
    assert after is not None
    assert status_lines(before.document())[-1] == "not consumed at the new broker yet, by group: billing 1"
    assert status_lines(after.document())[-1] == "not consumed at the new broker yet, by group: nothing"


def test_an_aborted_hand_over_is_started_again(old: EmbeddedBroker, new: EmbeddedBroker, audit: AuditLog) -> None:
    start(old, new, audit)
    old.hand_over.change(HandOverPhase.ABORTING)
    old.hand_over.change(HandOverPhase.ABORTED)

    start(old, new, audit)

    state = old.hand_over.state()
    assert state is not None
    assert state.phase is HandOverPhase.RUNNING


def test_a_new_broker_that_is_down_hides_no_status(
    old: EmbeddedBroker, new: EmbeddedBroker, audit: AuditLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(old, new, audit)

    def fail() -> None:
        raise BrokerError("no answer")

    monkeypatch.setattr(new, "admin", fail)

    status = read_status(old, new)

    assert status is not None
    assert [each.new for each in status.groups] == [None]


def test_pause_resume_and_abort_change_the_phase_and_leave_audit_lines(
    old: EmbeddedBroker, new: EmbeddedBroker, audit: AuditLog
) -> None:
    start(old, new, audit)
    phases = []
    for action in (HandOverAction.PAUSE, HandOverAction.RESUME, HandOverAction.ABORT):
        found = change(old, action, audit)
        assert "mq1:9876" in found.title
        state = old.hand_over.state()
        assert state is not None
        phases.append(state.phase)

    assert phases == [HandOverPhase.PAUSED, HandOverPhase.RUNNING, HandOverPhase.ABORTING]
    actions = [each.action for each in audit.recent(10)]
    assert set(actions) == {"hand_over.abort", "hand_over.pause", "hand_over.resume", "hand_over.start"}


def test_a_confirmation_is_refused_while_the_old_broker_is_not_empty(
    old: EmbeddedBroker, new: EmbeddedBroker, audit: AuditLog
) -> None:
    start(old, new, audit)

    with pytest.raises(HandOverError, match=r"the old broker is not empty: .*pending.*hand-over status"):
        HandOverChanged(old, HandOverAction.CONFIRM)


def test_a_confirmation_seals_an_empty_broker(old: EmbeddedBroker, new: EmbeddedBroker, audit: AuditLog) -> None:
    start(old, new, audit)
    mover = Mover(old, new)
    mover.step()
    old.groups.commit_offset("billing", old.queues("orders")[0], 5)

    confirmed = HandOverChanged(old, HandOverAction.CONFIRM)
    assert "Remove mqtemplate.hand-over from application.yml" in confirmed.note
    carry_out(confirmed, audit, place="embedded:./data")

    state = old.hand_over.state()
    assert state is not None
    assert state.phase is HandOverPhase.CONFIRMED
    with pytest.raises(SendError, match=r"has moved to mq1:9876.*remove mqtemplate.hand-over"):
        old.sends.send(Message("orders", b"x"))


def test_the_group_of_the_mover_is_no_group_of_the_application(
    old: EmbeddedBroker, new: EmbeddedBroker, audit: AuditLog
) -> None:
    """The metrics read the queues of all groups, and those of the transit topic belong to the broker."""
    start(old, new, audit)
    Mover(old, new).step()

    assert set(old.groups.consumed_topics() or ()) == {"billing"}


def test_a_change_needs_a_hand_over(old: EmbeddedBroker) -> None:
    with pytest.raises(HandOverError, match=r"there is no hand-over from broker .*hand-over start"):
        HandOverChanged(old, HandOverAction.PAUSE)
