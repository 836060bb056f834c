"""The documentation site: it builds without a warning, its links have targets, and it works in a browser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.console.browser import chromium
from tests.docs.fences import DOCS
from tests.docs.site import Site, build_site, missing_for_the_site, serve
from tests.docs.test_links import pages_of

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.timeout(600),  # a hundred pages, twice in a browser
    pytest.mark.skipif(missing_for_the_site() is not None, reason=str(missing_for_the_site())),
]

PHONE = {"width": 390, "height": 844}
DESKTOP = {"width": 1280, "height": 900}
SCHEME = "document.body.getAttribute('data-md-color-scheme')"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    folder = tmp_path_factory.mktemp("site").resolve()
    build_site(folder)
    return Site(folder)


@pytest.fixture(scope="module")
def address(site: Site) -> Iterator[str]:
    with serve(site.folder) as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


class Visit:
    """Pages in one window of the browser; *faults* has what went wrong on them."""

    def __init__(self, browser: Any, address: str, **options: Any) -> None:
        self.window = browser.new_page(**options)
        self.address = address
        self.faults: list[str] = []
        self._page = ""
        self.window.on("console", self._on_console)
        self.window.on("pageerror", lambda error: self._fault(f"exception {error}"))
        self.window.on("request", self._on_request)
        self.window.on("response", self._on_response)

    def open(self, page: str) -> None:
        self._page = page
        self.window.goto(f"{self.address}/{page}", wait_until="load")

    def _fault(self, text: str) -> None:
        self.faults.append(f"{self._page}: {text}")

    def _on_console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self._fault(message.text)

    def _on_response(self, response: Any) -> None:
        if response.status >= 400:
            self._fault(f"{response.status} for {response.url}")

    def _on_request(self, request: Any) -> None:
        if not request.url.startswith((self.address, "data:", "blob:")):
            self._fault(f"requests {request.url}")


def paths(site: Site) -> list[str]:
    return [str(file.relative_to(site.folder)) for file in site.pages]


def test_links_anchors_and_resources_have_targets(site: Site) -> None:
    assert site.dead_links() == []


def test_no_page_loads_anything_from_another_host(site: Site) -> None:
    assert site.foreign_resources() == []


def test_every_page_opens_on_a_desktop_in_light_colours(site: Site, address: str, browser: Any) -> None:
    """No error on the console, no exception, no missing file, no request to another host."""
    visit = Visit(browser, address, viewport=DESKTOP, color_scheme="light")
    schemes = set()
    for page in paths(site):
        visit.open(page)
        schemes.add(visit.window.evaluate(SCHEME))

    assert visit.faults == []
    assert schemes == {"default"}


def test_every_page_opens_on_a_phone_in_dark_colours(site: Site, address: str, browser: Any) -> None:
    """Tables, code and pictures scroll inside of the page; the page itself is not wider than the screen."""
    visit = Visit(browser, address, viewport=PHONE, color_scheme="dark")
    schemes, wide = set(), []
    for page in paths(site):
        visit.open(page)
        schemes.add(visit.window.evaluate(SCHEME))
        width = visit.window.evaluate("document.documentElement.scrollWidth")
        if width > PHONE["width"]:
            wide.append(f"{page}: {width}")

    assert visit.faults == []
    assert wide == []
    assert schemes == {"slate"}


def test_the_pictures_follow_the_switch_between_light_and_dark(address: str, browser: Any) -> None:
    visit = Visit(browser, address, viewport=DESKTOP, color_scheme="light")
    visit.open("index.html")
    ink = "getComputedStyle(document.querySelector('svg.picture text')).fill"
    light = visit.window.evaluate(ink)

    visit.window.locator("label[title='Dark']").click()

    assert visit.window.evaluate(ink) != light


def test_the_search_finds_a_page_that_was_opened_from_the_disk(site: Site, browser: Any) -> None:
    """Without a server: the index is a script, and the worker an iframe."""
    window = browser.new_page(viewport=DESKTOP)
    window.goto(Path(site.folder, "index.html").as_uri())
    window.locator("input[name='query']").fill("dead letters")

    window.wait_for_selector(".md-search-result__item")

    assert "failures.html" in window.locator(".md-search-result__item a").first.get_attribute("href")


def section_of(page: str) -> str:
    """Return the section of the navigation that has a page."""
    navigation = yaml.safe_load((DOCS / "site" / "mkdocs.yml").read_text("utf-8"))["nav"]
    source = page.removesuffix(".html") + ".md"
    return next(section for entry in navigation for section, pages in entry.items() if source in pages_of(pages))


def found_by(site: Site, browser: Any, query: str) -> list[str]:
    """Return the pages that the search shows, the first one first."""
    window = browser.new_page(viewport=DESKTOP)
    window.goto(Path(site.folder, "index.html").as_uri())
    window.locator("input[name='query']").fill(query)
    window.wait_for_selector(".md-search-result__item")
    links = [each.get_attribute("href") for each in window.locator(".md-search-result__item > a").all()]
    return [re.split("[#?]", link.removeprefix(f"{site.folder.as_uri()}/"))[0] for link in links]


@pytest.mark.parametrize("query", ["cancel", "delay", "retry", "dead letter", "outbox", "schedule", "transaction"])
def test_the_search_shows_a_guide_before_the_reference_and_the_pages_of_maintainers(
    site: Site, browser: Any, query: str
) -> None:
    pages = found_by(site, browser, query)

    assert section_of(pages[0]) in ("Start", "Guides", "Operations"), pages


def test_the_search_shows_a_name_of_the_api_in_the_reference_first(site: Site, browser: Any) -> None:
    assert found_by(site, browser, "send_one_way")[0] == "reference/sending.html"
