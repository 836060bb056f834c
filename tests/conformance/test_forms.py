"""Formats of a store that RocketMQ writes with certain options: they are read, or refused with a solution."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from bench.peer.java_client import JavaClient
from bench.peer.jvm import PeerError
from bench.peer.rocketmq import NameServer, RocketMQ, broker_options
from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.errors import StoreFormatError
from mqtemplate.message import Message, MessageQueue
from tests.conformance.rocketmq_writer import TIMEOUT_MS, send_delayed
from tests.conformance.store_contents import DELAYED, ORDERS, read_all, send, settings

pytestmark = [pytest.mark.conformance, pytest.mark.thorough, pytest.mark.timeout(180)]


def test_timers_in_a_snapshot_of_the_wheel_are_delivered_once(
    tmp_path: Path, name_server: NameServer, java: JavaClient, port: int
) -> None:
    """With ``timerWheelSnapshotFlush`` the file ``timerwheel`` is all zero, and ``timerwheel.<N>`` has the slots."""
    options = broker_options(settings(port)) | {"timerWheelSnapshotFlush": "true", "timerWheelSnapshotIntervalMs": 500}
    with RocketMQ(tmp_path, name_server, options) as rocketmq:
        java.connect()
        delivered = send_delayed(java, [("timer, RocketMQ", {"delay_ms": 300})])
        assert java.read(DELAYED, 1, TIMEOUT_MS)
        delays = [(f"timer {delay_ms}", {"delay_ms": delay_ms}) for delay_ms in (4_500, 6_000, 9_500)]
        pending = send_delayed(java, delays)
        rocketmq.stop()
    snapshots = list(tmp_path.glob("timerwheel.*"))

    with EmbeddedBroker(tmp_path, settings(port)) as embedded:
        count = len(delivered + pending)
        queues = [MessageQueue(DELAYED, embedded.name, queue_id) for queue_id in range(4)]
        for queue in queues:
            at = embedded.reader.max_offset(queue)
            while sum(map(embedded.reader.max_offset, queues)) < count:
                embedded.reader.pull(queue, at, wait_ms=1_000)
        found = read_all(embedded, DELAYED)

    due_ms = {sent.body: sent.due_ms for sent in delivered + pending}
    assert snapshots
    assert Counter(message.body for message in found) == Counter(due_ms.keys())
    assert [message.body for message in found if message.store_timestamp < due_ms[message.body]] == []


def test_consume_queues_in_rocksdb_are_refused_and_can_be_rebuilt(
    tmp_path: Path, name_server: NameServer, java: JavaClient, port: int
) -> None:
    """The error tells which files to move away. The queues are rebuilt from the commit log then."""
    options = broker_options(settings(port)) | {"storeType": "defaultRocksDB"}
    with RocketMQ(tmp_path, name_server, options) as rocketmq:
        java.connect()
        java.send(*({"topic": ORDERS, "body": b"%d" % number} for number in range(10)))
        rocketmq.stop()

    with pytest.raises(StoreFormatError, match=r"RocksDB.*move consumequeue and the file checkpoint away"):
        EmbeddedBroker(tmp_path, settings(port)).start()
    for name in ("consumequeue", "checkpoint"):
        (tmp_path / name).rename(tmp_path / f"{name}-moved-away")
    with EmbeddedBroker(tmp_path, settings(port)) as embedded:
        found = read_all(embedded, ORDERS)

    assert sorted(message.body for message in found) == [b"%d" % number for number in range(10)]


def test_rocketmq_does_not_open_a_store_that_the_embedded_broker_has_open(
    tmp_path: Path, name_server: NameServer, port: int
) -> None:
    with EmbeddedBroker(tmp_path, settings(port)) as embedded:
        send(embedded, Message(ORDERS, b"before"), 0)

        with (
            pytest.raises(PeerError, match="MQ already started"),
            RocketMQ(tmp_path, name_server, broker_options(settings(port))),
        ):
            pass

        send(embedded, Message(ORDERS, b"after"), 0)
        assert [message.body for message in read_all(embedded, ORDERS)] == [b"before", b"after"]
