"""Numbers of dead letters by state: what was sent again or purged does not wait for an operator."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import VirtualClock
from mqtemplate.message import Message, Property
from mqtemplate.operations import BrokerAccess, DeadLetters
from mqtemplate.operations.bulk import DAY_MS, yesterday_of
from mqtemplate.operations.dead_letters import LetterCounts, LetterMarks, LetterState
from mqtemplate.record.dead_letter import EXCEPTION
from mqtemplate.testing import Harness
from tests.operations.brokers import access_of


@pytest.mark.parametrize("kind", ["memory", "server"])
def test_open_dead_letters_become_fewer_when_they_are_sent_again_or_purged(kind: str, tmp_path: Path) -> None:
    with access_of(kind, tmp_path) as access:
        letters = DeadLetters(access)
        before = letters.counts()
        first, second, _ = letters.find("billing")
        letters.resend([first])
        letters.purge([second])
        letters.purge([first])  # the last action counts

        after = letters.counts()["billing"]

    assert before == {"billing": LetterCounts(3)}
    assert before["billing"].open == 3
    assert (after, after.open) == (LetterCounts(3, resent=0, purged=2), 1)


def test_marks_of_dead_letters_that_were_deleted_do_not_count(tmp_path: Path) -> None:
    """Else the number of open ones would fall below the truth, since the marks are younger than the dead letters."""
    settings = dataclasses.replace(
        EmbeddedSettings(),
        mapped_file_size_commit_log=65_536,
        mapped_file_size_consume_queue=10_000,
        dead_letter_reserved_time=1,
        file_reserved_time=1,
    )
    with EmbeddedBroker(tmp_path, settings, VirtualClock()) as broker:
        harness, letters = Harness(broker), DeadLetters(BrokerAccess(broker))
        for number in range(4):
            broker.sends.send(Message("%DLQ%billing", b"%d" % number + bytes(20_000)))
        letters.purge(list(letters.find("billing")))
        harness.advance("2d")
        left = letters.counts()["billing"]
        broker.sends.send(Message("%DLQ%billing", b"new"))

        assert left.purged == left.stored == 1, "the first file had three of them"
        assert letters.counts()["billing"].open == 1


def test_a_mark_of_another_program_does_not_count() -> None:
    with EmbeddedBroker(clock=VirtualClock()) as broker:
        access = BrokerAccess(broker)
        broker.sends.send(Message("%DLQ%billing", b"x"))
        LetterMarks(access).add("billing", LetterState.PURGED, ["not an id"])

        assert DeadLetters(access).counts() == {"billing": LetterCounts(1)}


def test_a_group_has_its_newest_dead_letter_and_the_numbers_of_two_days() -> None:
    """The last day is the last 24 hours; yesterday is between two local midnights."""
    start_ms, end_ms = yesterday_of(VirtualClock().now_ms() + 5 * DAY_MS)
    clock = VirtualClock(start_ms - DAY_MS)
    with EmbeddedBroker(clock=clock) as broker:
        for name, time_ms in (("old", start_ms - 1), ("first", start_ms), ("late", end_ms - 1), ("new", end_ms)):
            clock.set_ms(time_ms)
            broker.sends.send(Message("%DLQ%billing", b"x", {Property.KEYS: name, EXCEPTION: f"E{name}"}))
        clock.set_ms(end_ms + 3_600_000)
        letters = DeadLetters(BrokerAccess(broker))
        letters.purge(list(letters.find("billing"))[:1])

        found = letters.summaries()["billing"]

    assert (found.counts.open, found.counts.purged, found.yesterday, found.last_day) == (3, 1, 2, 2)
    assert found.newest is not None
    assert (found.newest.message.keys, found.newest.cause) == ("new", "Enew")


def test_a_group_whose_dead_letters_were_deleted_has_no_newest_one() -> None:
    with EmbeddedBroker(clock=VirtualClock()) as broker:
        broker.create_topic("%DLQ%billing", 1)

        found = DeadLetters(BrokerAccess(broker)).summaries()["billing"]

    assert (found.newest, found.last_day, found.yesterday) == (None, 0, 0)
