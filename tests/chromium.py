"""Chromium for tests of pages: one that playwright has downloaded, or the system's.

``make setup`` runs this module, which says what is missing.
"""

from __future__ import annotations

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
INSTALL = f"{sys.executable} -m playwright install chromium"


def find_chromium() -> str | None:
    """Return the path of a Chromium; None if there is none."""
    on_path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    return on_path or _downloaded()


def _downloaded() -> str | None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path = playwright.chromium.executable_path
    return path if Path(path).exists() else None


def missing_for_a_browser() -> str | None:
    """Return what is missing, with the command that installs it; None if a browser can be started."""
    if find_spec("playwright") is None:
        return "no playwright: make setup"
    return None if find_chromium() else f"no Chromium: {INSTALL}"


if __name__ == "__main__":
    missing = missing_for_a_browser()
    if missing is not None:
        print(f"The tests of pages in a browser are skipped: {missing}")
