"""The way of an application on Windows and macOS: what Python lacks there is hidden, see `other_system.py`.

It cannot show what their kernels and file systems do: docs/platforms.md says what stays untested.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mqtemplate import Message, MessageQueue
from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.context.settings.rocketmq import _folder
from tests.programs import run_python
from tests.server.process import BrokerProcess

HERE = Path(__file__).parent
both_systems = pytest.mark.parametrize("system", ["windows", "macos"])


def run_on(system: str, folder: Path, program: str, *arguments: str) -> tuple[int, str]:
    """Return exit code and output of a program of this folder."""
    ended = run_python(folder, str(HERE / "other_system.py"), system, str(HERE / program), *arguments)
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("system", "mapped"),
    [("windows", "mapped: StoreError 00000 04096 08192\n"), ("macos", "")],
    ids=["windows", "macos"],
)
def test_an_application_with_a_folder_keeps_its_delayed_messages(tmp_path: Path, system: str, mapped: str) -> None:
    """On Windows a file that a reader has mapped is deleted later, and the files after it are not deleted before it."""
    assert run_on(system, tmp_path, "embedded_program.py", str(tmp_path / "data")) == (
        0,
        f"second broker: StoreLockedError\nreceived: 'level' 'line\\r\\nends' 'timer'\n{mapped}files: 08192\n",
    )


@both_systems
def test_an_application_uses_a_broker_that_runs_as_a_server(tmp_path: Path, system: str) -> None:
    """The server runs as on Linux."""
    with BrokerProcess(tmp_path) as broker:
        found = run_on(system, tmp_path, "remote_program.py", str(broker.name_server))
        broker.stop()

    assert found == (0, "received: later now xxxxx\n")


@both_systems
def test_commands_read_a_folder(tmp_path: Path, system: str) -> None:
    with EmbeddedBroker(tmp_path / "data") as broker:
        broker.sends.send(Message("orders", b"one"), MessageQueue("orders", "broker-a", 0))

    for arguments, expected in {
        ("topics", "--name-server", "embedded:./data"): "orders  normal",
        ("doctor", "data"): "no damage",
        ("--help",): "mqtemplate",
    }.items():
        code, output = run_on(system, tmp_path, "command_line.py", *arguments)
        assert (code, expected in output) == (0, True), output


def test_what_windows_cannot_do_is_said(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text("from mqtemplate import MQApplication\napp = MQApplication()\n")
    with EmbeddedBroker(tmp_path / "data"):
        pass

    workers = run_on("windows", tmp_path, "command_line.py", "run", "shop:app", "--workers", "2")
    repair = run_on("windows", tmp_path, "command_line.py", "doctor", "data", "--repair", "--yes")

    assert workers[0] == 1
    assert "--workers and --reload need signals and process groups, which this system (Windows)" in workers[1]
    assert "or several programs with rocketmq.name-server of a broker" in " ".join(workers[1].split())
    assert "opens each file relative to its folder, which this system (Windows) cannot do; copy the" in repair[1]


@pytest.mark.parametrize("text", [r"C:\data", "C:/data", r"\\host\share\data", r"C:\My Data\store"])
def test_on_windows_a_folder_may_have_a_drive(text: str) -> None:
    assert _folder(text, is_windows=True) == Path(text)
    with pytest.raises(ValueError, match=r"has no scheme, drive or port|not a backslash"):
        _folder(text, is_windows=False)


def test_on_windows_other_texts_are_refused_as_elsewhere() -> None:
    assert _folder(r".\data\store", is_windows=True) == Path("./data/store")
    with pytest.raises(
        ValueError, match=r"'C:data' is relative to the working directory of drive C:, .*'embedded:C:\\data'"
    ):
        _folder("C:data", is_windows=True)
    with pytest.raises(ValueError, match="has no list after it"):
        _folder(r"C:\data;D:\data", is_windows=True)
    with pytest.raises(ValueError, match="no scheme, drive or port"):
        _folder("http://data", is_windows=True)
