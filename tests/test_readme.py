"""What the README shows works when it is pasted into an empty folder."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """The fenced blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


@pytest.fixture
def pasted(tmp_path: Path) -> Path:
    """A folder with nothing in it but the two files that the README shows."""
    (tmp_path / "application.yml").write_text(blocks("yaml")[0], encoding="utf-8")
    (tmp_path / "app.py").write_text(blocks("python")[0], encoding="utf-8")
    return tmp_path


def test_the_example_works_when_pasted_into_an_empty_folder(pasted: Path) -> None:
    """It runs as a program of its own, with warnings as errors, and prints what the README says it prints."""
    promised = blocks("text")[0].splitlines()[1:]

    run = subprocess.run(
        [sys.executable, "-W", "error", "app.py"], cwd=pasted, capture_output=True, text=True, timeout=60, check=False
    )

    assert run.returncode == 0, run.stderr
    assert [line for line in run.stdout.splitlines() if line in promised] == promised


def test_the_example_is_fifteen_lines() -> None:
    lines = [line for line in blocks("python")[0].splitlines() if line.strip()]

    assert len(lines) <= 15


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
