"""Hooks of MkDocs: the pages are written for readers of the repository, too, so links and pictures are adapted here.

- A link to a file outside of ``docs/`` leads to the repository.
- A picture from ``pictures/`` becomes part of its page, so that its colours follow the switch between light and dark.
- The changelog at the top of the repository is a page of the site.
- The search ranks guides above the reference, and both above the pages for maintainers.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
CHANGELOG = "changelog.md"
LINK = re.compile(r"(?<!!)(\[[^\]]*\])\((?!https?:|#|mailto:)([^)\s#]+)(#[^)\s]*)?\)")
SEARCH_BOOSTS = {"Coming from": 0.1, "Reference": 0.001, "reference/sending.md": 0.05, "Maintainers": 0.0005}
"""Section of the navigation, or page -> factor in the search of the site; 1 for the others.

A word in a title counts 1,000 times, and titles of the reference are names: ``retry`` would be above the page on
failures.
"""
PICTURE = re.compile(r'<img alt="([^"]*)" src="[^"]*pictures/([\w-]+)\.svg" ?/?>')


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Add the changelog."""
    files.append(File.generated(config, CHANGELOG, content=(ROOT / "CHANGELOG.md").read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Lead links out of ``docs/`` to the repository, and set the rank of the page in the search."""
    section = page.ancestors[-1].title if page.ancestors else None
    factor = SEARCH_BOOSTS.get(page.file.src_uri, SEARCH_BOOSTS.get(section, 1))
    page.meta.setdefault("search", {}).setdefault("boost", factor)
    source = "" if page.file.src_uri == CHANGELOG else f"docs/{page.file.src_uri}"
    folder = posixpath.dirname(source)
    below = posixpath.relpath("docs", folder or ".")

    def adapted(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        path = posixpath.normpath(posixpath.join(folder, target))
        if path == "CHANGELOG.md":
            return f"{text}({posixpath.relpath(CHANGELOG, posixpath.dirname(page.file.src_uri) or '.')}{anchor})"
        if path.startswith("docs/"):
            return f"{text}({target.removeprefix('docs/')}{anchor})" if below == "docs" else match[0]
        if path.startswith("..") or not (ROOT / path).exists():
            return match[0]  # MkDocs reports it
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"{text}({config.repo_url}/{kind}/main/{path}{anchor})"

    return LINK.sub(adapted, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Put the pictures into the page."""

    def inline(match: re.Match[str]) -> str:
        picture = (DOCS / "pictures" / f"{match[2]}.svg").read_text("utf-8")
        return f'<div class="picture-frame">{picture}</div>'

    return PICTURE.sub(inline, html)
