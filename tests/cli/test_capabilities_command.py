"""``python -m mqtemplate capabilities``: one line per capability, one column per broker."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqtemplate.broker import Capability
from mqtemplate.cli import main
from mqtemplate.cli.commands.bench import capability_report
from tests.brokers.grpc.scripted_proxy import ScriptedProxy
from tests.server.process import BrokerProcess


def test_differences_are_marked() -> None:
    report = capability_report({"here": frozenset(Capability), "there": frozenset({Capability.TIMER})})

    lines = report.splitlines()
    assert lines[0].split() == ["here", "there"]
    assert [line.split()[-2:] for line in lines if "any delay or deliver time" in line] == [["yes", "yes"]]
    assert [line.split()[-2:] for line in lines if "cancel and reschedule" in line] == [["yes", "no"]]
    assert [line.startswith("*") for line in lines[1:-1]] == [each is not Capability.TIMER for each in Capability]


def test_a_server_is_compared_with_an_embedded_broker_that_is_not_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "data"
    with BrokerProcess(tmp_path) as broker:
        code = main(["capabilities", f"embedded:{folder}", str(broker.name_server), "--config", str(tmp_path)])

    printed = capsys.readouterr().out
    assert code == 0
    assert f"embedded:{folder}  {broker.name_server}" in printed
    assert "* store files in a directory of this machine" in printed
    assert "  cancel and reschedule" in printed
    assert "  transactions" in printed
    assert not folder.exists()


def test_the_error_names_a_missing_name_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["capabilities", "127.0.0.1:1", "--config", str(tmp_path)])

    assert code == 1
    assert "127.0.0.1:1" in capsys.readouterr().err


def test_a_proxy_has_the_capabilities_of_its_protocol(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedProxy() as proxy:
        code = main(["capabilities", f"grpc://{proxy.address}", "--config", str(tmp_path)])

    printed = capsys.readouterr().out
    assert code == 0
    assert [line.split()[-1] for line in printed.splitlines() if "by handle only" in line] == ["yes"]
    assert [line.split()[-1] for line in printed.splitlines() if "queries for pending" in line] == ["no"]


def test_a_proxy_is_not_administered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["topics", "ls", "--name-server", "grpc://127.0.0.1:1", "--config", str(tmp_path)])

    assert code == 1
    assert "RocketMQ's gRPC protocol administers nothing; name the name server" in " ".join(
        capsys.readouterr().err.split()
    )
