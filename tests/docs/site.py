"""The built site: where it is, its pages, and a small server for the browser."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

from tests.docs.fences import DOCS


def missing_for_the_site() -> str | None:
    """Return why the site cannot be built, or None."""
    missing = [name for name in ("mkdocs", "material", "mkdocstrings") if find_spec(name) is None]
    return f"no {', '.join(missing)}: make docs" if missing else None


def build_site(folder: Path) -> None:
    """Build the site as ``make docs`` does: a warning is an error."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", folder],
        cwd=DOCS / "site",
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


class Page(HTMLParser):
    """Links, resources and anchors of one page."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file
        self.links: list[str] = []
        self.resources: list[str] = []
        self.anchors: set[str] = set()
        self.feed(file.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = {name: value or "" for name, value in attrs}
        self.anchors |= {named[name] for name in ("id", "name") if name in named}
        if tag == "a" and "href" in named:
            self.links.append(named["href"])
        elif tag == "link" and named.get("rel") in ("stylesheet", "icon", "preload", "preconnect"):
            self.resources.append(named.get("href", ""))
        elif tag in ("script", "img", "source", "iframe") and "src" in named:
            self.resources.append(named["src"])


class Site:
    """All pages of a built site."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pages = {file: Page(file) for file in sorted(folder.rglob("*.html"))}

    def dead_links(self) -> list[str]:
        """Return the links and resources that lead nowhere in the site."""
        return [
            f"{page.file.relative_to(self.folder)} -> {link}"
            for page in self.pages.values()
            for link in {*page.links, *page.resources}
            if not urlsplit(link).scheme and not self._has_target(page, link)
        ]

    def _has_target(self, page: Page, link: str) -> bool:
        address, anchor = urldefrag(unquote(link))
        base = self.folder if address.startswith("/") or page.file.name == "404.html" else page.file.parent
        target = (base / address.lstrip("/")).resolve() if address else page.file
        if target.is_dir():
            target /= "index.html"
        if target not in self.pages:
            return target.is_file()
        return not anchor or anchor in self.pages[target].anchors

    def foreign_resources(self) -> list[str]:
        """Return what pages load from other hosts."""
        return [
            f"{page.file.relative_to(self.folder)}: {address}"
            for page in self.pages.values()
            for address in page.resources
            if urlsplit(address).netloc
        ]


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Serve a folder; yield its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()
