"""Blocks of the documents that are no programs and no configurations: commands parse, and JSON is valid.

A block in a language without such a check has the line ``<!-- not run: reason -->`` before it.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from mqtemplate.cli.main import main
from tests.docs.fences import DOCS, ROOT, Fence, fences

PAGES = sorted(DOCS.rglob("*.md"))
OTHER_PROGRAMS = {
    *("celery", "git", "mqadmin", "sha256sum", "spark-pipelines", "spark-submit", "start-connect-server.sh", "taskiq"),
    "uvicorn",
}
"""Programs whose command lines are theirs."""

EXTRAS = set(tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"])
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))


# --- commands -----------------------------------------------------------------------------------------


def fault_of_command(line: str) -> str | None:
    """Return what is wrong with a command; None if nothing is."""
    words = shlex.split(line, comments=True)
    if words[:1] == ["export"]:
        return None if all("=" in word for word in words[1:]) else "export without a value"
    if words[:3] == ["python", "-m", "mqtemplate"]:
        words = words[2:]
    elif words[:2] == ["python", "manage.py"]:
        return None if words[2:] in (["migrate"], ["mqtemplate", "run"]) else "no command of the page on Django"
    program, arguments = words[0], words[1:]
    if program == "mqtemplate":
        # With --help the options are parsed, and nothing runs.
        return None if main([*arguments, "--help"]) == 0 else "mqtemplate refuses the arguments"
    if program == "pip":
        extras = {name for word in arguments for name in re.findall(r"\[([\w,-]+)\]", word)}
        unknown = {name for group in extras for name in group.split(",")} - EXTRAS
        return f"no extra {unknown}" if unknown or arguments[:1] != ["install"] else None
    if program == "make":
        return None if set(arguments) <= TARGETS else f"no target {arguments}"
    if program == "python":
        return None if arguments[0] == "-m" and find_spec(arguments[1]) else f"no module {arguments}"
    return None if program in OTHER_PROGRAMS else "a program that is not known here"


def commands(block: Fence) -> list[str]:
    """Return the commands that a block shows after a prompt."""
    return re.findall(r"^\$ (.+)$", block.text, re.MULTILINE)


# --- blocks -----------------------------------------------------------------------------------------


def check_commands(text: str) -> None:
    """Check the commands of a terminal."""
    found = commands(Fence("console", None, text, None, 0))
    assert found
    assert [f"{line}: {fault}" for line in found if (fault := fault_of_command(line))] == []


def check_json(text: str) -> None:
    """Check JSON, or lines of JSON as a log has them."""
    try:
        json.loads(text)
    except json.JSONDecodeError:
        for line in text.splitlines():
            json.loads(line)


CHECKS: dict[str, Callable[[str], object]] = {
    "console": check_commands,
    "json": check_json,
    "text": lambda text: check_commands(text) if text.startswith("$ ") else None,
}
"""Language -> check of a block; output, which is text, has commands at most."""

ELSEWHERE = {"python", "yaml", "toml", "ini", "dockerfile"}
"""Languages that `test_code_blocks` and `test_configurations` run and load."""


def unchecked(page: Path) -> list[str]:
    """Return the blocks of a page that nothing checks, and that do not say why."""
    return [
        f"{page.name}:{block.line} {block.language or 'no language'}"
        for block in fences(page)
        if block.language not in ELSEWHERE.union(CHECKS) and block.reason is None
    ]


def blocks_to_check() -> list[Any]:
    """Return the blocks of all pages. A block with a title belongs to the tutorial, whose tests run it."""
    return [
        pytest.param(block, id=f"{page.relative_to(DOCS)}-{block.line}")
        for page in PAGES
        for block in fences(page)
        if block.language in CHECKS and not (block.title or block.reason) and page.parent.name != "tutorial"
    ]


@pytest.mark.parametrize("block", blocks_to_check())
def test_a_block_is_valid(block: Fence) -> None:
    CHECKS[block.language](block.text)


def test_every_block_is_checked_or_says_why_not() -> None:
    assert [block for page in PAGES for block in unchecked(page)] == []


@pytest.mark.parametrize(
    "text", ["```sql\nSELECT 1\n```\n", "```\nno language\n```\n", "text\n\n```bash\nmqtemplate run\n```\n"]
)
def test_a_block_in_another_language_needs_a_reason(text: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text, "utf-8")

    assert len(unchecked(page)) == 1
    page.write_text(text.replace("```", "<!-- not run: why -->\n```", 1), "utf-8")
    assert unchecked(page) == []


@pytest.mark.parametrize(
    "line",
    [
        "mqtemplate rum shop.main:app",
        "mqtemplate run shop.main:app --worker 4",
        "pip install '.[sprak]'",
        "make dosc",
        "python -m examples.shopp",
        "python manage.py mqtemplate start",
        "shop start",
    ],
)
def test_a_wrong_command_is_found(line: str) -> None:
    assert fault_of_command(line) is not None
