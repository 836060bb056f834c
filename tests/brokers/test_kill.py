"""The day something crashes: a process killed while it sends delayed messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.crash import kill_rounds
from mqtemplate.store import FlushDiskType


@pytest.mark.feature("U6", "U7", "U27")
@pytest.mark.slow
@pytest.mark.parametrize("mode", FlushDiskType)
def test_killed_while_sending_nothing_acknowledged_is_lost_doubled_or_early(
    tmp_path: Path, mode: FlushDiskType
) -> None:
    """2,000 messages by level and by time, up to ten SIGKILLs at random moments, one folder."""
    outcome = kill_rounds(tmp_path / "store", count=2_000, rounds=10, seed=20_261_121, mode=mode)

    assert outcome.kills >= 5
    assert outcome.acknowledged > 1_900
    assert outcome.lost == []
    assert outcome.doubled == []
    assert outcome.early == []
    assert outcome.cancelled > 100
    assert outcome.moved > 100
    assert outcome.not_cancelled == []
