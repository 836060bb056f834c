"""A process that is killed while it sends delayed messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.crash import kill_rounds
from mqtemplate.store.settings import FlushDiskType


@pytest.mark.feature("U6", "U7", "U27")
@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", [FlushDiskType.SYNC_FLUSH, pytest.param(FlushDiskType.ASYNC_FLUSH, marks=pytest.mark.thorough)]
)
def test_kills_lose_or_repeat_no_acknowledged_message_and_deliver_none_early(
    tmp_path: Path, mode: FlushDiskType
) -> None:
    """2,000 messages with levels and timers, up to ten SIGKILLs at random moments, one store directory."""
    outcome = kill_rounds(tmp_path / "store", count=2_000, rounds=10, seed=20_261_121, mode=mode)

    assert outcome.kills >= 5
    assert outcome.acknowledged > 1_900
    assert outcome.lost == []
    assert outcome.doubled == []
    assert outcome.early == []
    assert outcome.cancelled > 100
    assert outcome.rescheduled > 100
    assert outcome.not_cancelled == []
