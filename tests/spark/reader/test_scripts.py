"""Reads of a folder, and over the network: the rows and the errors of batches and streams. Without Spark's JVM."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")

from structlog.testing import capture_logs

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import VirtualClock
from mqtemplate.errors import ConfigurationError, SparkError
from mqtemplate.message import Message, MessageQueue
from mqtemplate.remoting.protocol.codes import RequestCode
from mqtemplate.remoting.protocol.headers.admin import CreateTopicRequestHeader, TopicNameRequestHeader
from mqtemplate.server import LocalCluster
from tests.golden import check_script, scripts_in
from tests.server.tool import Tool
from tests.spark.conftest import Serve
from tests.spark.reads import place_of, rows_of, stream_reader
from tests.spark.reads import read as rows_in

SCRIPTS = scripts_in(Path(__file__).parent / "scripts")
OFFSETS = ("topic", "brokerName", "queueId")


class Reads:
    """Commands of the scripts.

    Args:
        broker: Stores the messages.
        location: Read by the commands.
    """

    def __init__(self, broker: EmbeddedBroker, location: EmbeddedBroker | LocalCluster) -> None:
        self.broker, self.location = broker, location

    def topic(self, *names: str, queues: str = "1") -> None:
        """Create topics, as tools do: with fewer queues, too."""
        for name in names:
            self.broker.create_topic(name, int(queues))

    def send(self, count: str, topic: str = "orders", queue: str = "0", size: str = "1", **properties: str) -> None:
        for _ in range(int(count)):
            message = Message(topic, bytes(int(size)), properties)
            self.broker.sends.send(message, MessageQueue(topic, self.broker.name, int(queue)))

    def half(self, topic: str) -> None:
        """Send a message in a transaction that is open."""
        self.broker.sends.send_half(Message(topic, b"half"), "producers")

    def cancel_first(self, topic: str) -> None:
        """Send three messages that are delayed, and cancel the first."""
        handles = [self.broker.sends.send(Message(topic, b"%d" % n, {"DELAY": "5"})).handle for n in range(3)]
        self.broker.delayed.cancel(handles[0])

    def commit(self, group: str, offset: str, queue: str = "0") -> None:
        self.broker.groups.commit_offset(group, MessageQueue("orders", self.broker.name, int(queue)), int(offset))

    def wait(self, seconds: str) -> None:
        assert isinstance(self.broker.clock, VirtualClock)
        self.broker.clock.move_ms(int(seconds) * 1_000)

    def batch(self, show: str = "", **options: str) -> Iterator[str]:
        """Print the offsets of a batch, or the values of some columns."""

        def read() -> Iterator[str]:
            return lines_of(rows_in(self.location, **options), show)

        return self._printed(read)

    def stream(self, at: str = "", **options: str) -> Iterator[str]:
        """Create a reader, and print where it starts; *at* continues a checkpoint instead."""

        def start() -> Iterator[str]:
            self.reader = stream_reader(self.location, **options)
            self.at = json.loads(at) if at else self.reader.initialOffset()
            if not at:
                assert self.reader.initialOffset() == self.at  # Spark asks twice
                yield f"starts at {offsets_of(self.at)}"

        return self._printed(start)

    def again(self, **options: str) -> Iterator[str]:
        """Continue with a new reader where the last one was."""
        return self.stream(json.dumps(self.at), **options)

    def available_now(self) -> None:
        self.reader.prepareForTriggerAvailableNow()

    def next(self) -> Iterator[str]:
        """Print the offsets of the next batch."""

        def read() -> Iterator[str]:
            with capture_logs() as logs:
                end = self.reader.latestOffset(self.at, self.reader.getDefaultReadLimit())
            yield from (f"{each['event']}: {each['reason']}" for each in logs)
            found = rows_of(self.reader, self.reader.partitions(self.at, end))
            self.at = end
            yield from lines_of(found)

        return self._printed(read)

    def _printed(self, read: Callable[[], Iterator[str]]) -> Iterator[str]:
        """Yield lines without the address of the location, and without what depends on its kind."""
        try:
            lines = list(read())
        except (SparkError, ConfigurationError) as exc:
            lines = [f"{type(exc).__name__}: {exc}"]
        for line in lines:
            for name, value in place_of(self.location).items():
                line = line.replace(f"store {value!r}" if name == "store" else f"cluster at {value}", "PLACE")
            yield re.sub(r"(?<=its topics are: ).*|(?<=\. )The (broker|folder) .*?\. ", "…", line)


def lines_of(rows: list[dict[str, Any]], show: str = "") -> Iterator[str]:
    """Return the values of columns, or the offsets of each queue."""
    if show:
        yield from (" ".join(str(row[name]) for name in show.split(",")) for row in rows)
        return
    for queue, found in groupby(rows, lambda row: tuple(row[name] for name in OFFSETS)):
        yield f"{' '.join(map(str, queue))}: {' '.join(str(row['queueOffset']) for row in found)}"
    if not rows:
        yield "no rows"


def offsets_of(table: dict[str, Any]) -> str:
    assert table["version"] == 2
    return json.dumps(table["topics"]).replace('"', "")


class ServedReads(Reads):
    """Commands over a server, whose topics a tool can change."""

    def __init__(self, cluster: LocalCluster, *, from_folder: bool) -> None:
        super().__init__(cluster.engine, cluster.engine if from_folder else cluster)
        self.address = cluster.address

    def set_queues(self, topic: str, queues: str) -> None:
        """Change the number of queues, as ``mqadmin updateTopic`` does."""
        header = CreateTopicRequestHeader(
            topic=topic,
            default_topic="TBW102",
            read_queue_nums=int(queues),
            write_queue_nums=int(queues),
            perm=6,
            topic_filter_type="SINGLE_TAG",
            order=False,
        )
        with Tool(self.address) as tool:
            tool.request_ok(RequestCode.UPDATE_AND_CREATE_TOPIC, header)

    def delete(self, topic: str) -> None:
        with Tool(self.address) as tool:
            tool.request_ok(RequestCode.DELETE_TOPIC_IN_BROKER, TopicNameRequestHeader(topic=topic))


KINDS = {"folder": ("folder",), "both": ("folder", "cluster"), "cluster": ("cluster",), "served": ("cluster", "served")}
"""End of the name of a script -> the locations that it reads: ``served`` is the folder of a server."""
CASES = [(path, kind) for path in SCRIPTS for kind in KINDS[path.stem.rpartition("_")[2]]]


@pytest.mark.parametrize(("path", "kind"), CASES, ids=lambda value: value if isinstance(value, str) else value.stem)
def test_a_read_prints_what_its_script_says(path: Path, kind: str, tmp_path: Path, serve: Serve) -> None:
    if kind != "folder":
        check_script(path, ServedReads(serve(), from_folder=kind == "served"))
        return
    with EmbeddedBroker(tmp_path / "store", clock=VirtualClock(start_ms=1_000_000)) as broker:
        check_script(path, Reads(broker, broker))
