"""The server is killed while gRPC clients work; and the rules by which `bench.grpc_ledger` finds faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.grpc_kill import kill_rounds
from bench.grpc_ledger import Delivery, Entry, Kind, Ledger
from mqtemplate.engine.pop.receipt_handle import ReceiptHandle

TOPIC = "orders"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("rounds", [2, pytest.param(40, marks=[pytest.mark.thorough, pytest.mark.timeout(1_800)])])
def test_kills_break_no_promise_to_grpc_clients(tmp_path: Path, rounds: int) -> None:
    """SIGKILLs at random moments, one store directory: nothing lost, repeated, early, or out of order."""
    ledger = kill_rounds(tmp_path, rounds, seed=20_261_128, with_push=rounds > 2)

    assert {kind: found for kind, found in ledger.faults().items() if found} == {}
    assert ledger.counts["kills"] + ledger.counts["stops"] == rounds
    assert ledger.counts["sent"] > rounds
    assert ledger.counts["acknowledged"] > rounds


# --- the rules --------------------------------------------------------------------------------------


def delivery(body: str = "a", pop_ms: int = 1_000, *, attempt: int = 1, number: int = 1, offset: int = 0) -> Delivery:
    """A delivery from the only queue, for ten seconds."""
    handle = ReceiptHandle(0, pop_ms, 10_000, 0, 0, "broker-a", 0, offset, offset)
    return Delivery(body, handle, attempt, pop_ms, 0, number)


def ledger_with(*entries: Entry) -> Ledger:
    """A ledger with messages whose sends were answered."""
    ledger = Ledger({TOPIC: 2})
    for entry in entries:
        ledger.sending(entry)
        ledger.sent(entry.body)
    return ledger


def kinds(ledger: Ledger) -> list[Kind]:
    return [kind for kind, found in ledger.faults().items() for _ in found]


def acknowledge(ledger: Ledger, received: Delivery) -> None:
    ledger.acking(received.body, received.handle)
    ledger.acked(received.body, "acknowledged")


def test_a_message_that_is_delivered_once_and_acknowledged_is_no_fault() -> None:
    ledger = ledger_with(Entry("a", TOPIC))

    assert [entry.body for entry in ledger.open()] == ["a"]
    ledger.delivered(TOPIC, delivery())
    acknowledge(ledger, delivery())

    ledger.compare(TOPIC, ["a"])
    assert (ledger.open(), kinds(ledger)) == ([], [])


def test_an_answered_message_that_is_not_stored_is_lost() -> None:
    ledger = ledger_with(Entry("a", TOPIC))

    ledger.compare(TOPIC, [])

    assert kinds(ledger) == [Kind.LOST]


def test_a_message_without_an_answer_may_be_stored_or_not() -> None:
    ledger = Ledger({})
    ledger.sending(Entry("a", TOPIC))

    ledger.compare(TOPIC, ["a"])
    ledger.compare(TOPIC, [])

    assert (ledger.open(), kinds(ledger)) == ([], [])


def test_a_delivery_after_the_answer_to_the_acknowledgement_is_a_fault() -> None:
    ledger = ledger_with(Entry("a", TOPIC))
    ledger.delivered(TOPIC, delivery())
    acknowledge(ledger, delivery())

    ledger.delivered(TOPIC, delivery(pop_ms=11_000, attempt=2))

    assert kinds(ledger) == [Kind.AGAIN]


def test_a_delivery_after_an_acknowledgement_without_an_answer_is_none() -> None:
    ledger = ledger_with(Entry("a", TOPIC))
    ledger.delivered(TOPIC, delivery())
    ledger.acking("a", delivery().handle)
    assert ledger.open() == []

    ledger.delivered(TOPIC, delivery(pop_ms=11_000, attempt=2))

    assert [entry.body for entry in ledger.open()] == ["a"]
    assert kinds(ledger) == []


def test_a_refusal_leaves_open_what_an_earlier_request_without_an_answer_did() -> None:
    """A push consumer repeats an acknowledgement after a kill. By then its handle may not be valid any more."""
    ledger = ledger_with(Entry("a", TOPIC), Entry("b", TOPIC))
    for body in "ab":
        ledger.delivered(TOPIC, delivery(body))
    ledger.acking("a", delivery("a").handle)

    ledger.acking("a", delivery("a").handle)
    ledger.refused("a", delivery("a").handle, 11_000)
    ledger.changing("a", 12_000, counts=True)
    ledger.refused("a", delivery("a").handle, 11_000)
    ledger.acking("b", delivery("b").handle)
    ledger.refused("b", delivery("b").handle, 11_000)

    assert [entry.body for entry in ledger.open()] == ["b"]


def test_a_delivery_before_the_time_of_the_last_answer_is_early() -> None:
    ledger = ledger_with(Entry("a", TOPIC))
    ledger.delivered(TOPIC, delivery())
    ledger.changing("a", 1_500, counts=True)
    ledger.changed("a", delivery().handle, delivery().handle._replace(invisible_ms=20_000), "extended", counts=True)

    ledger.delivered(TOPIC, delivery(pop_ms=20_999, attempt=2))
    ledger.delivered(TOPIC, delivery(pop_ms=30_999, attempt=3))

    assert kinds(ledger) == [Kind.EARLY]
    assert ledger.late_ms == [0, 0]


def test_an_attempt_that_was_not_counted_is_a_fault() -> None:
    """A receive without an answer may have been an attempt too."""
    ledger = ledger_with(Entry("a", TOPIC))
    ledger.delivered(TOPIC, delivery())
    ledger.receive_failed(TOPIC)
    ledger.delivered(TOPIC, delivery(pop_ms=12_000, attempt=3))
    assert kinds(ledger) == []

    ledger.delivered(TOPIC, delivery(pop_ms=23_000, attempt=3))

    assert kinds(ledger) == [Kind.ATTEMPT]


def test_a_later_message_of_a_group_before_an_open_one_is_out_of_order() -> None:
    """Messages of one receive are in order by themselves."""
    ledger = ledger_with(*(Entry(body, TOPIC, series=("g", number)) for number, body in enumerate("abc")))
    ledger.delivered(TOPIC, delivery("a"))
    ledger.delivered(TOPIC, delivery("b", offset=1))
    assert kinds(ledger) == []

    ledger.delivered(TOPIC, delivery("c", pop_ms=2_000, number=2, offset=2))

    assert kinds(ledger) == [Kind.ORDER]


def test_a_message_that_arrives_after_a_later_one_is_out_of_order() -> None:
    """Its send had no answer, so that nothing else shows it."""
    ledger = Ledger({})
    for number, body in enumerate("ab"):
        ledger.sending(Entry(body, TOPIC, series=("g", number)))

    ledger.delivered(TOPIC, delivery("b"))
    ledger.delivered(TOPIC, delivery("a", pop_ms=2_000, number=2, offset=1))

    assert kinds(ledger) == [Kind.ORDER]


def test_what_was_rolled_back_or_is_not_due_must_not_come() -> None:
    ledger = ledger_with(Entry("a", "transactions", is_wanted=False), Entry("b", TOPIC, due_ms=1_001))

    ledger.delivered("transactions", delivery("a"))
    ledger.delivered(TOPIC, delivery("b"))

    assert kinds(ledger) == [Kind.DELAYED_EARLY, Kind.ROLLED_BACK]


def test_a_check_after_the_answer_to_the_end_is_a_fault() -> None:
    ledger = ledger_with(Entry("a", "transactions"))
    ledger.ending("a", is_wanted=True)
    ledger.ended("a", 5_000, "committed")

    assert ledger.checked("a", 4_999)
    assert kinds(ledger) == []
    assert ledger.checked("a", 5_001)
    assert kinds(ledger) == [Kind.CHECKED]


def test_a_valid_handle_must_not_be_refused() -> None:
    ledger = ledger_with(Entry("a", TOPIC))
    ledger.delivered(TOPIC, delivery())
    ledger.acking("a", delivery().handle)

    ledger.refused("a", delivery().handle, 11_000)
    assert kinds(ledger) == []
    ledger.refused("a", delivery().handle, 10_999)
    assert kinds(ledger) == [Kind.REFUSED]


def test_a_dead_letter_needs_a_reason() -> None:
    ledger = ledger_with(Entry("a", TOPIC), Entry("b", TOPIC), Entry("c", TOPIC))
    ledger.delivered(TOPIC, delivery("a"))
    ledger.acking("a", delivery("a").handle, is_forwarded=True)
    ledger.delivered(TOPIC, delivery("b", attempt=2))
    for body in "ab":
        ledger.dead_letter(body)
    assert kinds(ledger) == []

    ledger.dead_letter("c")

    assert kinds(ledger) == [Kind.DEAD]
    assert ledger.open() == []


def test_a_group_has_each_dead_letter_once() -> None:
    """Its consumer may receive one again, if its acknowledgement had no answer."""
    ledger = ledger_with(Entry("a", TOPIC, is_forwarded=True), Entry("b", TOPIC, is_forwarded=True))

    for body in "aa":
        ledger.dead_letter(body)
    ledger.compare_dead_letters(["a", "b"])
    assert (ledger.open(), kinds(ledger)) == ([], [])

    ledger.compare_dead_letters(["a", "a"])
    assert kinds(ledger) == [Kind.TWICE]
