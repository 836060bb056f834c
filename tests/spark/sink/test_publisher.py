"""Publishing of the rows of one task: queues, numbers, and brokers that drop no repeats. Without Spark."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest

pa = pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")

from mqtemplate.broker import Broker, Capability  # noqa: E402
from mqtemplate.brokers import EmbeddedBroker, RemoteBroker  # noqa: E402
from mqtemplate.clock import SystemClock  # noqa: E402
from mqtemplate.errors import ConfigurationError, MessageError, MQTemplateError, SendError, UnsupportedError  # noqa: E402
from mqtemplate.message import HostAddress, Message, MessageQueue, SendSequence  # noqa: E402
from mqtemplate.pending import PendingQuery  # noqa: E402
from mqtemplate.remoting.protocol import RequestCode  # noqa: E402
from mqtemplate.results import SequencedResult  # noqa: E402
from mqtemplate.server import Account, AclSettings, BrokerServerSettings, LocalCluster, Right  # noqa: E402
from mqtemplate.server.local_address import LocalServerAddress  # noqa: E402
from mqtemplate.spark import LocalServer  # noqa: E402
from mqtemplate.spark.location.cluster_connection import close_connections  # noqa: E402
from mqtemplate.spark.location.connection import open_broker  # noqa: E402
from mqtemplate.spark.reader.source import BatchReader, MqTemplateSource  # noqa: E402
from mqtemplate.spark.records.schema import source_schema  # noqa: E402
from mqtemplate.spark.sink.options import SinkOptions  # noqa: E402
from mqtemplate.spark.sink.rows import OutgoingRow  # noqa: E402
from mqtemplate.spark.sink.writer import (  # noqa: E402
    PlainPublisher,
    Published,
    QueueChooser,
    SequencedPublisher,
    create_publisher,
    publish,
)
from mqtemplate.testing import Harness, messages_in  # noqa: E402
from tests.brokers.remote.scripted_cluster import ScriptedBroker  # noqa: E402
from tests.server.tool import ANY_PORT, make_engine  # noqa: E402
from tests.waiting import eventually  # noqa: E402

SECRET = "a secret that is never shown"


def batches(*sizes: int) -> Iterator[pa.RecordBatch]:
    first = 0
    for size in sizes:
        yield pa.RecordBatch.from_pydict({"body": [str(number) for number in range(first, first + size)]})
        first += size


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
    """Our server with access control; the environment has the keys."""
    account = Account(
        access_key="spark-writer",
        secret_key=SECRET,
        topic_perms={"orders": Right.PUB | Right.SUB},
        group_perms={"spark-sink": Right.SUB},
    )
    monkeypatch.setenv("MQTEMPLATE_ACCESS_KEY", account.access_key)
    monkeypatch.setenv("MQTEMPLATE_SECRET_KEY", account.secret_key)
    settings = BrokerServerSettings(listen=ANY_PORT)
    with LocalCluster(make_engine(SystemClock()), settings, acl=AclSettings(accounts=(account,))) as cluster:
        cluster.engine.create_topic("orders", 2)
        yield cluster
        close_connections()


def test_a_repeated_task_stores_its_rows_once_on_our_server(cluster: LocalCluster) -> None:
    """The keys come from the environment: options would show in the plan of the query."""
    options = SinkOptions.parse({"nameServer": str(cluster.address), "topic": "orders"})
    sequence = SendSequence("query", 0, 3)

    results = [publish(batches(30, 20), options, sequence) for _ in range(2)]

    assert results == [Published(50, 0), Published(0, 50)]
    stored = messages_in(cluster.engine, "orders")
    assert sorted(int(message.body) for message in stored) == list(range(50))
    assert Counter(message.queue_id for message in stored) == {0: 30, 1: 20}


@pytest.mark.parametrize("idempotent", ["true", "false"])
def test_a_level_that_the_table_of_the_broker_does_not_have_fails_the_task(
    cluster: LocalCluster, idempotent: str
) -> None:
    """The broker has the table. The sink knows no number of levels."""
    options = SinkOptions.parse({"nameServer": str(cluster.address), "topic": "orders", "idempotent": idempotent})
    rows = pa.RecordBatch.from_pydict({"body": ["a", "b"], "delayLevel": [1, 19]})

    with pytest.raises(MQTemplateError, match=r"the delay level must be 0\.\.18 .*got 19; 0 means no delay"):
        publish(iter([rows]), options, SendSequence("query", 0, 3))


def test_a_repeated_task_stores_its_rows_once_although_the_owner_of_the_folder_restarts(tmp_path: Path) -> None:
    """The owner's server has another account after each start. Without an owner, the task opens the folder itself."""
    store, sequence = tmp_path / "store", SendSequence("query", 0, 3)
    options = SinkOptions.parse({"store": str(store), "topic": "orders"})

    results = []
    for _ in range(2):
        with EmbeddedBroker(store) as broker, LocalServer(broker):
            results.append(publish(batches(30), options, sequence))
        close_connections()
    results.append(publish(batches(30), options, sequence))
    close_connections()

    assert results == [Published(30, 0), Published(0, 30), Published(0, 30)]
    with EmbeddedBroker(store) as broker:
        assert sorted(int(message.body) for message in messages_in(broker, "orders")) == list(range(30))


@pytest.mark.parametrize("columns", [{}, {"shardingKey": ["a"]}], ids=["columns", "rows"])
def test_a_row_may_have_megabytes_among_many_small_ones(cluster: LocalCluster, columns: dict[str, Any]) -> None:
    """A request has at most 1 MiB of small messages, or one message."""
    rows = {"body": ["x" * 700] * 3_000 + ["y" * 3_000_000]} | {name: each * 3_001 for name, each in columns.items()}
    options = SinkOptions.parse({"nameServer": str(cluster.address), "topic": "orders"})

    result = publish(iter([pa.RecordBatch.from_pydict(rows)]), options, SendSequence("query", 0, 0))

    assert result == Published(3_001, 0)
    stored = messages_in(cluster.engine, "orders")
    assert Counter(len(message.body) for message in stored) == {700: 3_000, 3_000_000: 1}


class SlowBroker:
    """Broker that answers a send when the test lets it; it notes the first number of each send."""

    capabilities = frozenset({Capability.SEQUENCED_SEND})

    def __init__(self) -> None:
        self.firsts: list[int] = []
        self.failure: Exception | None = None
        self.may_answer = threading.Semaphore(0)
        self.sends = self

    def send_sequenced(self, messages: Any, sequence: SendSequence, timeout_ms: int) -> SequencedResult:
        self.firsts.append(sequence.first)
        self.may_answer.acquire()
        if self.failure is not None:
            raise self.failure
        return SequencedResult(len(messages), 0)


def numbered(count: int) -> list[tuple[Message, MessageQueue]]:
    return [(Message("orders", b"x"), MessageQueue("orders", "broker", 0))] * count


def test_rows_are_created_while_the_send_before_them_is_answered() -> None:
    """``publish`` returns before the answer, and the next send waits for it: numbers without a gap."""
    broker = SlowBroker()
    with closing(SequencedPublisher(cast(Broker, broker), SendSequence("q", 0, 0), 1_000)) as publisher:
        publisher.publish(numbered(3))
        eventually(lambda: broker.firsts == [0], "the first send is under way")
        broker.may_answer.release(2)
        publisher.publish(numbered(2))

        assert publisher.finish() == SequencedResult(5, 0)
    assert broker.firsts == [0, 3]


def test_a_failed_send_ends_the_task_and_no_later_row_is_sent() -> None:
    broker = SlowBroker()
    broker.failure = SendError("refused")
    with closing(SequencedPublisher(cast(Broker, broker), SendSequence("q", 0, 0), 1_000)) as publisher:
        publisher.publish(numbered(3))
        broker.may_answer.release()

        with pytest.raises(SendError, match="refused"):
            publisher.publish(numbered(2))
    assert broker.firsts == [0]


def test_one_of_two_keys_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MQTEMPLATE_ACCESS_KEY", "spark-writer")

    with pytest.raises(ConfigurationError, match=r"the environment of .* has only one of access-key and secret-key"):
        SinkOptions.parse({"nameServer": "127.0.0.1:1", "topic": "orders"})


def test_a_write_uses_the_client_file_of_a_read(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Reads and writes have one convention for access keys. The file wins over the environment."""
    keys = tmp_path / "client.json"
    keys.write_text(json.dumps({"access-key": "spark-writer", "secret-key": SECRET}))
    monkeypatch.setenv("MQTEMPLATE_ACCESS_KEY", "of another account")
    address = {"nameServer": str(cluster.address)}
    options = SinkOptions.parse({**address, "topic": "orders", "clientFile": str(keys)})

    assert publish(batches(5), options, SendSequence("query", 1, 0)) == Published(5, 0)

    read = MqTemplateSource({"nameserver": str(cluster.address), "topic": "orders", "clientfile": str(keys)})
    reader = read.reader(source_schema())
    assert isinstance(reader, BatchReader)
    assert sum(batch.num_rows for part in reader.partitions() for batch in reader.read(part)) == 5


@pytest.fixture
def plain(broker: EmbeddedBroker) -> EmbeddedBroker:
    """Broker with the capabilities of RocketMQ: no numbers, and no delays in batches."""
    broker.capabilities -= {Capability.SEQUENCED_SEND, Capability.BATCH_DELAY}
    return broker


def test_a_broker_that_drops_no_repeats_gets_batches_and_single_delayed_messages(plain: EmbeddedBroker) -> None:
    publisher = create_publisher(plain, SinkOptions.parse({"store": "x", "topic": "orders"}), SendSequence("q", 0, 0))
    rows = [OutgoingRow(Message("orders", b"%d" % n, {"DELAY": "1"} if n == 2 else {}), 0, None) for n in range(5)]

    publisher.publish(QueueChooser(plain, 0).choose(rows))
    result = publisher.finish()

    assert isinstance(publisher, PlainPublisher)
    assert result.stored == 5
    Harness(plain).advance("1s")
    assert sorted(message.body for message in messages_in(plain, "orders")) == [b"0", b"1", b"2", b"3", b"4"]


def test_a_write_that_must_drop_repeats_is_refused_by_a_broker_that_does_not(plain: EmbeddedBroker) -> None:
    options = SinkOptions.parse({"store": "x", "topic": "orders", "idempotent": "true"})
    with pytest.raises(UnsupportedError, match="the brokers of RocketMQ do not drop repeats"):
        create_publisher(plain, options, SendSequence("q", 0, 0))


def test_rows_with_one_sharding_key_go_to_one_queue_and_a_queue_id_is_checked(broker: EmbeddedBroker) -> None:
    chooser = QueueChooser(broker, 0)
    rows = [OutgoingRow(Message("orders", b"x"), None, f"customer-{n % 3}") for n in range(30)]

    chosen = chooser.choose(rows)

    queues: dict[str | None, set[MessageQueue]] = {}
    for row, (_, queue) in zip(rows, chosen, strict=True):
        queues.setdefault(row.sharding_key, set()).add(queue)
    assert all(len(found) == 1 for found in queues.values())
    assert len({queue for _, queue in chosen}) > 1
    with pytest.raises(MessageError, match="queueId must be 0..3 for topic 'orders', got 4"):
        chooser.choose([OutgoingRow(Message("orders", b"x"), 4, None)])


def test_a_request_of_megabytes_has_more_time_than_one_of_a_client(cluster: LocalCluster) -> None:
    """A million pending positions, or ten thousand rows, take a busy broker longer than the client's three seconds."""
    location = SinkOptions.parse({"nameServer": str(cluster.address), "topic": "orders"}).location

    with open_broker(location) as broker:
        assert isinstance(broker, RemoteBroker)
        assert broker.settings.request_timeout_ms == 15_000


def test_the_address_of_a_killed_process_is_not_used(tmp_path: Path) -> None:
    """Its file is left behind; the task opens the folder itself."""
    with EmbeddedBroker(tmp_path) as broker:
        broker.create_topic("orders", 1)
    address = LocalServerAddress(str(HostAddress("127.0.0.1", 1)), "spark-x", 1, "secret-key")
    address.write(tmp_path)

    publish(batches(3), SinkOptions.parse({"store": str(tmp_path), "topic": "orders"}), SendSequence("q", 0, 0))

    with EmbeddedBroker(tmp_path) as broker:
        assert len(messages_in(broker, "orders")) == 3
    assert (tmp_path / "config" / "localServer.json").stat().st_mode & 0o777 == 0o600


def test_a_folder_that_does_not_exist_is_not_created(tmp_path: Path) -> None:
    options = SinkOptions.parse({"store": str(tmp_path / "missing"), "topic": "orders"})
    with pytest.raises(Exception, match="does not exist; give the folder of an embedded broker that was started once"):
        publish(batches(1), options, SendSequence("q", 0, 0))


def test_rows_with_a_pending_key_replace_those_before_them_also_in_a_repeated_task(tmp_path: Path) -> None:
    """The other rows are numbered as before: a repeated task stores them once."""
    store = tmp_path / "store"
    with EmbeddedBroker(store) as broker:
        broker.create_topic("carts", 2)
    rows = {
        "body": ["2 books", "no key", "3 books", "1 pen"],
        "pendingKey": ["cart-17", None, "cart-17", "cart-18"],
        "delay": ["1h"] * 4,
    }
    options = SinkOptions.parse({"store": str(store), "topic": "carts"})

    for _ in range(2):
        result = publish(iter([pa.RecordBatch.from_pydict(rows)]), options, SendSequence("query", 0, 0))

    assert (result.stored, result.repeated) == (3, 1)
    with open_broker(options.location) as broker:
        pending = broker.delayed.pending(PendingQuery(topic="carts")).messages
    assert sorted(str(each.pending_key) for each in pending) == ["None", "cart-17", "cart-18"]


STRICT_ROW = {"body": ["2 books"], "pendingKey": ["cart-17"], "delay": ["1h"], "onPendingStrict": [True]}


def test_a_strict_row_is_stored_where_the_broker_decides_about_the_key_in_one_step(cluster: LocalCluster) -> None:
    options = SinkOptions.parse({"nameServer": str(cluster.address), "topic": "orders"})

    for _ in range(2):
        publish(iter([pa.RecordBatch.from_pydict(STRICT_ROW)]), options, SendSequence("query", 0, 0))

    [pending] = cluster.engine.delayed.pending(PendingQuery(topic="orders")).messages
    assert pending.pending_key == "cart-17"


def test_a_strict_row_is_refused_where_the_client_decides_in_two_steps() -> None:
    """A server that does not announce pending keys is RocketMQ. Nothing is sent to it."""
    with ScriptedBroker() as rocketmq:
        rocketmq.topic("carts", 1)
        options = SinkOptions.parse({"nameServer": rocketmq.address, "topic": "carts", "onPendingStrict": "true"})
        rows = {name: values for name, values in STRICT_ROW.items() if name != "onPendingStrict"}

        with pytest.raises(UnsupportedError, match="on_pending_strict=True for pending_key='cart-17' on 'carts'.* two"):
            publish(iter([pa.RecordBatch.from_pydict(rows)]), options, SendSequence("query", 0, 0))

        assert rocketmq.count(RequestCode.SEND_MESSAGE_V2) == 0
        close_connections()
