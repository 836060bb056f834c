"""Delay engines: one in memory, and one on a store directory that a test may close, kill and open again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mqtemplate.clock import VirtualClock
from tests.delay.delay_engine import DelayEngine

OpenEngine = Callable[..., DelayEngine]


@pytest.fixture
def engine() -> Iterator[DelayEngine]:
    engine = DelayEngine()
    yield engine
    engine.close()


@pytest.fixture
def open_engine(tmp_path: Path) -> Iterator[OpenEngine]:
    """Open the store directory again and again, with one clock. The last engine is closed at the end."""
    clock = VirtualClock()
    engines: list[DelayEngine] = []

    def open_(**changes: Any) -> DelayEngine:
        engines.append(DelayEngine(tmp_path, **({"clock": clock} | changes)))
        return engines[-1]

    yield open_
    engines[-1].close()
