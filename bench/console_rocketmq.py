"""The delay console of a RocketMQ cluster: first read, pages, memory, and the load on the broker.

RocketMQ 5.5.0 has pending timers of its Java client, and some messages with delay levels, tags and keys. With
``--version 5.5.1`` its broker has that version, and name server and client are of 5.5.0. The first
read is a process of its own, ``mqtemplate delayed histogram``, without a limit for its rate. The queries after it run
in this process, and the pages are those of ``mqtemplate dashboard``. With ``--screenshots FOLDER`` headless Chromium
stores pictures of them.

    python -m bench.console_rocketmq [--messages COUNT] [--version 5.5.0|5.5.1] [--screenshots FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.cookiejar import CookieJar
from pathlib import Path

from bench.measure import processor_s, quiet, report, resident_mib, run, scratch_folder
from bench.peer.fetch import fetch
from bench.peer.java_client import JavaClient
from bench.peer.jvm import java_program, unavailable_reason
from bench.peer.rocketmq import NameServer, RocketMQ
from mqtemplate.brokers import RemoteBroker, RemoteSettings
from mqtemplate.pending import PendingQuery

_COUNT = 20_000
_BODY_BYTES = 200
_DAY_MS = 86_400_000
_LEVELS = 200
_IDLE_S = 10
_ROUNDS = 5
_PAGE_MS = 300
_RATE = 10_000_000
"""Records a second: more than one process can read."""
_PAGES = {
    "delayed": "/delayed",
    "list of a topic": "/delayed/list?topic=pending",
    "list of a tag": "/delayed/list?tag=paid",
    "list of a key": "/delayed/list?key=order-77",
    "histogram": "/delayed/timeline",
    "delay status": "/delayed/status?topic=orders",
    "overview": "/",
}


def fill(names: NameServer, count: int) -> None:
    """Let RocketMQ's client send *count* timers, due from one to two days from now, and messages with levels."""
    far_ms = time.time_ns() // 1_000_000 + _DAY_MS
    arguments = (names.address, "pending", "send", str(count), str(_BODY_BYTES), str(far_ms), str(_DAY_MS))
    with java_program("Timers", *arguments) as lines:
        list(lines)
    with JavaClient(names) as java:
        java.connect()
        for number in range(_LEVELS):
            message: dict[str, object] = {"topic": "orders", "body": b"x", "keys": f"order-{number}", "tags": "paid"}
            java.send(message | ({"level": 18} if number % 2 else {"delay_ms": 3_600_000 + number * 1_000}))


@contextmanager
def console_home(folder: Path) -> Iterator[dict[str, str]]:
    """Yield the environment of commands: a state folder of their own, and no limit for the rate of reads."""
    (folder / "application.yml").write_text(
        json.dumps({"mqtemplate": {"cluster": {"pending-read-rate": _RATE}, "logging": {"level": "WARNING"}}})
    )
    path = os.pathsep.join(filter(None, (str(Path.cwd()), *sys.path)))
    yield os.environ | {"XDG_STATE_HOME": str(folder / "state"), "PYTHONPATH": path}


def command(address: str, folder: Path, env: dict[str, str], *words: str) -> tuple[float, float, str]:
    """Run a command; return its time, the most memory that it had (MiB), and its output."""
    start = time.perf_counter()
    line = [sys.executable, "-m", "mqtemplate", *words, "--name-server", address]
    with subprocess.Popen(line, cwd=folder, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, output
    return time.perf_counter() - start, usage.ru_maxrss / 1_024, output


def first_read(address: str, folder: Path, env: dict[str, str], broker: RocketMQ, count: int) -> None:
    """Measure the command that reads all records for the first time, and the same command again."""
    before_s = processor_s(broker.pid)
    first_s, peak_mib, output = command(address, folder, env, "delayed", "histogram", "--json")
    found = json.loads(output)["total"]
    assert found == count + _LEVELS, (found, count)
    report(f"first read of {found:,} pending messages", first_s, "s", "none")
    report("records a second", found / first_s, "/s", "none")
    report("processor time of the broker meanwhile", processor_s(broker.pid) - before_s, "s", "none")
    report("most memory of the process", peak_mib, "MiB", "bounded")
    size = sum(each.stat().st_size for each in (folder / "state").rglob("*.sqlite*"))
    report("index", size / found, "B/msg", "none")
    second_s, _, _ = command(address, folder, env, "delayed", "histogram", "--json")
    report("the same command again", second_s, "s", "none")


def queries(address: str, index: Path, broker: RocketMQ) -> None:
    """Measure queries of one client, and the load of an open page on an idle broker."""
    settings = RemoteSettings(name_servers=(address,), pending_index=index, pending_read_rate=_RATE)
    with RemoteBroker(settings) as client:
        delayed, now_ms = client.delayed, client.clock.now_ms()
        middle = PendingQuery(after_ms=now_ms + _DAY_MS + _DAY_MS // 2)
        work: dict[str, Callable[[], object]] = {
            "first page": lambda: delayed.pending(PendingQuery(), 50),
            "page in the middle": lambda: delayed.pending(middle, 50),
            "page of a topic": lambda: delayed.pending(PendingQuery(topic="orders"), 50),
            "page of a tag": lambda: delayed.pending(PendingQuery(tag="paid"), 50),
            "search by key": lambda: delayed.pending(PendingQuery(key="order-77"), 50),
            "histogram by minute": lambda: delayed.count_pending(PendingQuery()),
            "histogram of a topic": lambda: delayed.count_pending(PendingQuery(topic="pending")),
        }
        for name, query in work.items():
            report(name, statistics.median(_timed_ms(query) for _ in range(_ROUNDS)), "ms", f"< {_PAGE_MS} ms")
        report("broker without a reader", _share(broker, lambda: None), "% cpu", "none")
        report("broker, while a client looks each second", _share(broker, work["first page"]), "% cpu", "none")
    report("memory of this process", resident_mib(), "MiB", "bounded")


def _share(broker: RocketMQ, each_second: Callable[[], object]) -> float:
    """Return the share of a core that the broker uses while something is done each second."""
    before_s, start = processor_s(broker.pid), time.monotonic()
    while time.monotonic() - start < _IDLE_S:
        each_second()
        time.sleep(1.0)
    return (processor_s(broker.pid) - before_s) / (time.monotonic() - start) * 100


def _timed_ms(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1_000


def pages(address: str, folder: Path, env: dict[str, str], pictures: Path | None) -> None:
    """Measure the responses of the dashboard, and store pictures of its pages."""
    line = [sys.executable, "-u", "-m", "mqtemplate", "dashboard", "--name-server", address, "--port", "0"]
    with subprocess.Popen(line, cwd=folder, env=env, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"(http://[^/]*)\S*", process.stdout.readline())
            assert found is not None, "the dashboard did not start"
            opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
            opener.open(found[0], timeout=120).close()
            for name, path in _PAGES.items():

                def read(path: str = path) -> bytes:
                    with opener.open(found[1] + path, timeout=120) as answer:
                        content: bytes = answer.read()
                        return content

                read()
                report(
                    f"page: {name}",
                    statistics.median(_timed_ms(read) for _ in range(_ROUNDS)),
                    "ms",
                    f"< {_PAGE_MS} ms",
                )
            if pictures is not None:
                take_pictures(found[0], found[1], pictures)
        finally:
            process.terminate()


def take_pictures(sign_in: str, base: str, folder: Path) -> None:
    """Store pictures of the pages."""
    from playwright.sync_api import sync_playwright

    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), headless=True, args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(sign_in)
        for name, path in (("delayed", "/delayed"), ("status", "/delayed/status?topic=orders"), ("overview", "/")):
            page.goto(base + path)
            page.wait_for_load_state("networkidle")
            page.screenshot(path=folder / f"{name}.png", full_page=True)
        browser.close()


def main() -> None:
    quiet()
    parser = argparse.ArgumentParser(prog="python -m bench.console_rocketmq")
    parser.add_argument("--messages", type=int, default=_COUNT, metavar="COUNT")
    parser.add_argument("--version", choices=("5.5.0", "5.5.1"), default="5.5.0", help="of RocketMQ's broker")
    parser.add_argument("--screenshots", type=Path, metavar="FOLDER")
    given = parser.parse_args()
    reason = unavailable_reason()
    if reason is None and given.version == "5.5.1":
        reason = fetch("rocketmq-5.5.1", "the broker of RocketMQ 5.5.1")
    if reason is not None:
        print(reason)
        return
    options = {"flushDiskType": "ASYNC_FLUSH", "timerMaxDelaySec": 10 * 86_400}
    with (
        scratch_folder() as folder,
        console_home(folder) as env,
        NameServer(given.version) as names,
        RocketMQ(folder / "store", names, options, for_speed=True) as broker,
    ):
        fill(names, given.messages)
        first_read(names.address, folder, env, broker, given.messages)
        queries(names.address, next((folder / "state").rglob("*.sqlite")), broker)
        pages(names.address, folder, env, given.screenshots)


if __name__ == "__main__":
    run(main)
