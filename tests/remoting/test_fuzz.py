"""The fuzz of ``bench/fuzz.py``, in short: the full one sends a million frames."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from bench.fuzz import Mutator, Outcome, attack, neighbour, reading_server


@pytest.mark.parametrize("seed", [1, 2])
def test_damaged_frames_harm_nobody_but_their_own_connection(seed: int) -> None:
    server, outcome = reading_server(), Outcome()
    server.start()

    with capture_logs() as logs, neighbour(server.address, outcome):
        attack(server.address, 1_500, seed, 8, 100.0, outcome)
    server.stop()

    assert outcome.frames >= 1_500
    assert outcome.stuck == outcome.neighbour_problems == []
    assert outcome.survived + outcome.closed + outcome.swallowed == outcome.frames
    assert min(outcome.survived, outcome.closed, outcome.swallowed, outcome.answers, outcome.refusals) > 50
    assert outcome.neighbour_us, "the neighbour asked"
    unforeseen = {"remoting.handler_failed", "remoting.work_failed", "remoting.processor_failed"}
    assert [entry for entry in logs if entry["event"] in unforeseen] == []
    assert server.partial_input.held == server.unread_output.held == 0


def test_the_same_seed_gives_the_same_frames() -> None:
    """A failure can be looked at again."""
    first, again = Mutator(7), Mutator(7)

    assert [first.next_frame() for _ in range(500)] == [again.next_frame() for _ in range(500)]
