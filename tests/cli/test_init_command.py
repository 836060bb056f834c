"""``mqtemplate init``: the project runs and passes its test at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.running import CommandLine
from tests.running.program import Program


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    monkeypatch.chdir(tmp_path)
    return CommandLine("", tmp_path, capsys)


def test_a_new_project_passes_its_test_and_runs(run: CommandLine, tmp_path: Path) -> None:
    result = run.plain("init", "shop-demo")
    project = tmp_path / "shop-demo"
    tested = subprocess.run(
        [sys.executable, "-W", "error", "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=project,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    with Program(project, "mqtemplate", "run", "app", PYTHONUNBUFFERED="1") as program:
        program.wait_for("hello, shop-demo")
        code = program.stop()

    assert result.code == 0, result
    assert "1 passed" in tested.stdout, tested.stdout + tested.stderr
    assert code == 0


def test_existing_files_are_not_changed(run: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "app.py").write_text("mine", "utf-8")

    result = run.plain("init", "shop")

    assert result.code == 2
    assert "shop has app.py already; nothing was written" in result.errors
    assert [each.name for each in (tmp_path / "shop").iterdir()] == ["app.py"]


@pytest.mark.parametrize("name", ["9lives", "a b", "../up", "a" * 64])
def test_a_name_must_be_usable_as_a_group(run: CommandLine, tmp_path: Path, name: str) -> None:
    result = run.plain("init", name)

    assert result.code == 2
    assert "must begin with a letter" in result.errors
    assert list(tmp_path.iterdir()) == []
