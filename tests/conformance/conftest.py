"""A real Apache RocketMQ beside the tests; where there is none, they are skipped with the reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.peer.rocketmq import JavaClient, NameServer, free_port, why_not


@pytest.fixture(scope="session")
def name_server() -> Iterator[NameServer]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with NameServer() as server:
        yield server


@pytest.fixture(scope="session")
def java(name_server: NameServer) -> Iterator[JavaClient]:
    """RocketMQ's client and tools; a test connects it to the broker it started."""
    with JavaClient(name_server) as client:
        yield client


@pytest.fixture(scope="session")
def port(name_server: NameServer) -> int:
    """Where the brokers listen, theirs and (in ids) ours: an offset message id names the broker's address."""
    return free_port()
