"""A plain stream with a group shows its progress on the broker. Without Spark's JVM."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

pytest.importorskip("pyspark")


from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.errors import StoreError
from mqtemplate.message import Message, MessageQueue
from mqtemplate.server.local_address import LocalServerAddress
from mqtemplate.spark import LocalServer, source_schema
from mqtemplate.spark.reader.options import SourceOptions
from mqtemplate.spark.reader.source import StreamReader
from mqtemplate.spark.records.versions import ReadAllAvailable


def reader(broker: EmbeddedBroker) -> StreamReader:
    options = {"store": str(broker.path), "topic": "orders", "group": "billing"}
    return StreamReader(SourceOptions.parse(options, streaming=True), source_schema())


def test_the_end_of_a_batch_is_committed_for_the_group_and_never_goes_back(broker: EmbeddedBroker) -> None:
    queue = MessageQueue("orders", broker.name, 0)
    for _ in range(5):
        broker.sends.send(Message("orders", b"x"), queue)

    with LocalServer(broker):
        reader(broker).commit({"orders": {"0": 4}})
        reader(broker).commit({"orders": {"0": 2}})

    assert broker.groups.committed_offset("billing", queue) == 4


def test_a_query_of_what_is_available_now_commits_its_last_batch(broker: EmbeddedBroker) -> None:
    """Spark calls ``commit`` for a batch with the next one, and asks for an end after the last batch."""
    queue = MessageQueue("orders", broker.name, 0)
    for _ in range(5):
        broker.sends.send(Message("orders", b"x"), queue)
    query = reader(broker)

    with LocalServer(broker):
        query.prepareForTriggerAvailableNow()
        end = query.latestOffset(query.initialOffset(), ReadAllAvailable())
        before = broker.groups.committed_offset("billing", queue)
        assert query.latestOffset(end, ReadAllAvailable()) == end

    assert before is None
    assert broker.groups.committed_offset("billing", queue) == 5


def test_a_second_query_of_a_group_is_reported_once(broker: EmbeddedBroker) -> None:
    """Each would set the group's offset for the other, and a third one that starts at the group misses messages."""
    queue = MessageQueue("orders", broker.name, 0)
    for _ in range(5):
        broker.sends.send(Message("orders", b"x"), queue)
    slow, fast = reader(broker), reader(broker)

    with LocalServer(broker), capture_logs() as events:
        fast.commit({"orders": {"0": 4}})
        broker.groups.committed.persist()
        slow.commit({"orders": {"0": 2}})
        slow.commit({"orders": {"0": 3}})

    assert [
        (each["event"], each["group"], each["offset"], each["committed"]) for each in events if "group" in each
    ] == [("spark.group_shared", "billing", 2, 4)]


def test_without_a_server_in_the_owner_the_checkpoint_alone_has_the_progress(broker: EmbeddedBroker) -> None:
    broker.sends.send(Message("orders", b"x"))
    reader(broker).commit({"orders": {"0": 1}})

    assert broker.groups.committed_offset("billing", MessageQueue("orders", broker.name, 0)) is None


def test_servers_of_one_folder_share_one_address_until_the_last_stops(broker: EmbeddedBroker) -> None:
    """Two listeners of an application: the first that stops must not end the writes of the other."""
    first, second = LocalServer(broker), LocalServer(broker)
    first.start()
    second.start()
    address = LocalServerAddress.read(str(broker.path))
    first.stop()
    first.stop()

    assert LocalServerAddress.read(str(broker.path)) == address is not None
    second.stop()
    assert LocalServerAddress.read(str(broker.path)) is None


def test_a_damaged_address_says_what_to_do(broker: EmbeddedBroker) -> None:
    assert broker.path is not None
    (broker.path / "config" / "localServer.json").write_text("{")

    with pytest.raises(StoreError, match="localServer.json cannot be read .* delete it, and start its server again"):
        LocalServerAddress.read(broker.path)
