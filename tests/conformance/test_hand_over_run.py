"""The move of a stopped application's store directory to Apache RocketMQ 5.5.0, by the command."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings, RemoteBroker, RemoteSettings
from mqtemplate.message import Message, MessageQueue, Property
from mqtemplate.operations.messages import read_queue
from mqtemplate.pending import PendingQuery
from mqtemplate.store.settings import FlushDiskType
from mqtemplate.topics import RETRY_TOPIC_PREFIX
from tests.cli.running import CommandLine
from tests.conformance.servers import is_registered, rocketmq_server
from tests.waiting import eventually

pytestmark = [pytest.mark.conformance, pytest.mark.thorough, pytest.mark.timeout(300)]

HOUR_MS = 3_600_000
FAST = EmbeddedSettings(flush_disk_type=FlushDiskType.ASYNC_FLUSH)


@pytest.fixture
def cluster(rocketmq: None, tmp_path: Path) -> Iterator[str]:
    with rocketmq_server(tmp_path / "rocketmq") as server:
        settings = RemoteSettings(name_servers=(server.address,), offset_path=tmp_path / "probe")
        eventually(lambda: is_registered(settings), "the broker has registered", timeout_s=90)
        yield server.address


def ids_of(broker: RemoteBroker, queue: MessageQueue) -> list[str]:
    return [each.msg_id for each in read_queue(broker, queue, 0, broker.reader.max_offset(queue))]


def test_a_directory_moves_with_offsets_retries_and_pending_messages(
    cluster: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unread messages are in their queues and in their order, and each group goes on at its first unread one."""
    retry = f"{RETRY_TOPIC_PREFIX}billing"
    with EmbeddedBroker(tmp_path / "old", FAST) as old:
        old.create_topic("orders", 2)
        old.create_topic(retry, 1)
        first, second = old.queues("orders")
        ids = {
            queue: [old.sends.send(Message("orders", b"x", {Property.TAGS: "paid"}), queue).msg_id for _ in range(250)]
            for queue in (first, second)
        }
        old.groups.commit_offset("billing", first, 10)
        old.groups.commit_offset("billing", second, 250)
        old.groups.commit_offset("audit", first, 200)
        origin = {Property.RETRY_TOPIC: "orders", Property.ORIGIN_MESSAGE_ID: ids[first][3]}
        old.sends.send(Message(retry, b"again", origin))
        due = [
            old.sends.send(Message("orders", b"y", {Property.TIMER_DELAY_MS: str(hours * HOUR_MS)})).msg_id
            for hours in (1, 2, 50, 24 * 10)
        ]
    command_line = CommandLine("", tmp_path, capsys)
    sides = ("--from", str(tmp_path / "old"), "--to", cluster)

    moved = command_line.plain("hand-over", "run", *sides, "--yes", "--json")
    again = command_line.plain("hand-over", "run", *sides, "--yes")

    assert (moved.code, again.code) == (0, 0), (moved, again)
    assert (moved.json["copied"], moved.json["moved"], moved.json["left"]) == (491, 3, 1)
    assert "0 ready messages and 0 pending messages moved" in again.output
    assert "1 pending messages stay: the next one comes into the range" in again.output
    with RemoteBroker(RemoteSettings(name_servers=(cluster,), offset_path=tmp_path / "offsets")) as new:
        queues = {queue.queue_id: queue for queue in new.queues("orders")}
        assert ids_of(new, queues[0]) == ids[first][10:]
        assert ids_of(new, queues[1]) == ids[second]
        offsets = [new.groups.committed_offset(group, queues[0]) for group in ("billing", "audit")]
        assert offsets == [0, 190]
        [queue] = [each for each in new.queues(retry) if each.queue_id == 0]
        [failed] = new.reader.pull(queue, 0).messages
        assert failed.properties[Property.ORIGIN_MESSAGE_ID] == ids[first][3]
        pending = eventually(
            lambda: [page for page in [new.delayed.pending(PendingQuery(), 10).messages] if len(page) == 3],
            "the timers are pending",
        )
        assert sorted(each.msg_id for each in pending[0]) == sorted(due[:3])
