"""The sink's tasks and the pending view on Apache RocketMQ: at least once, as far as its brokers list. Without JVM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pa = pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")

from mqtemplate.brokers import RemoteBroker, RemoteSettings  # noqa: E402
from mqtemplate.errors import UnsupportedError  # noqa: E402
from mqtemplate.message import SendSequence  # noqa: E402
from mqtemplate.spark.location.cluster_connection import close_connections  # noqa: E402
from mqtemplate.spark.pending.reader import (  # noqa: E402
    PendingOptions,
    PendingReader,
)
from mqtemplate.spark.sink.options import SinkOptions  # noqa: E402
from mqtemplate.spark.sink.writer import Published, publish  # noqa: E402
from mqtemplate.testing import messages_in  # noqa: E402
from tests.contract.test_remote_rocketmq import cluster  # noqa: E402
from tests.waiting import eventually  # noqa: E402

pytestmark = [pytest.mark.conformance, pytest.mark.thorough, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with cluster(tmp_path_factory.mktemp("rocketmq"), "5.5.0") as address:
        yield address
        close_connections()


def rows(count: int, **columns: object) -> Iterator[pa.RecordBatch]:
    bodies = [str(number) for number in range(count)]
    yield pa.RecordBatch.from_pydict({"body": bodies} | {name: [value] * count for name, value in columns.items()})


def test_rows_are_sent_at_least_once_and_delayed_ones_singly(address: str) -> None:
    options = SinkOptions.parse({"nameServer": address, "topic": "spark-orders"})

    assert publish(rows(500), options, SendSequence("query", 0, 0)) == Published(500, 0)
    assert publish(rows(3, delayLevel=1), options, SendSequence("query", 1, 0)) == Published(3, 0)

    with RemoteBroker(RemoteSettings(name_servers=(address,))) as broker:
        eventually(lambda: len(messages_in(broker, "spark-orders")) == 503, "all rows are in the topic", timeout_s=60)
        assert {int(message.body) for message in messages_in(broker, "spark-orders")} == set(range(500))


def test_a_write_that_must_drop_repeats_is_refused(address: str) -> None:
    options = SinkOptions.parse({"nameServer": address, "topic": "spark-orders", "idempotent": "true"})
    with pytest.raises(UnsupportedError, match="the brokers of RocketMQ do not drop repeats"):
        publish(rows(1), options, SendSequence("query", 0, 0))


def test_the_pending_view_lists_what_the_cluster_lists(address: str, tmp_path: Path) -> None:
    options = SinkOptions.parse({"nameServer": address, "topic": "spark-later"})
    publish(rows(4, delayLevel=18), options, SendSequence("query", 0, 0))
    reader = PendingReader(PendingOptions.parse({"view": "pending", "nameServer": address, "topic": "spark-later"}))

    def levels() -> list[int]:
        [partition] = reader.partitions()
        return [level for batch in reader.read(partition) for level in batch["delayLevel"].to_pylist()]

    eventually(lambda: levels() == [18] * 4, "the messages are listed", timeout_s=60)
