"""Contract of the broker of a hand-over: nothing of the ordinary behaviour is lost while two brokers are one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings, RemoteBroker, RemoteSettings
from mqtemplate.clock import Clock, SystemClock, VirtualClock
from mqtemplate.handover import HandOverBroker, HandOverOptions, MoverSettings
from mqtemplate.testing.contract import (
    BrokerContract,
    BrokerUnderTest,
    GroupContract,
    PopContract,
    ReceiveContract,
    RetryContract,
)
from tests.brokers.remote.clients import server
from tests.contract.small import SMALL, WITH_EARLY_CHECKS, on_real_time, restartable


def both(clock: Clock, settings: EmbeddedSettings = SMALL, folder: Path | None = None) -> HandOverBroker:
    """Return the broker of a hand-over between two embedded brokers of one name."""
    old, new = (None, None) if folder is None else (folder / "old", folder / "new")
    return HandOverBroker(EmbeddedBroker(old, settings, clock), EmbeddedBroker(new, settings, clock))


class TestInMemory(BrokerContract):
    @pytest.fixture
    def under_test(self) -> Iterator[BrokerUnderTest]:
        with both(VirtualClock()) as broker:
            yield BrokerUnderTest.on_virtual_clock(broker, max_message_bytes=SMALL.max_message_size)


class TestOnDisk(BrokerContract):
    """Both brokers are restarted."""

    @pytest.fixture
    def under_test(self, tmp_path: Path) -> Iterator[BrokerUnderTest]:
        clock = VirtualClock()
        with restartable(lambda: both(clock, SMALL, tmp_path)) as under_test:
            yield under_test


class _OnRealTime:
    """With threads, one of which waits for the old broker."""

    @pytest.fixture
    def under_test(self) -> Iterator[BrokerUnderTest]:
        with both(SystemClock(), WITH_EARLY_CHECKS) as broker:
            yield on_real_time(broker)


class TestGroupsOnRealTime(_OnRealTime, GroupContract): ...


class TestPopOnRealTime(_OnRealTime, PopContract): ...


class TestReceivingOnRealTime(_OnRealTime, ReceiveContract): ...


@pytest.mark.slow
class TestOverServers(GroupContract, PopContract, RetryContract, ReceiveContract):
    """Two servers and their clients, over real sockets. A mover looks for pending messages meanwhile."""

    @pytest.fixture
    def under_test(self, tmp_path: Path) -> Iterator[BrokerUnderTest]:
        with server() as old, server() as new:
            clients = [
                RemoteBroker(RemoteSettings(name_servers=(str(each.address),), offset_path=tmp_path / name))
                for name, each in (("old", old), ("new", new))
            ]
            with HandOverBroker(*clients, HandOverOptions(mover=MoverSettings())) as broker:
                yield BrokerUnderTest.on_real_clock(broker)
