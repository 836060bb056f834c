"""``backup``, ``restore``, ``copy ls`` and ``copy verify``."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.copy import CopiedBroker
from mqtemplate.engine.settings import CopyOptions
from tests.cli.running import CommandLine, prepare


@pytest.fixture
def command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    (tmp_path / "config").mkdir()
    return CommandLine("", tmp_path / "config", capsys)


@pytest.fixture
def place(tmp_path: Path) -> str:
    """The place of a copy whose original has ended."""
    place = f"file://{tmp_path / 'copy'}"
    with CopiedBroker(tmp_path / "store", None, None, copy=CopyOptions(to=place)) as owner:
        prepare(owner)
    return place


def test_a_backup_of_a_directory_in_use_is_a_store_without_damage(command_line: CommandLine, tmp_path: Path) -> None:
    store, target = str(tmp_path / "store"), str(tmp_path / "backup")
    with EmbeddedBroker(tmp_path / "store") as owner:
        prepare(owner)
        written = command_line.plain("backup", store, target, "--json")

    assert written.code == 0, written
    assert (written.json["message_count"], written.json["pending_count"]) == (10, 4)
    checked = command_line.plain("doctor", target, "--json")
    assert (checked.code, checked.json["topics"]["orders"]) == (0, 10)
    again = command_line.plain("backup", store, target)
    assert (again.code, again.output) == (1, "")
    assert "is not empty; give a folder that does not exist yet" in again.errors


def test_a_copy_is_listed_verified_and_restored(command_line: CommandLine, tmp_path: Path, place: str) -> None:
    listed = command_line.plain("copy", "ls", place)
    assert "has ended, or is silent" in listed.output
    assert command_line.plain("copy", "ls", place, "--json").json["is_alive"] is False
    assert "no damage" in command_line.plain("copy", "verify", place).output

    restored = command_line.plain("restore", place, str(tmp_path / "restored"))

    assert restored.code == 0, restored
    assert "10 messages in topics, 4 pending" in restored.output
    checked = command_line.plain("doctor", str(tmp_path / "restored"), "--json").json
    assert (checked["is_damaged"], checked["topics"]["orders"]) == (False, 10)


def test_a_moment_is_a_time_of_the_command_line(command_line: CommandLine, tmp_path: Path, place: str) -> None:
    early = command_line.plain("restore", place, str(tmp_path / "early"), "--until", "2026-01-01T09:30+01:00")
    assert early.code == 1
    assert "has no such moment: the copy begins at" in early.errors
    assert "is not a time" in command_line.plain("restore", place, str(tmp_path / "x"), "--until", "soon").errors


def test_damage_of_a_copy_has_a_code(command_line: CommandLine, tmp_path: Path, place: str) -> None:
    segment = next((tmp_path / "copy" / "segments" / "00000001").iterdir())
    segment.write_bytes(segment.read_bytes()[:-1])

    verified = command_line.plain("copy", "verify", place)

    assert verified.code == 6
    assert f"{segment.name} is damaged" in verified.output


def test_a_directory_in_use_is_not_restored_beside_without_a_fork(command_line: CommandLine, tmp_path: Path) -> None:
    place = f"file://{tmp_path / 'copy'}"
    with CopiedBroker(tmp_path / "store", None, None, copy=CopyOptions(to=place)) as owner:
        prepare(owner)
    with EmbeddedBroker(tmp_path / "store"):
        refused = command_line.plain("restore", place, str(tmp_path / "second"))
        forked = command_line.plain("restore", place, str(tmp_path / "fork"), "--fork")

    assert refused.code == 5
    assert "is in use by process" in refused.errors
    assert "--fork" in refused.errors
    assert "has a history of its own" in forked.output
