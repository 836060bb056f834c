"""Contract of the embedded broker, in memory and on disk, on a virtual and on a real clock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mqtemplate.broker import Broker
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
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

SMALL = EmbeddedSettings(
    mapped_file_size_commit_log=8 * 1024 * 1024,
    mapped_file_size_consume_queue=20_000,
    max_message_size=1024 * 1024,
)
WITH_EARLY_CHECKS = replace(SMALL, transaction_timeout_ms=300, transaction_check_interval_ms=300)


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

        def restart() -> Broker:
            broker = under_test.broker
            broker.close()
            again = EmbeddedBroker(tmp_path, SMALL, clock)
            again.start()
            return again

        broker = EmbeddedBroker(tmp_path, SMALL, clock)
        broker.start()
        under_test = BrokerUnderTest.on_virtual_clock(broker, restart=restart, max_message_bytes=SMALL.max_message_size)
        yield under_test
        under_test.broker.close()


class _OnRealTime:
    """With threads. The contract classes with long delays run on a virtual clock only."""

    @pytest.fixture
    def under_test(self) -> Iterator[BrokerUnderTest]:
        with EmbeddedBroker(None, WITH_EARLY_CHECKS, SystemClock()) as broker:
            yield BrokerUnderTest.on_real_clock(
                broker, max_message_bytes=SMALL.max_message_size, checks_within_ms=5_000
            )


class TestSendingOnRealTime(_OnRealTime, SendContract): ...


class TestPullingOnRealTime(_OnRealTime, PullContract): ...


class TestGroupsOnRealTime(_OnRealTime, GroupContract): ...


class TestPopOnRealTime(_OnRealTime, PopContract): ...


class TestSelectingOnRealTime(_OnRealTime, SelectorContract): ...


class TestTransactionsOnRealTime(_OnRealTime, TransactionContract): ...


class TestRepliesOnRealTime(_OnRealTime, ReplyContract): ...


class TestReceivingOnRealTime(_OnRealTime, ReceiveContract): ...
