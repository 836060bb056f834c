"""Fixture of the tests of a hand-over: two brokers in memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.handover.brokers import TwoBrokers


@pytest.fixture
def brokers() -> Iterator[TwoBrokers]:
    """An old broker that runs, and a new one."""
    brokers = TwoBrokers()
    yield brokers
    brokers.close()
