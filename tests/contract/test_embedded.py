"""Contract of the embedded broker, in memory and on disk, on a virtual and on a real clock."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import SystemClock, VirtualClock
from mqtemplate.testing.contract import (
    BrokerContract,
    BrokerUnderTest,
    GroupContract,
    PopContract,
    PullContract,
    ReceiveContract,
    ReplyContract,
    SelectorContract,
    SendContract,
    TransactionContract,
)
from tests.contract.small import SMALL, WITH_EARLY_CHECKS, on_real_time, restartable


class TestInMemory(BrokerContract):
    @pytest.fixture
    def under_test(self) -> Iterator[BrokerUnderTest]:
        with EmbeddedBroker(None, SMALL, VirtualClock()) as broker:
            yield BrokerUnderTest.on_virtual_clock(broker, max_message_bytes=SMALL.max_message_size)


class TestOnDisk(BrokerContract):
    """A restarted broker has all acknowledged messages."""

    @pytest.fixture
    def under_test(self, tmp_path: Path) -> Iterator[BrokerUnderTest]:
        clock = VirtualClock()
        with restartable(lambda: EmbeddedBroker(tmp_path, SMALL, clock)) as under_test:
            yield under_test


class _OnRealTime:
    """With threads. The contract classes with long delays run on a virtual clock only."""

    @pytest.fixture
    def under_test(self) -> Iterator[BrokerUnderTest]:
        with EmbeddedBroker(None, WITH_EARLY_CHECKS, SystemClock()) as broker:
            yield on_real_time(broker)


class TestSendingOnRealTime(_OnRealTime, SendContract): ...


class TestPullingOnRealTime(_OnRealTime, PullContract): ...


class TestGroupsOnRealTime(_OnRealTime, GroupContract): ...


class TestPopOnRealTime(_OnRealTime, PopContract): ...


class TestSelectingOnRealTime(_OnRealTime, SelectorContract): ...


class TestTransactionsOnRealTime(_OnRealTime, TransactionContract): ...


class TestRepliesOnRealTime(_OnRealTime, ReplyContract): ...


class TestReceivingOnRealTime(_OnRealTime, ReceiveContract): ...
