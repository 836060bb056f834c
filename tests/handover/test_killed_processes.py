"""Processes that are killed during a hand-over: the application with its mover, the old server, and the new one."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.hand_over_kill import kill_rounds


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old_kind", "kills", "pending"),
    [("folder", 6, 200), pytest.param("server", 40, 2_000, marks=pytest.mark.thorough)],
)
def test_kills_lose_double_and_revive_no_message(tmp_path: Path, old_kind: str, kills: int, pending: int) -> None:
    """With sends, cancels, reschedules and listeners at work, and an abort half-way; each message is in one broker."""
    result = kill_rounds(tmp_path, kills=kills, pending=pending, seed=20_261_129, old_kind=old_kind)

    assert result.kills.total() == kills
    assert result.moved > 0
    assert result.aborts == 1
    assert result.steps > 0
    assert result.faults == {}
