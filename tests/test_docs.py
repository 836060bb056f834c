"""What the documents show works when it is pasted into an empty folder."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
QUICKSTART = ROOT / "docs" / "quickstart.md"


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


@pytest.fixture
def pasted(tmp_path: Path) -> Path:
    """A folder with nothing in it but the two files that the README shows."""
    (tmp_path / "application.yml").write_text(blocks(README, "yaml")[0], encoding="utf-8")
    (tmp_path / "app.py").write_text(blocks(README, "python")[0], encoding="utf-8")
    return tmp_path


@pytest.fixture
def quickstart(tmp_path: Path) -> Path:
    """The folder that a reader of the quickstart has after three sections."""
    reminders, main, _, test, *_ = blocks(QUICKSTART, "python")
    (tmp_path / "application.yml").write_text(blocks(QUICKSTART, "yaml")[0], encoding="utf-8")
    (tmp_path / "reminders.py").write_text(reminders, encoding="utf-8")
    (tmp_path / "main.py").write_text(main, encoding="utf-8")
    (tmp_path / "test_reminders.py").write_text(test, encoding="utf-8")
    return tmp_path


def test_the_readme_example_works_when_pasted_into_an_empty_folder(pasted: Path) -> None:
    """It runs as a program of its own, with warnings as errors, and prints what the README says it prints."""
    promised = blocks(README, "text")[0].splitlines()[1:]

    run = subprocess.run(
        [sys.executable, "-W", "error", "app.py"], cwd=pasted, capture_output=True, text=True, timeout=60, check=False
    )

    assert run.returncode == 0, run.stderr
    assert [line for line in run.stdout.splitlines() if line in promised] == promised


def test_the_readme_example_is_fifteen_lines() -> None:
    lines = [line for line in blocks(README, "python")[0].splitlines() if line.strip()]

    assert len(lines) <= 15


def test_the_quickstart_application_runs_until_ctrl_c(quickstart: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-u", "-W", "error", "main.py"], cwd=quickstart, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        told = program.stdout.readline()
        program.send_signal(signal.SIGINT)

    assert (told, program.returncode) == ("order A-1 is not paid: 30 EUR\n", 0)


@pytest.mark.feature("C9")
def test_the_quickstart_test_passes(quickstart: Path) -> None:
    """The fixtures are found by an installed pytest without any import."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=quickstart,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert "1 passed" in run.stdout, run.stdout


def test_links_lead_somewhere() -> None:
    """Relative links of the README and of everything under docs/ point to files that exist."""
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md")]
    dead = [
        f"{page.relative_to(ROOT)} -> {target}"
        for page in pages
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ]

    assert dead == []


def test_every_bench_says_in_the_table_what_it_measures() -> None:
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
