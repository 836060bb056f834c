"""Every block of Python in the documents runs in a test, or says why it does not.

A block runs as one of these:

- the file of a step of the tutorial (it has a title);
- a program, whose output is the block after it (the language is ``text``);
- a fragment, with the code around it in ``surroundings.md``;
- a block that another test runs (`ELSEWHERE`).

Otherwise the line before it is ``<!-- not run: reason -->``.
"""

from __future__ import annotations

import re
import sys
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.docs.fences import DOCS, ROOT, Fence, fences, missing_lines
from tests.programs import OF_AN_APPLICATION, ForkedPython


class Surroundings(NamedTuple):
    """Code around one fragment: the block of the page that contains a text. See ``surroundings.md``."""

    page: str
    contains: str
    program: str


_SURROUNDINGS = Path(__file__).with_name("surroundings.md").read_text("utf-8")
_PROGRAM = r"(?:\n\n```python\n(.*?)^```$)?"
PRELUDE = re.findall(f"^## Start of every program{_PROGRAM}", _SURROUNDINGS, re.DOTALL | re.MULTILINE)[0]
FRAGMENTS = [
    Surroundings(page, contains, program or "# block")
    for page, contains, program in re.findall(
        rf"^## (\S+) \| ([^\n]+){_PROGRAM}", _SURROUNDINGS, re.DOTALL | re.MULTILINE
    )
]

ELSEWHERE = {
    # page -> the test that runs further blocks, and a text of each; an empty one is in every block
    "quickstart.md": (
        "tests/test_docs.py",
        ["class Reminders", "from reminders import Reminders", "def test_the_customer"],
    ),
    "request-reply.md": ("tests/test_docs.py", ["def test_the_price"]),
    "async.md": ("tests/test_docs.py", ["def test_a_bill_takes_three_seconds"]),
    "testing.md": ("tests/testing/test_docs.py", [""]),
    "web/fastapi.md": ("tests/starters/test_web_pages.py", [""]),
    "web/flask.md": ("tests/starters/test_web_pages.py", [""]),
    "web/django.md": ("tests/starters/test_web_pages.py", [""]),
    "web/django-tasks.md": ("tests/starters/test_web_pages.py", [""]),
    "logging.md": ("tests/context/test_logging_recipes.py", ["LOGGING", "def by_event"]),
    "notebooks.md": ("tests/examples/test_notebook.py", [""]),
    "spark.md": ("tests/docs/test_spark_page.py", [""]),
    **{
        f"spark/{page}.md": ("tests/docs/test_spark_page.py", [""])
        for page in ("streams", "delta", "iceberg", "databases", "parquet")
    },
}

WITH_WHOLE_LINES = """
import builtins, runpy, sys

def print_line(*values, sep=" ", end="\\n", file=None, flush=False):
    (file or sys.stdout).write((sep or " ").join(map(str, values)) + ("\\n" if end is None else end))

builtins.print = print_line
sys.path.insert(0, "")
runpy.run_path(sys.argv[1], run_name="__main__")
"""
"""Runs a program with a ``print`` that writes once: Python's writes a text and its end apart, so lines may mix."""


def page_name(page: Path) -> str:
    return page.relative_to(DOCS).as_posix()


def programs() -> list[tuple[str, Fence, Fence]]:
    """Return the programs of all pages, each with the output that the page shows. Other tests run some whole pages.

    The output begins at most a short sentence after the program; a later block of the page shows something else.
    """
    return [
        (page_name(page), block, shown)
        for page in sorted(DOCS.rglob("*.md"))
        for block, shown in zip(fences(page), fences(page)[1:], strict=False)
        if block.language == "python" and block.title is None and shown.language == "text"
        if shown.line <= block.line + len(block.text.splitlines()) + 6
        if "import" in block.text and "" not in ELSEWHERE.get(page_name(page), ("", []))[1]
    ]


def block_of(fragment: Surroundings) -> Fence:
    """Return the one block of its page that a fragment names."""
    [block] = [
        each for each in fences(DOCS / fragment.page) if each.language == "python" and fragment.contains in each.text
    ]
    return block


def program_of(fragment: Surroundings) -> str:
    """Return the code around a fragment with the fragment in it."""
    lines = []
    for line in fragment.program.splitlines():
        indent = line.removesuffix("# block")
        lines.append(textwrap.indent(block_of(fragment).text, indent) if line.strip() == "# block" else line)
    return PRELUDE + "\n".join(lines)


@pytest.fixture(scope="module")
def python() -> Iterator[ForkedPython]:
    with ForkedPython("-W", "error", modules=OF_AN_APPLICATION) as python:
        yield python


@pytest.mark.parametrize(
    ("block", "shown"),
    [pytest.param(block, shown, id=f"{page}-{block.line}") for page, block, shown in programs()],
)
def test_a_program_prints_what_its_page_shows(block: Fence, shown: Fence, tmp_path: Path, python: ForkedPython) -> None:
    """Warnings are errors."""
    (tmp_path / "app.py").write_text(block.text, "utf-8")

    done = python.run(tmp_path, WITH_WHOLE_LINES, "app.py")

    assert done.returncode == 0, done.stdout + done.stderr
    assert missing_lines(shown.text.strip(), done.stdout) == [], done.stdout


@pytest.mark.parametrize("fragment", FRAGMENTS, ids=lambda each: f"{each.page}-{each.contains}")
def test_a_fragment_runs(
    fragment: Surroundings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("fragment_of_a_page")
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def run_test(function: types.FunctionType) -> None:
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        function(*(request.getfixturevalue(name) for name in names))

    module.run_test = run_test  # type: ignore[attr-defined]
    exec(compile(program_of(fragment), f"{fragment.page}: {fragment.contains}", "exec"), vars(module))


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=page_name)
def test_every_block_of_python_runs_or_says_why_not(page: Path) -> None:
    name = page_name(page)
    run = {block for owner, block, _ in programs() if owner == name}
    run |= {block_of(fragment) for fragment in FRAGMENTS if fragment.page == name}

    test, texts = ELSEWHERE.get(name, ("tests", []))

    left = [
        f"docs/{name}:{block.line}"
        for block in fences(page)
        if block.language == "python" and block not in run and not (block.reason or block.title)
        if not any(text in block.text for text in texts)
    ]

    assert left == []
    assert (ROOT / test).exists()


def test_no_block_has_a_form_that_the_checks_do_not_see() -> None:
    """There are as many opening fences as blocks that were found."""
    for page in DOCS.rglob("*.md"):
        opening = sum(line.startswith("```") for line in page.read_text("utf-8").splitlines()) / 2

        assert len(fences(page)) == opening, page
