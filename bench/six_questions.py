"""The six questions of an operator on duty: steps and seconds on the command line and on the page.

A server with many pending messages, two groups with dead letters of yesterday, a group that is behind, an application
of two workers, and the dashboard, each a process of its own. A step is a command, or a click or an entry on the page.
The time of a command is that of its process, with its processor time; ``--yes`` stands for the answer to its question.
The time on the page is from the first step until the answer is on the screen, without the time of a hand.

    python -m bench.six_questions [COUNT]

Each hundredth message is of the tenant that is cancelled. Without Chromium the pages are left out.
"""

from __future__ import annotations

import json
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench.fleet import Program, until
from bench.measure import quiet, run, scratch_folder
from bench.peer.rocketmq import free_port
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import VirtualClock
from mqtemplate.message import Message
from mqtemplate.store.settings import FlushDiskType

_COUNT = 100_000
_BATCH = 1_000
_DAY_MS = 86_400_000
_HOUR_MS = 3_600_000
_SPREAD_MS = 7_919  # a prime: spreads the deliver times over three days
_LETTERS, _TENANT_EACH = 50, 100
_TOKEN = "six-questions-token-of-loopback"
_FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")
_APPLICATION = """
from mqtemplate import MQApplication, message_listener

@message_listener(topic="orders", consumer_group="billing", id="bill")
def handle(order: str) -> None:
    pass

app = MQApplication(__name__)
"""
_QUESTIONS = {
    # method of `Operator`: the question, and its command
    "why": ("why is a message late", "why late-7"),
    "tonight": ("what falls due tonight", "delayed histogram --after tonight --before tonight"),
    "behind": ("who is behind", "groups --sort=-behind"),
    "resend": ("send yesterday's dead letters again", "dlq resend --since yesterday --until yesterday --yes"),
    "stop": ("stop a consumer everywhere", "listeners pause --group billing"),
    "cancel": ("cancel all of tenant T", "delayed purge --property tenant=T --yes"),
}


def fill(folder: Path, count: int) -> None:
    """Store dead letters of yesterday, a message of which a group has not heard, and pending messages."""
    settings = EmbeddedSettings(flush_disk_type=FlushDiskType.ASYNC_FLUSH)
    now_ms = time.time_ns() // 1_000_000
    with EmbeddedBroker(folder, settings, clock=VirtualClock(now_ms - _DAY_MS)) as broker:
        for group in ("billing", "mail"):
            origin = {"DLQ_ORIGIN_TOPIC": "orders", "ORIGIN_MESSAGE_ID": "x"}
            letters = [
                Message(f"%DLQ%{group}", b"x", {"KEYS": f"{group}-{each}", **origin}) for each in range(_LETTERS)
            ]
            broker.sends.send_batch(letters)
    with EmbeddedBroker(folder, settings) as broker:
        for queue in broker.queues("orders"):
            broker.groups.commit_offset("warehouse", queue, 0)
        for begin in range(0, count, _BATCH):
            broker.sends.send_batch([_pending(now_ms, number) for number in range(begin, begin + _BATCH)])
        for number in range(10):
            broker.sends.send(Message("orders", b"x", {"TIMER_DELAY_MS": "1", "KEYS": f"late-{number}"}))
        while (
            sum(map(broker.reader.max_offset, broker.queues("orders"))) < 10
        ):  # timers come in the order of their sends
            time.sleep(0.05)


def _pending(now_ms: int, number: int) -> Message:
    deliver_ms = now_ms + _HOUR_MS + number * _SPREAD_MS % (3 * _DAY_MS)
    tenant = {0: "T", 1: "U"}.get(number % _TENANT_EACH, f"t{number % _TENANT_EACH}")
    properties = {"TIMER_DELIVER_MS": str(deliver_ms), "KEYS": f"k{number}", "tenant": tenant}
    return Message("reminders", b"x" * 200, properties)


@contextmanager
def programs(folder: Path) -> Iterator[str]:
    """Run server, application and dashboard in *folder*; yield the link that signs in."""
    names, listen = (f"127.0.0.1:{free_port()}" for _ in range(2))
    actuator = free_port()
    management = {"enabled": True, "port": actuator, "token": _TOKEN}
    settings = {"rocketmq": {"name-server": names}, "mqtemplate": {"management": management}}
    (folder / "application.yml").write_text(json.dumps(settings))  # JSON is YAML
    (folder / "billing_app.py").write_text(_APPLICATION)
    (folder / "server").mkdir()
    arguments = {
        "server": ["broker", "--store", str(folder / "store"), "--listen", listen, "--name-server", names],
        "application": ["run", "billing_app:app", "--workers", "2"],
        "dashboard": ["dashboard", "--port", "0", "--allow-changes", "--audit-log", str(folder / "audit.jsonl")],
    }
    arguments["dashboard"] += ["--name-server", names, "--app", f"http://127.0.0.1:{actuator}"]
    with ExitStack() as stack:
        _start(stack, folder / "server", "listens on", arguments["server"])
        _start(stack, folder, "worker 2 .* is ready", arguments["application"])
        yield _start(stack, folder, r"http://\S+", arguments["dashboard"])


def _start(stack: ExitStack, folder: Path, ready: str, arguments: Sequence[str]) -> str:
    """Start a program, and return the text that says that it is ready."""
    program = Program([sys.executable, "-u", "-m", "mqtemplate", *arguments], folder, arguments[0])
    stack.callback(program.end)
    program.start()
    until(lambda: re.search(ready, program.output()), f"{arguments[0]} is ready", 60)
    found = re.search(ready, program.output())
    assert found is not None
    return found[0]


def command(folder: Path, text: str) -> tuple[float, float]:
    """Run a command, and return its time and its processor time in seconds."""
    before, start = _children_s(), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "mqtemplate", *text.split()], cwd=folder, capture_output=True, text=True, check=False
    )
    wall_s, processor_s = time.perf_counter() - start, _children_s() - before
    if done.returncode:
        sys.exit(f"mqtemplate {text}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return wall_s, processor_s


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class Operator:
    """An operator at the page; each method answers one question from the overview on, and counts its steps."""

    def __init__(self, page: Any) -> None:
        self._page = page
        self.steps = 0

    def _click(self, role: str, name: str, **options: Any) -> None:
        self.steps += 1
        self._page.get_by_role(role, name=name, **options).first.click()

    def _search(self, text: str) -> None:
        self.steps += 1
        self._page.locator("#find").fill(text)
        self._page.locator("#find").press("Enter")

    def _shows(self, selector: str, text: str) -> None:
        self._page.locator(selector).filter(has_text=re.compile(text)).first.wait_for()

    def why(self) -> None:
        self._search("late-7")
        self._shows(".findings li.cause", ".")

    def tonight(self) -> None:
        self._click("link", "Delayed")
        self._click("link", "tonight")
        self._shows("h2", r"[0-9,]+ due in this span")

    def behind(self) -> None:
        self._click("link", "Groups")
        self._shows("tbody tr:first-child", "warehouse")

    def resend(self) -> None:
        self._click("link", "Dead letters")
        self._click("button", "Resend …")
        self._click("button", f"Resend {_LETTERS} dead letters")
        self._shows(".note", f"sent {_LETTERS} messages")

    def stop(self) -> None:
        self._click("link", "Listeners")
        self._click("button", "menu of bill")
        self._click("button", "Pause group billing everywhere")
        self._shows("td[data-title=State]", "paused")

    def cancel(self) -> None:
        self._search("tenant=U")
        self._click("button", "Cancel all …")
        self._click("button", "Cancel", exact=False)
        self._shows(".note", "cancelled")


def pages(link: str) -> Iterator[tuple[str, tuple[int, float]]]:
    """Answer each question on the page; yield its name, and its steps and seconds."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_chromium(), headless=True, args=list(_FLAGS))
        page = browser.new_page()
        page.set_default_timeout(60_000)
        page.goto(link)
        for name in _QUESTIONS:
            page.goto(re.sub(r"(//[^/]*/).*", r"\1", link))
            page.locator(".tiles").wait_for()  # the overview has been read
            operator, start = Operator(page), time.perf_counter()
            getattr(operator, name)()
            yield name, (operator.steps, time.perf_counter() - start)
        browser.close()


def _chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("google-chrome")


def main() -> None:
    quiet()
    count = int(sys.argv[1]) if len(sys.argv) > 1 else _COUNT
    with scratch_folder() as folder:
        folder = folder.resolve()
        fill(folder / "store", count)
        with programs(folder) as link:
            on_page = dict(pages(link)) if _chromium() else {}
            command(folder, "listeners resume --group billing")
            print(f"{count:,} pending messages{'' if on_page else '; no Chromium: pages are left out'}")
            for name, (question, text) in _QUESTIONS.items():
                wall_s, processor_s = command(folder, text)
                shown = "page: {} steps, {:.2f} s; ".format(*on_page[name]) if on_page else ""
                print(f"{question:36} {shown}command: {wall_s:.2f} s, {processor_s:.2f} s of the processor", flush=True)


if __name__ == "__main__":
    run(main)
