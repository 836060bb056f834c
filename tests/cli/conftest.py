"""Commands on a store directory and on a server; both have the same messages."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from tests.cli.running import PATIENT, CommandLine, place, prepare


@pytest.fixture(params=["folder", "server"])
def run(request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[CommandLine]:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "application.yml").write_text(PATIENT)
    with place(request.param, tmp_path, prepare) as name_server:
        yield CommandLine(name_server, tmp_path / "config", capsys)


@pytest.fixture
def on_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[CommandLine]:
    (tmp_path / "config").mkdir()
    with place("folder", tmp_path, prepare) as name_server:
        yield CommandLine(name_server, tmp_path / "config", capsys)


@pytest.fixture
def thursday(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Thursday at noon in Berlin, as epoch ms."""
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield round(datetime(2026, 1, 29, 12).astimezone().timestamp() * 1_000)
    monkeypatch.undo()
    time.tzset()
