"""Tables of modules in ``docs/architecture``: each module with the first line of its docstring.

Run ``python -m tests.docs.module_tables --write`` after a module was added, renamed or joined with another one.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "architecture"

# page -> packages whose modules it lists, if these are not the package with the name of the page
_PACKAGES = {"store": ("record", "store")}
_NO_MODULES = frozenset({"README", "documentation"})
_TABLE = re.compile(r"(?<=<!-- modules -->\n).*?(?=<!-- end of modules -->)", re.DOTALL)
_ROW = re.compile(r"^\| `([^`]+\.py)` \|", re.MULTILINE)


def pages() -> list[str]:
    """Return the names of the pages that have a table of modules."""
    return sorted(path.stem for path in PAGES.glob("*.md") if path.stem not in _NO_MODULES)


def modules(page: str) -> dict[str, str]:
    """Return the modules of a page: the path below ``mqtemplate/`` -> the first line of the docstring."""
    library = ROOT / "mqtemplate"
    return {
        path.relative_to(library).as_posix(): _first_line(path)
        for package in _PACKAGES.get(page, (page,))
        for path in sorted((library / package).rglob("*.py"))
        if path.name != "__init__.py" and "migrations" not in path.parts
    }


def named(page: str) -> set[str]:
    """Return the modules that the table of a page names; empty without a table."""
    return set(_ROW.findall(_table(page)))


def is_current(page: str) -> bool:
    """Return True if the table of a page is as `write` writes it."""
    return _table(page) == _generated(page)


def write(page: str) -> None:
    """Write the table of a page between its markers."""
    path = PAGES / f"{page}.md"
    path.write_text(_TABLE.sub(lambda _: _generated(page), path.read_text(encoding="utf-8")), encoding="utf-8")


def _table(page: str) -> str:
    found = _TABLE.search((PAGES / f"{page}.md").read_text(encoding="utf-8"))
    return "" if found is None else found.group()


def _generated(page: str) -> str:
    rows = [f"| `{name}` | {line} |\n" for name, line in modules(page).items()]
    return "".join(["\n| Module | Contents |\n", "|---|---|\n", *rows, "\n"])


def _first_line(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0].replace("``", "`").replace("|", "\\|")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        raise SystemExit("usage: python -m tests.docs.module_tables --write")
    for each in pages():
        write(each)
