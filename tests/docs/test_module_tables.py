"""The pages of ``docs/architecture`` name exactly the modules that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.fences import DOCS, ROOT

PACKAGES = {"brokers": ("broker", "brokers"), "store": ("store", "record")}
"""The packages of a page, if they are more than the one with its name."""
PAGES = [
    page.stem for page in sorted((DOCS / "architecture").glob("*.md")) if (ROOT / "mqtemplate" / page.stem).is_dir()
]


def modules(page: str) -> set[str]:
    """Return the paths of the modules below ``mqtemplate/``."""
    paths = [
        path.relative_to(ROOT / "mqtemplate")
        for package in PACKAGES.get(page, (page,))
        for path in (ROOT / "mqtemplate" / package).rglob("*.py")
    ]
    return {str(path) for path in paths if path.name != "__init__.py" and "migrations" not in path.parts}


def named(page: str) -> tuple[set[str], set[str]]:
    """Return the names of files on a page, and among them the names in the first cells of its tables."""
    text = (DOCS / "architecture" / f"{page}.md").read_text(encoding="utf-8")
    found = re.compile(r"`([\w/]+\.py)`")
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return set(found.findall(text)), {name for row in rows for name in found.findall(row)}


def ends(module: str, name: str) -> bool:
    """Return True if *name* is the end of the path of a module."""
    return Path(module).parts[-len(Path(name).parts) :] == Path(name).parts


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_the_modules_that_exist(page: str) -> None:
    existing, (anywhere, in_tables) = modules(page), named(page)

    missing = sorted(module for module in existing if not any(ends(module, name) for name in anywhere))
    unknown = sorted(name for name in in_tables if not any(ends(module, name) for module in existing))
    assert (missing, unknown) == ([], []), (
        f"docs/architecture/{page}.md lacks modules, or names modules that do not exist"
    )
