"""Outbox and inbox while their processes are killed: the bench of 500 rounds, in short."""

from __future__ import annotations

import re

import pytest

from tests.outbox.postgres import binaries
from tests.programs import ROOT, run_python


@pytest.mark.slow
@pytest.mark.timeout(300)  # a hang guard: two processes start in each round
@pytest.mark.feature("X15")
@pytest.mark.parametrize("database", ["sqlite", pytest.param("postgresql", marks=pytest.mark.thorough)])
def test_every_effect_happens_once_while_both_sides_are_killed(database: str) -> None:
    """A process of its own forks producer and consumer. This one may have threads."""
    if database == "postgresql" and binaries() is None:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")

    done = run_python(ROOT, "-m", "bench.effect_once", "5", "7", database)

    assert done.returncode == 0, done.stdout + done.stderr
    counts = dict(re.findall(r"^  (.+?)  +(\d+) ", done.stdout, re.MULTILINE))
    assert int(re.findall(r"(\d+) orders", done.stdout)[0]) > 0
    assert counts.pop("repeats that the inbox recognised") is not None
    assert counts == {
        "lost effects": "0",
        "repeated effects": "0",
        "effects without an order": "0",
        "messages left in the outbox": "0",
    }
