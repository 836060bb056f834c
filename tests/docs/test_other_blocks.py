"""Blocks of the documents in other languages than Python: settings load, commands parse, other files are valid.

A block in a language without such a check has the line ``<!-- not run: reason -->`` before it.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
import tomllib
import types
from collections.abc import Callable, Iterator
from configparser import ConfigParser
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from mqtemplate.cli.main import main
from mqtemplate.context.settings.source import load_settings
from tests.docs.fences import DOCS, ROOT, Fence, fences

PAGES = sorted(DOCS.rglob("*.md"))
OTHER_PROGRAMS = {"celery", "git", "mqadmin", "sha256sum", "spark-submit", "taskiq", "uvicorn"}
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


# --- settings, and files of other programs ------------------------------------------------------------


def check_settings(text: str, folder: Path, extension: str) -> None:
    """Load a block as ``application.yml`` or ``.toml``. Unknown keys and invalid values are errors."""
    (folder / f"application.{extension}").write_text(text, "utf-8")
    load_settings(
        folder, environment=dict.fromkeys(re.findall(r"\$\{([A-Z_]+)\}", text), "a-text-of-32-characters-or-more.")
    )


def check_yaml(text: str, folder: Path) -> None:
    """Check settings, or the commands in a file of Docker Compose or Kubernetes."""
    document = next(yaml.safe_load_all(text))
    if "services" in document or "apiVersion" in document:
        lists = [each for each in lists_in(document) if each[:1] == ["mqtemplate"]]
        assert [fault for each in lists if (fault := fault_of_command(shlex.join(each)))] == []
    else:
        check_settings(text, folder, "yml")


def lists_in(value: Any) -> Iterator[list[Any]]:
    """Yield the lists in a document, with the lists inside of them."""
    if isinstance(value, list):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from lists_in(each)


def check_toml(text: str, folder: Path) -> None:
    """Check settings, or the dependencies in a ``pyproject.toml``."""
    document = tomllib.loads(text)
    if "project" in document:
        for dependency in document["project"]["dependencies"]:
            assert Requirement(dependency).extras <= EXTRAS
    else:
        check_settings(text, folder, "toml")


def check_unit(text: str, _folder: Path) -> None:
    """Check a unit of systemd."""
    unit = ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(text)
    program, _, arguments = unit["Service"]["ExecStart"].partition(" ")
    assert fault_of_command(f"{Path(program).name} {arguments}") is None


def check_dockerfile(text: str, _folder: Path) -> None:
    """Check the commands of a ``Dockerfile``."""
    found = [line.removeprefix("RUN ") for line in text.splitlines() if line.startswith("RUN mqtemplate")]
    found += [
        shlex.join(json.loads(line.removeprefix("CMD "))) for line in text.splitlines() if line.startswith("CMD ")
    ]
    assert len(found) == 2
    assert [fault for line in found if (fault := fault_of_command(line))] == []


def check_commands(text: str, _folder: Path) -> None:
    """Check the commands of a terminal."""
    found = commands(Fence("console", None, text, None, 0))
    assert found
    assert [f"{line}: {fault}" for line in found if (fault := fault_of_command(line))] == []


CHECKS: dict[str, Callable[[str, Path], object]] = {
    "console": check_commands,
    "yaml": check_yaml,
    "toml": check_toml,
    "ini": check_unit,
    "dockerfile": check_dockerfile,
    "json": lambda text, _folder: json.loads(text),
    "text": lambda text, folder: check_commands(text, folder) if text.startswith("$ ") else None,
}
"""Language -> check of a block; output, which is text, has commands at most."""


def unchecked(page: Path) -> list[str]:
    """Return the blocks of a page that nothing checks, and that do not say why."""
    return [
        f"{page.name}:{block.line} {block.language or 'no language'}"
        for block in fences(page)
        if block.language not in {*CHECKS, "python"} and block.reason is None  # of Python: test_code_blocks
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
def test_a_block_is_valid(block: Fence, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = types.ModuleType("shop.errors")  # of the reader, whose exceptions settings may name
    errors.OrderError = type("OrderError", (Exception,), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "shop", types.ModuleType("shop"))
    monkeypatch.setitem(sys.modules, "shop.errors", errors)

    CHECKS[block.language](block.text, tmp_path)


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


def test_a_setting_that_does_not_exist_is_found(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="flush-disk-typ"):
        check_yaml("mqtemplate:\n  broker:\n    flush-disk-typ: SYNC_FLUSH\n", tmp_path)
