"""Offset files of broadcasting groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqtemplate.brokers.remote.consuming.offsets import LocalFileOffsetStore, local_offset_file
from mqtemplate.errors import MQTemplateError
from mqtemplate.message import MessageQueue

QUEUE = MessageQueue("orders", "broker-a", 1)


def test_offsets_survive_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "a" / "offsets.json"
    offsets = LocalFileOffsetStore(path)

    offsets.commit(QUEUE, 7)
    offsets.flush()

    assert LocalFileOffsetStore(path).read(QUEUE) == 7
    assert LocalFileOffsetStore(path).read(MessageQueue("orders", "broker-a", 2)) is None


def test_no_file_is_written_without_a_change(tmp_path: Path) -> None:
    path = tmp_path / "offsets.json"

    LocalFileOffsetStore(path).flush()

    assert not path.exists()


def test_the_file_has_the_format_of_rocketmq_s_client(tmp_path: Path) -> None:
    path = tmp_path / "offsets.json"
    path.write_text('{"offsetTable":{{"brokerName":"broker-a","queueId":1,"topic":"orders"}:5}}')
    offsets = LocalFileOffsetStore(path)

    offsets.commit(QUEUE, 6)
    offsets.flush()

    assert path.read_text() == '{"offsetTable":{{"brokerName":"broker-a","queueId":1,"topic":"orders"}:6}}'


def test_the_error_for_an_invalid_file_has_its_path_and_advice(tmp_path: Path) -> None:
    path = tmp_path / "offsets.json"
    path.write_text("{")

    with pytest.raises(MQTemplateError, match=r"offsets\.json cannot be read.*delete it to have the group start again"):
        LocalFileOffsetStore(path)


def test_members_groups_and_clusters_have_different_files(tmp_path: Path) -> None:
    """Special characters in names are escaped: no file is outside of the directory."""
    files = {
        local_offset_file(tmp_path, instance, servers, group)
        for instance in ("hall", "../lobby")
        for servers in (("a:1",), ("a:1", "b:1"))
        for group in ("screens", "%x|y", "../../etc")
    }

    assert len(files) == 12
    assert all(file.resolve().is_relative_to(tmp_path) for file in files)
