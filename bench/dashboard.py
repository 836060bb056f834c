"""The dashboard of a large broker: time to the first paint in headless Chromium, and time of responses.

The broker has many pending messages, topics and groups; each tenth group has a lag. The dashboard is a process of its
own, as a user starts it. "First" is the first time of a page, right after the start, which reads the broker for up to
two seconds. The page to sign in shows the least time: it reads nothing. Without Chromium only the responses are
measured, from the first byte to the last one.

    python -m bench.dashboard [COUNT] [FOLDER]

With FOLDER its messages are shown, and none are sent.
"""

from __future__ import annotations

import re
import shutil
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any

from bench.measure import quiet, report, run, scratch_folder
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.message import Message
from mqtemplate.store.settings import FlushDiskType

_COUNT = 1_000_000
_TOPICS = 2_000
_GROUPS = 500
_BATCH = 1_000
_DAY_MS = 86_400_000
_SPREAD_MS = 7_919  # a prime: spreads the deliver times over three days
_ROUNDS = 5
_TARGET_MS = 300
_PAGES = {
    "sign in": "/sign-in",
    "overview": "/",
    "delay timeline": "/delayed",
    "delay timeline, a span of two hours": "/delayed?from={from_ms}&to={to_ms}",
    "messages of a topic": "/messages?topic=probe",
    "topics": "/topics",
    "groups": "/groups",
}
_PARTS = {
    "  histogram, as a part": "/delayed/timeline",
    "  list of a span in the middle, as a part": "/delayed/list?from={from_ms}&to={to_ms}",
    "  search by key": "/delayed/list?key=k777",
}
_FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")
_COOKIES = CookieJar()
_CLIENT = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(_COOKIES))


def fill(folder: Path, count: int) -> None:
    """Send delayed messages, and wait until all of them are on the timing wheel."""
    with EmbeddedBroker(folder, EmbeddedSettings(flush_disk_type=FlushDiskType.ASYNC_FLUSH)) as broker:
        now_ms = time.time_ns() // 1_000_000
        for begin in range(0, count, _BATCH):
            broker.sends.send_batch([_pending(now_ms, number) for number in range(begin, begin + _BATCH)])
        for number in range(_TOPICS):
            broker.sends.send_batch([Message(f"topic-{number:04}", b"x")] * 4)
        for number in range(_GROUPS):
            for queue in broker.queues(f"topic-{number:04}"):
                consumed = broker.reader.max_offset(queue) if number % 10 else 0
                broker.groups.commit_offset(f"group-{number:03}", queue, consumed)
        queue = broker.queues("probe")[0]
        broker.sends.send(Message("probe", b"on the wheel", {"TIMER_DELAY_MS": "1"}), queue)
        while broker.reader.max_offset(queue) < 1:
            time.sleep(0.05)


def _pending(now_ms: int, number: int) -> Message:
    deliver_ms = now_ms + _DAY_MS + number * _SPREAD_MS % (3 * _DAY_MS)
    return Message("pending", b"x" * 200, {"TIMER_DELIVER_MS": str(deliver_ms), "KEYS": f"k{number}"})


@contextmanager
def dashboard(folder: Path) -> Iterator[str]:
    """Run ``mqtemplate dashboard``, and sign in; yield its address."""
    command = [sys.executable, "-u", "-m", "mqtemplate", "dashboard", "--store", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"(http://[^/]*)\S*", process.stdout.readline())
            assert found is not None, "the dashboard did not start"
            _CLIENT.open(found[0], timeout=120).close()
            yield found[1]
        finally:
            process.terminate()


def response_ms(address: str) -> float:
    return response_times_ms(address)[1]


def response_times_ms(address: str) -> tuple[float, float]:
    """Return the times to the first byte and to the last one."""
    start = time.perf_counter()
    with _CLIENT.open(address, timeout=120) as answer:
        answer.read(1)
        first_ms = (time.perf_counter() - start) * 1_000
        answer.read()
    return first_ms, (time.perf_counter() - start) * 1_000


class Paint:
    """Time from the start of a navigation to the first contentful paint, in a new tab each time."""

    def __init__(self, browser: Any) -> None:
        self._browser = browser

    def __call__(self, address: str) -> float:
        context = self._browser.new_context()
        session = [{"name": each.name, "value": str(each.value), "url": address} for each in _COOKIES]
        context.add_cookies(session)
        try:
            page = context.new_page()
            page.goto(address, wait_until="commit")
            # The policy of the page allows no evaluated code, so the entry is polled.
            while not (entries := page.evaluate("performance.getEntriesByName('first-contentful-paint').length")):
                page.wait_for_timeout(5)
            assert entries
            paint_ms = float(page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
            page.wait_for_load_state("networkidle")
            return paint_ms
        finally:
            context.close()


def measure(address: str, paint: Paint | None) -> None:
    now_ms = time.time_ns() // 1_000_000
    middle_ms = now_ms + 2 * _DAY_MS
    span = {"from_ms": middle_ms, "to_ms": middle_ms + 7_200_000}
    time_of, what = (response_ms, "response") if paint is None else (paint, "first paint")
    for name, path in _PAGES.items():
        url = address + path.format(**span)
        if paint is None:
            byte_ms, first_ms = response_times_ms(url)
            report(f"{name}: first byte, first", byte_ms, "ms", f"< {_TARGET_MS} ms")
        else:
            first_ms = paint(url)
        report(f"{name}: {what}, first", first_ms, "ms", f"< {_TARGET_MS} ms")
    for name, path in _PARTS.items():
        report(f"{name}: response", response_ms(address + path.format(**span)), "ms", "none")
    start = time.perf_counter()
    while not is_read(address):
        time.sleep(0.2)
    report("topics and groups are read, after the pages above", time.perf_counter() - start, "s", "none")
    for name, path in _PAGES.items():
        url = address + path.format(**span)
        report(f"{name}: {what}", statistics.median(time_of(url) for _ in range(_ROUNDS)), "ms", f"< {_TARGET_MS} ms")
        if paint is not None:
            report(f"{name}: response", statistics.median(response_ms(url) for _ in range(_ROUNDS)), "ms", "none")


def is_read(address: str) -> bool:
    """Return True if the lists of topics and groups are known: their pages are not read again at once."""
    with _CLIENT.open(address + "/groups", timeout=120) as answer:
        return b"data-refresh" not in answer.read()


def main() -> None:
    quiet()
    count = int(sys.argv[1]) if len(sys.argv) > 1 else _COUNT
    with ExitStack() as stack:
        if len(sys.argv) > 2:
            folder = Path(sys.argv[2])
        else:
            folder = stack.enter_context(scratch_folder()) / "store"
            fill(folder, count)
        address = stack.enter_context(dashboard(folder))
        measure(address, _paint(stack))


def _paint(stack: ExitStack) -> Paint | None:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        chromium = None
    if chromium is None:
        print("no Chromium or no playwright: responses are measured, not paints")
        return None
    playwright = stack.enter_context(sync_playwright())
    browser = playwright.chromium.launch(executable_path=chromium, headless=True, args=list(_FLAGS))
    stack.callback(browser.close)
    return Paint(browser)


if __name__ == "__main__":
    run(main)
