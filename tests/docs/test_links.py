"""Links of the documents, in their sources: files, anchors, names of benches, and the navigation of the site."""

from __future__ import annotations

import posixpath
import re
from functools import cache
from pathlib import Path

import pytest
import yaml

from tests.docs.fences import DOCS, ROOT

PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("examples/*/README.md")])
REPOSITORY = "https://github.com/mqtemplate/mqtemplate"
_CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s]+)\)")


@cache
def anchors(page: Path) -> frozenset[str]:
    """Return the anchors of a page: its headings as MkDocs and GitHub name them, its ``id`` s, and names of the API."""
    text = page.read_text("utf-8")
    found = set(re.findall(r'id="([^"]+)"', text)) | set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    for heading in re.findall(r"^#+ (.+)$", prose, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        found.add(re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower()))
    return frozenset(found)


def dead_links(page: Path) -> list[str]:
    """Return the relative links of a page that have no target."""
    dead = []
    for link in _LINK.findall(_CODE.sub("", page.read_text("utf-8"))):
        address, _, anchor = link.partition("#")
        target = page if not address else Path(posixpath.normpath(page.parent / address))
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            dead.append(link)
    return dead


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_have_targets(page: Path) -> None:
    """A file or a folder, and the heading after ``#`` in it."""
    assert dead_links(page) == []


def test_a_dead_link_would_be_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n[a](#title) [b](#other) [c](missing.md) [d](page.md#title)\n", "utf-8")

    assert dead_links(page) == ["#other", "missing.md"]


def test_links_of_the_readme_work_on_the_page_of_a_package_index() -> None:
    """There is no repository around it, so they are absolute, and name files that exist here."""
    text = (ROOT / "README.md").read_text("utf-8")
    here = re.findall(rf"{re.escape(REPOSITORY)}/(?:blob|tree)/main/([^)#\s]+)", text)

    assert _LINK.findall(_CODE.sub("", text)) == []
    assert here
    assert [path for path in here if not (ROOT / path).exists()] == []


def test_every_bench_that_a_page_names_exists() -> None:
    named = {(page.name, name) for page in PAGES for name in re.findall(r"`bench/(\w+\.py)`", page.read_text("utf-8"))}

    assert [entry for entry in sorted(named) if not (ROOT / "bench" / entry[1]).exists()] == []


def pages_of(entries: object) -> list[str]:
    """Return the pages of a part of the navigation."""
    if isinstance(entries, list):
        return [page for entry in entries for page in pages_of(entry)]
    if isinstance(entries, dict):
        return pages_of(list(entries.values()))
    return [str(entries)]


def test_every_page_is_in_the_navigation_once() -> None:
    """Add a new page to ``nav`` in docs/site/mkdocs.yml."""
    navigation = pages_of(yaml.safe_load((DOCS / "site" / "mkdocs.yml").read_text("utf-8"))["nav"])
    navigation.remove("changelog.md")  # the site makes it from CHANGELOG.md

    assert sorted(navigation) == sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))
