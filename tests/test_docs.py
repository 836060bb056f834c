"""The programs in the documents work when they are pasted into an empty folder, and links have targets."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import programs

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
QUICKSTART = ROOT / "docs" / "quickstart.md"


def blocks(page: Path, language: str) -> list[str]:
    """Return the fenced blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


@pytest.fixture
def pasted(tmp_path: Path) -> Path:
    """Folder with only the two files of the README."""
    (tmp_path / "application.yml").write_text(blocks(README, "yaml")[0], encoding="utf-8")
    (tmp_path / "app.py").write_text(blocks(README, "python")[0], encoding="utf-8")
    return tmp_path


@pytest.fixture
def quickstart(tmp_path: Path) -> Path:
    """Folder with the files of the first three sections of the quickstart."""
    reminders, main, _, test, *_ = blocks(QUICKSTART, "python")
    (tmp_path / "application.yml").write_text(blocks(QUICKSTART, "yaml")[0], encoding="utf-8")
    (tmp_path / "reminders.py").write_text(reminders, encoding="utf-8")
    (tmp_path / "main.py").write_text(main, encoding="utf-8")
    (tmp_path / "test_reminders.py").write_text(test, encoding="utf-8")
    return tmp_path


def run_python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder; raise an error with its output if it fails."""
    run = programs.run([sys.executable, *arguments], folder)
    assert run.returncode == 0, run.stdout + run.stderr
    return run


def run_pytest(folder: Path) -> str:
    """Run the tests in a folder and return the output."""
    return run_python(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider").stdout


def test_the_readme_example_works_when_pasted_into_an_empty_folder(pasted: Path) -> None:
    """With warnings as errors it prints the lines that the README shows."""
    shown = blocks(README, "text")[0].splitlines()[1:]

    run = run_python(pasted, "-W", "error", "app.py")

    assert [line for line in run.stdout.splitlines() if line in shown] == shown


def test_the_readme_example_has_at_most_fifteen_lines() -> None:
    lines = [line for line in blocks(README, "python")[0].splitlines() if line.strip()]

    assert len(lines) <= 15


def test_the_quickstart_application_runs_until_ctrl_c(quickstart: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-u", "-W", "error", "main.py"],
        cwd=quickstart,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as program:
        assert program.stdout is not None
        line = program.stdout.readline()
        program.send_signal(signal.SIGINT)

    assert (line, program.returncode) == ("order A-1 is not paid: 30 EUR\n", 0)


@pytest.mark.feature("C9")
def test_the_quickstart_test_passes(quickstart: Path) -> None:
    """Pytest finds the fixtures without an import."""
    assert "1 passed" in run_pytest(quickstart)


def test_the_test_of_the_page_on_requests_passes(tmp_path: Path) -> None:
    program, test = blocks(ROOT / "docs" / "request-reply.md", "python")
    declarations = program.partition("with MQApplication")[0]
    (tmp_path / "test_prices.py").write_text(declarations + test, "utf-8")

    assert "1 passed" in run_pytest(tmp_path)


def test_the_test_of_the_page_on_asyncio_passes(tmp_path: Path) -> None:
    *_, test = blocks(ROOT / "docs" / "async.md", "python")
    imports = "import asyncio\n\nfrom mqtemplate import message_listener\n\nbills: list[str] = []\n\n\n"
    (tmp_path / "test_bills.py").write_text(imports + test, "utf-8")

    assert "1 passed" in run_pytest(tmp_path)


def test_every_bench_has_a_row_in_the_table_of_benches() -> None:
    programs = [path.name for path in ROOT.glob("bench/*.py") if "__main__" in path.read_text(encoding="utf-8")]
    table = (ROOT / "bench" / "README.md").read_text(encoding="utf-8")

    assert [name for name in programs if f"| `{name}` |" not in table] == []


def test_tests_that_the_documents_name_exist() -> None:
    """``tests/…/test_x.py`` is a file, and ``::test_y`` a test in it."""
    missing = []
    for page in sorted(ROOT.glob("docs/**/*.md")):
        for path, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page.read_text(encoding="utf-8")):
            file = ROOT / path
            if not file.is_file() or (name and f"def {name}(" not in file.read_text(encoding="utf-8")):
                missing.append(f"{page.name} -> {path}::{name}")

    assert missing == []
