"""A day of a fleet in minutes: which alert fires after how long, for each incident that an operator meets.

    python -m bench.fleet_day [--only NAME,...] [--scale 30]

A server, two applications of two workers each (`mqtemplate run`), and Prometheus of Debian with the rules of
docs/grafana/alerts.yml, all on loopback. The durations in the rules are divided by *scale*, and some thresholds are
lower, so that an alert that takes ten minutes comes after twenty seconds. Each line: the incident, its alerts, the time
until each fired, the time from the repair until all ended, and other alerts that fired meanwhile. All incidents take
about a quarter of an hour; the script ends by itself, and ends only processes that it has started.

The disk of the server is a ``tmpfs`` in a mount namespace of its own, which takes root; without it that incident is
left out. The certificate takes ``openssl``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bench.measure import run, scratch_folder
from bench.peer.rocketmq import free_port
from mqtemplate.brokers import RemoteBroker, RemoteSettings
from mqtemplate.clock import SystemClock
from mqtemplate.message import Message

RULES = Path(__file__).parents[1] / "docs" / "grafana" / "alerts.yml"
TOKEN = "fleet-day-token-of-loopback"
SCRAPE_S = 2
DISK_MIB = 256
_THRESHOLDS = {"_behind_seconds) > 300": "_behind_seconds) > 15", "_group_lag) > 1000": "_group_lag) > 100"}
_LIMIT_S = 180.0
_SHORTEST_WINDOW_S = 4 * SCRAPE_S
_AHEAD_MS = 30_000

APPLICATION = """
import time
from pathlib import Path
from mqtemplate import DeadLetter, MQApplication, message_listener

SLOW = Path(__file__).with_name("slow")

@message_listener(topic="{name}-orders", consumer_group="{name}", id="{name}")
def handle(order: str) -> None:
    if order == "bad":
        raise DeadLetter("no such customer")
    if SLOW.exists():
        time.sleep(2)

app = MQApplication(__name__)
"""


class Alert(NamedTuple):
    """An alert that fires, and the value of the label that says for what."""

    name: str
    of: str = ""


@dataclass(frozen=True)
class Incident:
    """What happens to the fleet.

    Attributes:
        alerts: Those that must fire. Others of `also` may.
        start: Begins it.
        repair: Ends it.
    """

    name: str
    alerts: Sequence[Alert]
    start: Callable[[], None]
    repair: Callable[[], None]
    also: frozenset[str] = frozenset()


class Program:
    """A process of the fleet, which ends with the script. Its output is in a file."""

    def __init__(self, command: Sequence[str], folder: Path, name: str) -> None:
        self._command, self._folder, self._output = command, folder, folder / f"{name}.out"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                self._command,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def end(self, number: int = signal.SIGTERM) -> None:
        """End the process, then what is left of its group."""
        if self.process is None:
            return
        self.process.send_signal(number)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process = None


def until(condition: Callable[[], object], what: str, limit_s: float = _LIMIT_S) -> float:
    """Wait for a condition, and return the seconds that it took."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > limit_s:
            raise TimeoutError(f"not within {limit_s:.0f} s: {what}")
        time.sleep(0.25)
    return time.monotonic() - start


def scaled_rules(text: str, scale: float) -> str:
    """Return the rules with shorter durations and lower thresholds."""
    units = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}

    def shorter(found: re.Match[str]) -> str:
        shortest = _SHORTEST_WINDOW_S if found[1] == "[" else SCRAPE_S
        return f"{found[1]}{max(shortest, round(int(found[2]) * units[found[3]] / scale))}s"

    text = re.sub(r"(\[|offset |for: )(\d+)([smhd])\b", shorter, text)
    for given, lower in _THRESHOLDS.items():
        assert given in text, f"the rules do not have {given!r} any more"
        text = text.replace(given, lower)
    return text


class Fleet:
    """The processes, and what can happen to them."""

    def __init__(self, folder: Path, scale: float) -> None:
        self.folder = folder
        self._scale = scale
        self.names, self.listen = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        self.ports = {name: free_port() for name in ("broker", "shop", "mail", "prometheus")}
        self._disk: Program | None = None
        self.broker = self._broker()
        self.applications = {name: self._application(name) for name in ("shop", "mail")}
        self.prometheus = self._prometheus()

    @property
    def has_disk(self) -> bool:
        """True if the server has a disk of its own."""
        return self._disk is not None

    def _settings(self, name: str, **sections: object) -> Path:
        folder = self.folder / name
        folder.mkdir()
        management = {
            "enabled": True,
            "port": self.ports[name],
            "token": TOKEN,
            "health": {"timeout-ms": 500},
            "dashboard": {"enabled": False},
        }
        settings = {"mqtemplate": {"logging": {"level": "WARNING"}, "management": management, **sections}}
        if name != "broker":
            settings["rocketmq"] = {"name-server": self.names}
        (folder / "application.yml").write_text(json.dumps(settings))  # JSON is YAML
        return folder

    def _broker(self) -> Program:
        tls = {"mode": "permissive", "cert-path": "server.pem", "key-path": "server.key"}
        server = {"tls": tls} if shutil.which("openssl") else {}
        folder = self._settings("broker", server=server, broker={"mapped-file-size-commit-log": 1 << 20})
        if server:
            self.new_certificate(days=90)
        store = folder / "store"
        store.mkdir()
        enter = self._mounted(store, folder)
        command = [sys.executable, "-m", "mqtemplate", "broker", "--store", str(store), "--listen", self.listen]
        return Program([*enter, *command, "--name-server", self.names], folder, "server")

    def _mounted(self, store: Path, folder: Path) -> list[str]:
        """Mount a small disk at *store*, for the server only. Return the command that enters its namespace."""
        mount = f"mount -t tmpfs -o size={DISK_MIB}m none {store} && echo mounted && exec sleep 7200"
        disk = Program(["unshare", "-m", "sh", "-c", mount], folder, "disk")
        try:
            disk.start()
            assert disk.process is not None
            until(lambda: "mounted" in disk.output() or (disk.process and disk.process.poll() is not None), "disk", 10)
        except FileNotFoundError:
            return []
        if "mounted" not in disk.output():
            disk.end()
            return []
        self._disk = disk
        return ["nsenter", "-t", str(disk.process.pid), "-m", f"--wdns={folder}"]

    def _application(self, name: str) -> Program:
        folder = self._settings(name)
        (folder / f"{name}_app.py").write_text(APPLICATION.format(name=name))
        command = [sys.executable, "-m", "mqtemplate", "run", f"{name}_app:app", "--workers", "2"]
        return Program(command, folder, name)

    def _prometheus(self) -> Program:
        folder = self.folder / "prometheus"
        folder.mkdir()
        (folder / "alerts.yml").write_text(scaled_rules(RULES.read_text(), self._scale))
        jobs = [
            {
                "job_name": name,
                "metrics_path": "/actuator/prometheus",
                "static_configs": [{"targets": [f"127.0.0.1:{self.ports[name]}"]}],
            }
            for name in ("broker", "shop", "mail")
        ]
        seconds = {f"{kind}_interval": f"{SCRAPE_S}s" for kind in ("scrape", "evaluation")}
        config = {
            "global": {**seconds, "scrape_timeout": f"{SCRAPE_S}s"},
            "rule_files": ["alerts.yml"],
            "scrape_configs": jobs,
        }
        (folder / "prometheus.yml").write_text(json.dumps(config))
        program = shutil.which("prometheus")
        assert program is not None, "checked by main"
        listen = f"--web.listen-address=127.0.0.1:{self.ports['prometheus']}"
        command = [program, "--config.file=prometheus.yml", "--storage.tsdb.path=data", "--log.level=warn", listen]
        return Program(command, folder, "prometheus")

    # --- observation ---------------------------------------------------------------------------

    def firing(self) -> set[Alert]:
        """Return the alerts that fire now."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ports['prometheus']}/api/v1/alerts", timeout=5) as answer:
            alerts: list[dict[str, Any]] = json.load(answer)["data"]["alerts"]
        by_port = {f"127.0.0.1:{port}": name for name, port in self.ports.items()}
        found = set()
        for labels in (each["labels"] for each in alerts if each["state"] == "firing"):
            instance = labels.get("instance", "")
            of = labels.get("messaging_consumer_group_name") or by_port.get(instance, instance)
            found.add(Alert(labels["alertname"], of))
        return found

    def are_ready(self) -> bool:
        """Return True if all workers have started."""
        return all(each.output().count(" is ready") >= 2 for each in self.applications.values())

    def are_up(self) -> bool:
        """Return True if Prometheus reads all of them."""
        query = f"http://127.0.0.1:{self.ports['prometheus']}/api/v1/query?query=up"
        try:
            with urllib.request.urlopen(query, timeout=5) as answer:
                values = [each["value"][1] for each in json.load(answer)["data"]["result"]]
        except OSError:
            return False
        return values == ["1"] * 3

    # --- what can happen -----------------------------------------------------------------------

    def start(self, stack: ExitStack) -> None:
        for program in (self.broker, *self.applications.values(), self.prometheus):
            stack.callback(program.end)
            program.start()
            if program is self.broker:
                until(lambda: "listens on" in self.broker.output(), "the server listens")
        until(self.are_ready, "all workers are ready")
        until(self.are_up, "Prometheus reads server and applications")

    def end_disk(self) -> None:
        if self._disk is not None:
            self._disk.end()

    def new_certificate(self, days: int) -> None:
        """Write a certificate that expires in so many days; the server reads it by itself."""
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
        command += ["-days", str(days), "-keyout", "server.key", "-out", "server.pem"]
        subprocess.run(command, cwd=self.folder / "broker", check=True, capture_output=True)

    def send(self, topic: str, body: bytes = b"good", count: int = 1, ahead_ms: int = 0) -> None:
        """Send messages; a producer's clock may be ahead."""
        clock = _AheadClock(ahead_ms) if ahead_ms else None
        with RemoteBroker(RemoteSettings(name_servers=(self.names,)), clock) as broker:
            for _ in range(count):
                broker.sends.send(Message(topic, body))

    def listener(self, action: str) -> None:
        """Pause or resume the listener of the shop, in both workers."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.ports['shop']}/actuator/listeners/shop",
            json.dumps({"action": action}).encode(),
            {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=10):
            pass

    def signal_worker(self, number: int) -> None:
        """Send a signal to the first worker of the shop."""
        found = re.findall(r"worker 1 \(process (\d+)\) is ready", self.applications["shop"].output())
        os.kill(int(found[-1]), number)

    def purge_dead_letters(self) -> None:
        command = [sys.executable, "-m", "mqtemplate", "dlq", "purge", "shop", "--name-server", self.names, "--yes"]
        subprocess.run(command, check=True, capture_output=True, cwd=self.folder)

    def fill_disk(self) -> None:
        """Let another program fill the disk of the server, a MiB a second, up to 95 %."""
        assert self._disk is not None
        assert self._disk.process is not None
        self._filled = Path(f"/proc/{self._disk.process.pid}/root{self.folder / 'broker' / 'store' / 'other.bin'}")
        fill = "import sys,time\nwith open(sys.argv[1],'wb',0) as f:\n for _ in range(int(sys.argv[2])):\n"
        fill += "  f.write(bytes(1<<20)); time.sleep(1)"
        usage = shutil.disk_usage(self._filled.parent)
        megabytes = (usage.free >> 20) - DISK_MIB // 20
        self._filler = Program([sys.executable, "-c", fill, str(self._filled), str(megabytes)], self.folder, "filler")
        self._filler.start()

    def empty_disk(self) -> None:
        self._filler.end()
        self._filled.unlink()


class _AheadClock(SystemClock):
    """The clock of a machine that is not synchronized."""

    def __init__(self, ahead_ms: int) -> None:
        super().__init__()
        self._ahead_ms = ahead_ms

    def now_ms(self) -> int:
        return super().now_ms() + self._ahead_ms


def incidents(fleet: Fleet) -> Iterator[Incident]:
    """Yield the incidents that this machine can show."""
    shop, mail = fleet.applications["shop"], fleet.applications["mail"]
    slow = fleet.folder / "shop" / "slow"
    gone, behind = "MqtemplateProcessGone", frozenset({"MqtemplateGroupBehind", "MqtemplateLagStands"})

    def flood() -> None:
        slow.touch()
        fleet.send("shop-orders", count=6_000)

    def pause() -> None:
        fleet.listener("pause")
        fleet.send("shop-orders", count=3)

    yield Incident("application gone", [Alert(gone, "mail")], mail.end, mail.start)
    yield Incident("broker gone", [Alert(gone, "broker")], lambda: fleet.broker.end(signal.SIGKILL), fleet.broker.start)
    yield Incident("worker hangs", [Alert("MqtemplateWorkerDown", "shop")], lambda: fleet.signal_worker(signal.SIGSTOP),
                   lambda: fleet.signal_worker(signal.SIGCONT), behind | {gone})  # fmt: skip
    yield Incident("lag stands, late without traffic", [Alert(each, "shop") for each in sorted(behind)], pause,
                   lambda: fleet.listener("resume"), frozenset({"MqtemplateDeliveriesLate"}))  # fmt: skip
    yield Incident("lag grows", [Alert("MqtemplateLagGrows", "shop")], flood, slow.unlink, behind)
    yield Incident("first dead letters", [Alert("MqtemplateDeadLetters", "shop")],
                   lambda: fleet.send("shop-orders", b"bad", 3), fleet.purge_dead_letters,
                   frozenset({"MqtemplateHandlersFail"}))  # fmt: skip
    yield Incident("clock of a producer 30 s ahead", [Alert("MqtemplateClockSkewOfMessages", "shop")],
                   lambda: fleet.send("shop-orders", ahead_ms=_AHEAD_MS), lambda: None)  # fmt: skip
    if shutil.which("openssl"):
        yield Incident("certificate expires", [Alert("MqtemplateCertificateExpires", "broker")],
                       lambda: fleet.new_certificate(1), lambda: fleet.new_certificate(90))  # fmt: skip
    if fleet.has_disk:
        disk = frozenset({"MqtemplateDiskFullInADay", "MqtemplateDiskNearLimit", "MqtemplateMessagesDeleted"})
        alerts = [Alert("MqtemplateDiskFills", "broker"), Alert("MqtemplateDiskFull", "broker")]
        yield Incident("disk fills", alerts, fleet.fill_disk, fleet.empty_disk, disk)
    assert shop.process is not None


def meet(fleet: Fleet, incident: Incident) -> None:
    """Let an incident happen, and print which alerts fired after how long."""
    others: set[str] = set()

    def has_fired(alert: Alert) -> bool:
        firing = fleet.firing()
        others.update({each.name for each in firing} - {each.name for each in incident.alerts} - incident.also)
        return alert in firing

    start = time.monotonic()
    incident.start()
    fired = {}
    for alert in incident.alerts:
        try:
            until(lambda alert=alert: has_fired(alert), alert.name)
            fired[alert.name] = f"{time.monotonic() - start:.0f} s"
        except TimeoutError:
            fired[alert.name] = "NOT FIRED"
    incident.repair()
    try:
        ended = f"{until(lambda: not fleet.firing(), 'no alert fires'):.0f} s"
    except TimeoutError:
        ended = f"STILL FIRING: {sorted(fleet.firing())}"
    names = ", ".join(f"{name} after {when}" for name, when in fired.items())
    print(
        f"{incident.name:34} {names}; ended {ended} after the repair" + (f"; ALSO {sorted(others)}" if others else "")
    )


@contextmanager
def started(scale: float) -> Iterator[Fleet]:
    """Start the fleet, and end it."""
    with scratch_folder() as folder, ExitStack() as stack:
        fleet = Fleet(folder.resolve(), scale)
        stack.callback(fleet.end_disk)
        fleet.start(stack)
        yield fleet


def main() -> None:
    """Meet the incidents one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="words of the names of incidents, with commas between")
    parser.add_argument("--scale", type=float, default=30, help="divides the durations in the rules")
    options = parser.parse_args()
    if shutil.which("prometheus") is None:
        sys.exit("prometheus is missing; on Debian: apt-get install prometheus")
    words = [word for word in options.only.split(",") if word]
    with started(options.scale) as fleet:
        print(f"durations of the rules divided by {options.scale:g}; scrapes every {SCRAPE_S} s", flush=True)
        for incident in incidents(fleet):
            if not words or any(word in incident.name for word in words):
                meet(fleet, incident)
                sys.stdout.flush()


if __name__ == "__main__":
    run(main)
