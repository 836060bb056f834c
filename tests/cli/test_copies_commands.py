"""``backup``, ``restore``, ``promote``, ``copy ls``, ``copy verify``, and ``broker --follow``."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqtemplate.brokers import EmbeddedBroker, RemoteBroker, RemoteSettings
from mqtemplate.copy import CopiedBroker
from mqtemplate.copy.follower import Follower
from mqtemplate.copy.restore import list_copy
from mqtemplate.engine.settings import CopyOptions
from mqtemplate.message import Message
from tests.cli.running import CommandLine, prepare
from tests.server.process import BrokerProcess
from tests.waiting import eventually


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


# --- a follower -------------------------------------------------------------------------------------


def test_a_directory_that_follows_a_copy_is_promoted(command_line: CommandLine, tmp_path: Path, place: str) -> None:
    standby = tmp_path / "standby"
    assert (
        "follows no copy; name the copy: mqtemplate broker --follow"
        in command_line.plain("promote", str(standby)).errors
    )
    with Follower(place, standby) as follower:
        follower.catch_up()

    promoted = command_line.plain("promote", str(standby))

    assert promoted.code == 0, promoted
    assert "took over with everything that was copied until" in promoted.output
    assert "10 messages in topics, 4 pending" in promoted.output
    assert command_line.plain("doctor", str(standby), "--json").json["topics"]["orders"] == 10


def test_a_follower_process_takes_over_from_a_server_that_was_killed(command_line: CommandLine, tmp_path: Path) -> None:
    """Clients find the messages of the first server at the second one, which goes on with the copy."""
    place = f"file://{tmp_path / 'copy'}"
    owner_folder, folder = tmp_path / "owner", tmp_path / "follower"
    for each in (owner_folder, folder):
        each.mkdir()
        (each / "application.yml").write_text("mqtemplate: {copy: {interval: 50ms, lease: 1s}}\n", "utf-8")
    (owner_folder / "application.yml").write_text(
        f"mqtemplate: {{copy: {{to: '{place}', interval: 50ms, lease: 1s}}}}\n", "utf-8"
    )
    standby = BrokerProcess(folder, "--follow", place)
    with BrokerProcess(owner_folder) as owner, standby.following() as process:
        with RemoteBroker(RemoteSettings(name_servers=(str(owner.name_server),))) as client:
            client.create_topic("orders")
            client.sends.send_batch([Message("orders", b"%d" % number) for number in range(10)])
        eventually(lambda: list_copy(place).log_bytes > 1_000, "the copy has the messages")
        assert "is in use by process" in command_line.plain("promote", str(folder / "store")).errors

        owner.kill()
        promoted = command_line.plain("promote", str(folder / "store"))

        assert promoted.code == 0, promoted
        assert "has taken over, and that process is its broker now" in promoted.output
        process.read_addresses()
        with RemoteBroker(RemoteSettings(name_servers=(str(process.name_server),))) as client:
            assert sum(client.reader.max_offset(queue) for queue in client.queues("orders")) == 10
        code, _, errors = process.stop()
        assert code == 0
        assert {line.split("[")[1].split()[0] for line in errors.splitlines()} == {"info"}, errors
    assert list_copy(place).is_alive is False
