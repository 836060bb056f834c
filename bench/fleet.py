"""No bench: a server, applications of several processes, and Prometheus with the rules of the alerts, on loopback."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from bench.measure import scratch_folder
from bench.peer.rocketmq import free_port
from mqtemplate.brokers import RemoteBroker, RemoteSettings
from mqtemplate.clock import SystemClock
from mqtemplate.message import Message, Property

RULES = Path(__file__).parents[1] / "docs" / "grafana" / "alerts.yml"
TOKEN = "fleet-day-token-of-loopback"
SCRAPE_S = 2
DISK_MIB = 256
MAX_CONNECTIONS = 100
_THRESHOLDS = {
    "_behind_seconds) > 300": "_behind_seconds) > 15",
    "_group_lag) > 1000": "_group_lag) > 100",
    "_overdue_seconds) > 3600": "_overdue_seconds) > 15",
    "]))) > 60": "]))) > 5",
    "_copy_lag_bytes) > 67108864": "_copy_lag_bytes) > 32768",
    "_silent_seconds) > 300": "_silent_seconds) > 60",
}
_LIMIT_S = 180.0
_SHORTEST_WINDOW_S = 4 * SCRAPE_S
_TARGETS, _WORKERS = 3, 4
_MIB = 1 << 20
_FILL = """
import sys, time
with open(sys.argv[1], "wb", 0) as file:
    for _ in range(int(sys.argv[2])):
        file.write(bytes(1 << 20))
        time.sleep(float(sys.argv[3]))
"""

APPLICATION = """
import time
from contextlib import suppress
from pathlib import Path
from mqtemplate import DeadLetter, MQApplication, MQTemplateError, RocketMQTemplate, message_listener

SLOW, BEHIND, FAILS, HANGS = map(Path(__file__).with_name, ("slow", "behind", "fails", "hangs"))
if BEHIND.exists():  # the clock of this process, for all that reads it
    real_ns, behind_ns = time.time_ns, int(BEHIND.read_text()) * 1_000_000_000
    time.time_ns = lambda: real_ns() - behind_ns
    time.time = lambda: time.time_ns() / 1_000_000_000

@message_listener(topic="{name}-orders", consumer_group="{name}", id="{name}", consume_timeout="1m")
def handle(order: str) -> None:
    if order == "bad":
        raise DeadLetter("no such customer")
    if FAILS.exists():
        raise OSError("the shop's database does not answer")
    if order == "forward":
        with suppress(MQTemplateError):
            app.get(RocketMQTemplate).sync_send("{name}-forwards", order)
    while HANGS.exists():
        time.sleep(0.5)
    if SLOW.exists():
        time.sleep(2)

app = MQApplication(__name__)
"""


class Alert(NamedTuple):
    """An alert that fires, and the value of the label that says for what."""

    name: str
    of: str = ""


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
        self._filler: Program | None = None
        self._copy = folder / "copy"
        self.follower = self._follower()
        self._stops_sending = threading.Event()
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
            "health": {"timeout-ms": "500ms"},
            "dashboard": {"enabled": False},
        }
        settings = {"mqtemplate": {"logging": {"level": "WARNING"}, "management": management, **sections}}
        if name == "mail":  # found by the service discovery
            targets = folder / "targets"
            targets.mkdir()  # Prometheus watches it from its start on
            management["targets-dir"] = str(targets)
        if name != "broker":
            settings["rocketmq"] = {"name-server": self.names}
        (folder / "application.yml").write_text(json.dumps(settings))  # JSON is YAML
        return folder

    def _broker(self) -> Program:
        tls = {"mode": "permissive", "cert-path": "server.pem", "key-path": "server.key"}
        server: dict[str, object] = {"tls": tls} if shutil.which("openssl") else {}
        server["max-connections-per-address"] = MAX_CONNECTIONS
        # Small files: the disk is small, too.
        small = {"mapped-file-size-commit-log": _MIB, "mapped-file-size-consume-queue": 20_000}
        small |= {"max-hash-slot-num": 5_000, "max-index-num": 20_000}
        copy = {"to": self._copy.as_uri(), "snapshot-interval": "5s", "max-lag": "20s"}
        folder = self._settings("broker", server=server, broker=small, copy=copy)
        if "tls" in server:
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
        return ["nsenter", "-t", str(disk.process.pid), "-m", "-W", str(folder)]

    def _follower(self) -> Program:
        folder = self.folder / "follower"
        folder.mkdir()
        command = [sys.executable, "-m", "mqtemplate", "broker", "--follow", self._copy.as_uri(), "--store", "standby"]
        return Program(command, folder, "follower")

    def _application(self, name: str) -> Program:
        folder = self._settings(name)
        self.module(name).write_text(APPLICATION.format(name=name))
        command = [sys.executable, "-m", "mqtemplate", "run", f"{name}_app:app", "--workers", "2"]
        return Program(command, folder, name)

    def _prometheus(self) -> Program:
        folder = self.folder / "prometheus"
        folder.mkdir()
        (folder / "alerts.yml").write_text(scaled_rules(RULES.read_text(), self._scale))
        targets: dict[str, dict[str, object]] = {
            name: {"static_configs": [{"targets": [f"127.0.0.1:{self.ports[name]}"]}]} for name in ("broker", "shop")
        }
        targets["mail"] = {"file_sd_configs": [{"files": [str(self.folder / "mail" / "targets" / "*.json")]}]}
        jobs = [{"job_name": name, "metrics_path": "/actuator/prometheus", **found} for name, found in targets.items()]
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

    def _ask(self, path: str) -> Any:
        address = f"http://127.0.0.1:{self.ports['prometheus']}/api/v1/{path}"
        with urllib.request.urlopen(address, timeout=10) as answer:
            return json.load(answer)["data"]

    def firing(self) -> set[Alert]:
        """Return the alerts that fire now."""
        by_port = {f"127.0.0.1:{port}": name for name, port in self.ports.items()}
        found = set()
        for labels in (each["labels"] for each in self._ask("alerts")["alerts"] if each["state"] == "firing"):
            of = by_port.get(labels.get("instance", ""), labels.get("job", ""))
            found.add(Alert(labels["alertname"], labels.get("messaging_consumer_group_name") or of))
        return found

    def are_ready(self) -> bool:
        """Return True if all workers have started."""
        return all(each.output().count(" is ready") >= 2 for each in self.applications.values())

    def are_up(self) -> bool:
        """Return True if Prometheus has read all of them, and no worker is missing."""
        try:
            processes, workers = (self._ask(f"query?query={name}") for name in ("up", "mqtemplate_worker_up_ratio"))
        except OSError:
            return False
        values = [each["value"][1] for found in (processes, workers) for each in found["result"]]
        return len(values) >= _TARGETS + _WORKERS and set(values) == {"1"}

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

    def listener(self, action: str, **values: int) -> None:
        """Pause or resume the listener of the shop, or change its number of handlers, in both workers."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.ports['shop']}/actuator/listeners/shop",
            json.dumps({"action": action, **values}).encode(),
            {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=10):
            pass

    def hold_connections(self) -> None:
        """Let a client open more connections to the server than it allows."""
        host, _, port = self.listen.partition(":")
        self._held = [socket.create_connection((host, int(port)), 10) for _ in range(MAX_CONNECTIONS + 20)]

    def close_connections(self) -> None:
        for each in self._held:
            each.close()

    def start_sending(self, topic: str, rate: float, body: str = "good", delay_ms: int = 0) -> None:
        """Send so many messages a second until `stop_sending`."""
        self._stops_sending.clear()
        properties = {Property.TIMER_DELAY_MS: str(delay_ms)} if delay_ms else {}

        def send() -> None:
            with RemoteBroker(RemoteSettings(name_servers=(self.names,))) as broker:
                while not self._stops_sending.wait(1 / rate):
                    broker.sends.send(Message(topic, body.encode(), dict(properties)))

        threading.Thread(target=send, daemon=True).start()

    def stop_sending(self) -> None:
        self._stops_sending.set()

    def set_writable(self, topic: str, is_writable: bool) -> None:
        """Create a topic, and let clients send to it or not."""
        with RemoteBroker(RemoteSettings(name_servers=(self.names,))) as broker:
            broker.create_topic(topic, 1)
            broker.admin().set_topic_rights(topic, is_readable=True, is_writable=is_writable)

    @property
    def _store(self) -> Path:
        """The directory of the store, which may be on a disk that only the server sees."""
        store = self.folder / "broker" / "store"
        if self._disk is None or self._disk.process is None:
            return store
        return Path(f"/proc/{self._disk.process.pid}/root{store}")

    def damage_delayed_message(self, topic: str, delay_ms: int) -> None:
        """Send a delayed message, and change a byte of its body in the commit log."""
        body = os.urandom(16).hex().encode()
        with RemoteBroker(RemoteSettings(name_servers=(self.names,))) as broker:
            broker.sends.send(Message(topic, body, {Property.TIMER_DELAY_MS: str(delay_ms)}))
        [(path, at)] = [
            (path, data.index(body))
            for path in (self._store / "commitlog").iterdir()
            if body in (data := path.read_bytes())
        ]
        self._damaged = path, at, body[:1]
        self._write_byte(path, at, b"?")

    def mend_delayed_message(self) -> None:
        """Write the byte again: a broker that starts checks its newest records."""
        self._write_byte(*self._damaged)

    def _write_byte(self, path: Path, at: int, byte: bytes) -> None:
        with path.open("r+b", 0) as file:
            file.seek(at)
            file.write(byte)

    def start_follower(self) -> None:
        """Start a process that keeps another directory current from the copy."""
        self.follower.start()
        until(lambda: "current until" in self.follower.output(), "the follower is current")

    def kill_follower(self) -> None:
        """Kill a follower that was current, after the broker has read that it is."""
        self.start_follower()
        until(lambda: self._ask("query?query=mqtemplate_copy_follower_silent_seconds")["result"], "the broker knows it")
        self.follower.end(signal.SIGKILL)

    def stop_follower(self) -> None:
        """Start the follower again, and stop it in order."""
        self.start_follower()
        self.follower.end(signal.SIGINT)

    def module(self, name: str) -> Path:
        """Return the module of an application."""
        return self.folder / name / f"{name}_app.py"

    def signal_broker(self, number: int) -> None:
        """Send a signal to the server."""
        assert self.broker.process is not None
        os.kill(self.broker.process.pid, number)

    def signal_worker(self, number: int) -> None:
        """Send a signal to the first worker of the shop."""
        found = re.findall(r"worker 1 \(process (\d+)\) is ready", self.applications["shop"].output())
        os.kill(int(found[-1]), number)

    def break_worker(self) -> None:
        """Kill the first worker of the shop; a new one cannot start."""
        self.module("shop").write_text("raise OSError('the folder with the templates is missing')\n")
        self.signal_worker(signal.SIGKILL)

    def mend_worker(self) -> None:
        self.module("shop").write_text(APPLICATION.format(name="shop"))

    def restart_mail(self, behind_s: int = 0) -> None:
        """Start the application, again if it runs; its clock may be behind."""
        file = self.folder / "mail" / "behind"
        file.unlink(missing_ok=True)
        if behind_s:
            file.write_text(str(behind_s))
        mail = self.applications["mail"]
        mail.end()
        mail.start()
        until(self.are_ready, "the workers are ready")

    def purge_dead_letters(self) -> None:
        command = [sys.executable, "-m", "mqtemplate", "dlq", "purge", "shop", "--all", "--yes"]
        subprocess.run([*command, "-n", self.names], check=True, capture_output=True, cwd=self.folder)

    def break_copy(self) -> None:
        """Put a file where the folder of the copy was: root may write into a folder that nobody may write."""
        self._copy.rename(self._copy.with_name("copy-moved"))
        self._copy.touch()

    def restart_broker(self, **copy: str | None) -> None:
        """Start the server again, with other settings of its copy; None removes a setting."""
        file = self.folder / "broker" / "application.yml"
        settings = json.loads(file.read_text())
        changed = settings["mqtemplate"]["copy"] | copy
        settings["mqtemplate"]["copy"] = {name: value for name, value in changed.items() if value is not None}
        file.write_text(json.dumps(settings))
        self.broker.end()
        self.broker.start()
        until(lambda: "listens on" in self.broker.output(), "the server listens")

    def mend_copy(self) -> None:
        self._copy.unlink()
        self._copy.with_name("copy-moved").rename(self._copy)

    def take_over_copy(self) -> None:
        """Write the epoch of another process into the copy, as a second owner does."""
        epochs = self._copy / "epochs"
        newest = json.loads(max(epochs.iterdir()).read_text())
        self._taken = epochs / f"{newest['number'] + 1:08d}.json"
        self._taken.write_text(json.dumps({**newest, "number": newest["number"] + 1, "host": "machine-b"}))

    def give_copy_back(self) -> None:
        """Delete that epoch, and start the server again: it has ended copying for good."""
        self._taken.unlink()
        self.broker.end()
        self.broker.start()

    def delete_messages(self, cause: Callable[[], object]) -> None:
        """Let something happen, and wait until the server has deleted messages before their time because of it."""
        name = "mqtemplate_store_forcibly_deleted_total"
        before = self._value(name)
        cause()
        until(lambda: self._value(name) > before, "messages are deleted")

    def _value(self, query: str) -> float:
        """Return the largest value of a query; 0 if it finds none."""
        return max((float(each["value"][1]) for each in self._ask(f"query?query={query}")["result"]), default=0)

    def fill_disk(self, up_to: float, s_per_mib: float) -> None:
        """Let another program use the disk of the server up to a part."""
        self._filled = self._store / "other.bin"
        usage = shutil.disk_usage(self._filled.parent)
        count = int(up_to * usage.total - usage.used) // _MIB
        command = [sys.executable, "-c", _FILL, str(self._filled), str(count), str(s_per_mib)]
        self._filler = Program(command, self.folder, "filler")
        self._filler.start()

    def empty_disk(self) -> None:
        self.end_filler()
        self._filled.unlink()

    def end_filler(self) -> None:
        if self._filler is not None:
            self._filler.end()


class _AheadClock(SystemClock):
    """The clock of a machine that is not synchronized."""

    def __init__(self, ahead_ms: int) -> None:
        super().__init__()
        self._ahead_ms = ahead_ms

    def now_ms(self) -> int:
        return super().now_ms() + self._ahead_ms


@contextmanager
def started(scale: float) -> Iterator[Fleet]:
    """Start the fleet, and end it."""
    with scratch_folder() as folder, ExitStack() as stack:
        fleet = Fleet(folder.resolve(), scale)
        stack.callback(fleet.end_disk)
        stack.callback(fleet.end_filler)
        stack.callback(fleet.follower.end)
        stack.callback(fleet.stop_sending)
        try:
            fleet.start(stack)
            yield fleet
        except BaseException:
            for output in folder.glob("*/*.out"):
                print(f"--- {output.name}\n{output.read_text(errors='replace')[-2_000:]}", file=sys.stderr)
            raise
