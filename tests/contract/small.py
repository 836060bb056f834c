"""Embedded brokers with small files for the contract: one that restarts, and one on real time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from mqtemplate.broker import Broker
from mqtemplate.brokers import EmbeddedSettings
from mqtemplate.testing.contract import BrokerUnderTest

SMALL = EmbeddedSettings(
    mapped_file_size_commit_log=8 * 1024 * 1024,
    mapped_file_size_consume_queue=20_000,
    max_message_size=1024 * 1024,
)
WITH_EARLY_CHECKS = replace(SMALL, transaction_timeout_ms=300, transaction_check_interval_ms=300)


@contextmanager
def restartable(create: Callable[[], Broker]) -> Iterator[BrokerUnderTest]:
    """Yield a broker on a virtual clock that a test can restart.

    Args:
        create: Returns a broker over the same files each time.
    """

    def started() -> Broker:
        broker = create()
        broker.start()
        return broker

    def restart() -> Broker:
        under_test.broker.close()
        return started()

    under_test = BrokerUnderTest.on_virtual_clock(started(), restart=restart, max_message_bytes=SMALL.max_message_size)
    yield under_test
    under_test.broker.close()


def on_real_time(broker: Broker) -> BrokerUnderTest:
    """Return a broker with `WITH_EARLY_CHECKS`, which is started, with threads."""
    return BrokerUnderTest.on_real_clock(broker, max_message_bytes=SMALL.max_message_size, checks_within_ms=5_000)
