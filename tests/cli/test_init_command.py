"""``mqtemplate init``: the project runs and passes its test at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cli.running import CommandLine
from tests.programs import run_python
from tests.running.program import Program


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    monkeypatch.chdir(tmp_path)
    return CommandLine("", tmp_path, capsys)


def test_a_new_project_passes_its_test_and_runs(run: CommandLine, tmp_path: Path) -> None:
    result = run.plain("init", "shop-demo")
    project = tmp_path / "shop-demo"
    tested = run_python(project, "-W", "error", "-m", "pytest", "-q", "-p", "no:cacheprovider")
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


@pytest.mark.parametrize("kind", ["dangling", "outside"])
@pytest.mark.parametrize("name", ["app.py", ".gitignore", "README.md"])
def test_a_link_in_place_of_a_file_is_not_written_through(
    run: CommandLine, tmp_path: Path, kind: str, name: str
) -> None:
    """A folder that somebody else prepared could lead the files of the project to any place."""
    target = tmp_path / "elsewhere" / "authorized_keys"
    target.parent.mkdir()
    if kind == "outside":
        target.write_text("mine", "utf-8")
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / name).symlink_to(target)

    result = run.plain("init", "shop")

    assert result.code == 2
    assert f"shop has {name} already; nothing was written" in result.errors
    assert [each.name for each in (tmp_path / "shop").iterdir()] == [name]
    assert [each.read_text("utf-8") for each in target.parent.iterdir()] == (["mine"] if kind == "outside" else [])


@pytest.mark.parametrize("kind", ["dangling", "outside"])
def test_a_link_in_place_of_the_folder_is_refused(run: CommandLine, tmp_path: Path, kind: str) -> None:
    if kind == "outside":
        (tmp_path / "elsewhere").mkdir()
    (tmp_path / "shop").symlink_to(tmp_path / "elsewhere")

    result = run.plain("init", "shop")

    assert result.code == 2
    assert "shop is a symbolic link; nothing was written. Give another name, or --directory" in result.errors
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["elsewhere", "shop"][kind == "dangling" :]


def test_a_file_in_place_of_the_folder_is_an_error(run: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "shop").write_text("mine", "utf-8")

    result = run.plain("init", "shop")

    assert result.code == 2
    assert "the folder shop cannot be created: File exists; nothing was written" in result.errors


def test_a_file_that_appears_meanwhile_is_not_replaced(
    run: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the check and the writing somebody may put a link there."""
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "app.py").symlink_to(tmp_path / "elsewhere")
    monkeypatch.setattr(os.path, "lexists", lambda _: False)

    result = run.plain("init", "shop")

    assert result.code == 1
    assert (
        "shop/app.py cannot be written: File exists; make that possible, or give another --directory" in result.errors
    )
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("arguments", [("spark", "package", "out")])
def test_a_command_does_not_create_the_target_of_a_link(
    run: CommandLine, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "elsewhere")

    result = run.plain(*arguments)

    assert result.code == 2
    assert "out is a link to" in result.errors
    assert "which does not exist; name the file itself" in result.errors
    assert not (tmp_path / "elsewhere").exists()
