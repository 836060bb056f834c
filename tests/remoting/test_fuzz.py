"""A short run of ``bench/fuzz.py``, which sends a million damaged frames."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from bench.fuzz import Mutator, Outcome, attack, checking_client, decoding_server


@pytest.mark.parametrize("seed", [1, 2])
def test_damaged_frames_affect_only_their_own_connection(seed: int) -> None:
    server, outcome = decoding_server(), Outcome()
    server.start()

    with capture_logs() as logs, checking_client(server.address, outcome):
        attack(server.address, 1_500, seed, 8, 100.0, outcome)
    server.stop()

    assert outcome.frames >= 1_500
    assert outcome.hanging == outcome.other_errors == []
    assert outcome.survived + outcome.closed + outcome.incomplete == outcome.frames
    assert min(outcome.survived, outcome.closed, outcome.incomplete, outcome.responses, outcome.refused) > 50
    assert outcome.other_us, "the other client sent requests"
    unexpected = {"remoting.handler_failed", "remoting.work_failed", "remoting.processor_failed"}
    assert [entry for entry in logs if entry["event"] in unexpected] == []
    assert server.partial_input.held == server.unread_output.held == 0


def test_the_same_seed_yields_the_same_frames() -> None:
    """So a failure can be reproduced."""
    first, again = Mutator(7), Mutator(7)

    assert [first.next_frame() for _ in range(500)] == [again.next_frame() for _ in range(500)]
