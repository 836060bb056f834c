"""Headless Chromium, and a dashboard on a socket for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mqtemplate.console import DashboardServer
from tests.chromium import FLAGS, find_chromium, missing_for_a_browser
from tests.console.pages import Shop


@contextmanager
def chromium() -> Iterator[Any]:
    """Yield a browser, or skip the test with the reason."""
    missing = missing_for_a_browser()
    if missing is not None:
        pytest.skip(missing)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), headless=True, args=list(FLAGS))
        yield browser
        browser.close()


@contextmanager
def served(shop: Shop) -> Iterator[str]:
    """Serve the dashboard of a shop; yield its address."""
    server = DashboardServer(shop.dashboard, "127.0.0.1", 0)
    server.start()
    try:
        yield f"http://{server.address}"
    finally:
        server.stop()


class Visitor:
    """A tab of the browser that notes problems: errors of scripts, refused content, pages wider than the screen."""

    def __init__(self, page: Any, base: str) -> None:
        self.page = page
        self.base = base
        self.problems: list[str] = []
        page.set_default_timeout(60_000)
        page.on("console", lambda message: self._note(message.type, message.text))
        page.on("pageerror", lambda error: self.problems.append(f"script: {error}"))

    def _note(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.problems.append(f"{kind}: {text}")

    def go(self, path: str) -> None:
        self.page.goto(self.base + path)
        self.check_width(path)

    def await_parts(self) -> None:
        """Wait until the parts that come after the first paint are there."""
        for part in self.page.locator("[data-src], [aria-busy]").all():
            part.wait_for(state="detached")

    def check_width(self, path: str = "") -> None:
        """Note a page that is wider than the screen."""
        width = self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        if width > 0:
            self.problems.append(f"{path} is {width} px too wide")

    def press(self, name: str) -> None:
        """Click a button, and wait for the next page."""
        with self.page.expect_navigation():
            self.page.get_by_role("button", name=name, exact=True).first.click()
        self.check_width(name)

    def open_menu(self, listener: str) -> None:
        """Open the menu of a listener."""
        self.page.get_by_role("button", name=f"menu of {listener}", exact=True).click()

    @property
    def text(self) -> str:
        return str(self.page.locator("main").inner_text())

    def screenshot(self, folder: Path | None, name: str) -> None:
        if folder is not None:
            self.page.screenshot(path=folder / f"{name}.png", full_page=True)
