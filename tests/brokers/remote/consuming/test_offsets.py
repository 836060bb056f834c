"""Progress of broadcasting groups in files, and commits that gather."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqtemplate.brokers.remote.consuming.offset_store import LocalFileOffsetStore, local_offset_file
from mqtemplate.errors import MQTemplateError
from mqtemplate.message import MessageQueue

QUEUE = MessageQueue("orders", "broker-a", 1)


def test_progress_is_there_again_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "a" / "offsets.json"
    offsets = LocalFileOffsetStore(path)

    offsets.commit(QUEUE, 7)
    offsets.flush()

    assert LocalFileOffsetStore(path).read(QUEUE) == 7
    assert LocalFileOffsetStore(path).read(MessageQueue("orders", "broker-a", 2)) is None


def test_nothing_is_written_while_nothing_changed(tmp_path: Path) -> None:
    path = tmp_path / "offsets.json"

    LocalFileOffsetStore(path).flush()

    assert not path.exists()


def test_the_file_is_one_that_rocketmq_s_client_reads_and_writes(tmp_path: Path) -> None:
    path = tmp_path / "offsets.json"
    path.write_text('{"offsetTable":{{"brokerName":"broker-a","queueId":1,"topic":"orders"}:5}}')
    offsets = LocalFileOffsetStore(path)

    offsets.commit(QUEUE, 6)
    offsets.flush()

    assert path.read_text() == '{"offsetTable":{{"brokerName":"broker-a","queueId":1,"topic":"orders"}:6}}'


def test_a_file_that_cannot_be_read_is_named_with_a_way_out(tmp_path: Path) -> None:
    path = tmp_path / "offsets.json"
    path.write_text("{")

    with pytest.raises(MQTemplateError, match=r"offsets\.json cannot be read.*delete it to have the group start again"):
        LocalFileOffsetStore(path)


def test_members_groups_and_clusters_have_files_of_their_own(tmp_path: Path) -> None:
    """Whatever is in their names."""
    files = {
        local_offset_file(tmp_path, instance, servers, group)
        for instance in ("hall", "../lobby")
        for servers in (("a:1",), ("a:1", "b:1"))
        for group in ("screens", "%x|y", "../../etc")
    }

    assert len(files) == 12
    assert all(file.resolve().is_relative_to(tmp_path) for file in files)
