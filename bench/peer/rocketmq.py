"""The real Apache RocketMQ on loopback, for the conformance tests and for benches that name it.

A `NameServer` serves any number of brokers; a `RocketMQ` is its broker over a store folder, with the file sizes of an
embedded broker's settings; a `JavaClient` is its own client and tools. All are context managers, and all end with this
process.
"""

from __future__ import annotations

import random
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from bench.peer.java_client import JavaClient, PeerMessage, SpringApp
from bench.peer.jvm import QUICK_START, PeerError, PeerProcess, command_line, java_program, why_not
from mqtemplate.brokers import EmbeddedSettings

__all__ = [
    "JavaClient",
    "NameServer",
    "PeerError",
    "PeerMessage",
    "RocketMQ",
    "SpringApp",
    "broker_options",
    "free_port",
    "java_program",
    "why_not",
]

_LOGGING = Path(__file__).with_name("logging")
_START_SECONDS = 60
_PORTS = (12_000, 32_000)
_PORT_ATTEMPTS = 3


def free_port() -> int:
    """A port that is free, as are the two before it and the one behind it: a broker takes them too.

    Not one that the system gives to clients: until the broker binds it, any connection might get it for its own end.
    """
    while True:
        port = random.randrange(*_PORTS)
        try:
            for neighbour in (port - 2, port - 1, port, port + 1):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", neighbour))
        except (OSError, OverflowError):
            continue
        return port


def _write_properties(path: Path, values: Mapping[str, object]) -> None:
    path.write_text("".join(f"{name}={value}\n" for name, value in values.items()), encoding="utf-8")


def _home(kind: str) -> Path:
    """A folder for a program's logs, with what 4.x insists on finding there."""
    home = Path(tempfile.mkdtemp(prefix=f"rocketmq-{kind}-"))
    (home / "conf").mkdir()
    for name in ("namesrv", "broker"):
        shutil.copy(_LOGGING / "rmq.logback.xml", home / f"conf/logback_{name}.xml")
    return home


class NameServer:
    """RocketMQ's name server.

    Attributes:
        address: ``host:port``, once started.
        version: "5.5.0", or "4.9.7"; its brokers are of the same.
    """

    def __init__(self, version: str = "5.5.0", *, tls: bool = False) -> None:
        self.address = ""
        self.version = version
        self._tls = tls

    def __enter__(self) -> Self:
        home = _home("names")
        port = free_port()
        _write_properties(home / "namesrv.conf", {"listenPort": port, "bindAddress": "127.0.0.1", "rocketmqHome": home})
        arguments = ("org.apache.rocketmq.namesrv.NamesrvStartup", "-c", f"{home}/namesrv.conf")
        command = command_line(self.version, home, "Guarded", *arguments, heap_mib=64, tls=self._tls)
        self._process = PeerProcess("namesrv", command, home)
        self._process.wait_for("boot success")
        self.address = f"127.0.0.1:{port}"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._process.kill()  # it keeps nothing
        shutil.rmtree(self._process.home, ignore_errors=True)


def broker_options(settings: EmbeddedSettings) -> dict[str, object]:
    """What a RocketMQ broker must be told to open a folder that an embedded broker with *settings* wrote."""
    return {
        "brokerName": settings.broker_name,
        "flushDiskType": settings.flush_disk_type.value,
        "mappedFileSizeCommitLog": settings.mapped_file_size_commit_log,
        "mappedFileSizeConsumeQueue": settings.mapped_file_size_consume_queue,
        "mappedFileSizeTimerLog": settings.mapped_file_size_timer_log,
        "maxHashSlotNum": settings.max_hash_slot_num,
        "maxIndexNum": settings.max_index_num,
        "messageDelayLevel": settings.message_delay_level,
        "timerPrecisionMs": settings.timer_precision_ms,
        "timerMaxDelaySec": settings.timer_max_delay_sec,
        "timerRollWindowSlot": settings.timer_roll_window_slot,
        "maxMessageSize": settings.max_message_size,
        "defaultTopicQueueNums": settings.default_topic_queue_nums,
    }


class RocketMQ:
    """RocketMQ's broker over a store folder.

    Leaving the block ends it as a crash would, at once; `stop` before that is a clean end, which takes some seconds.

    Args:
        folder: The store; made if missing.
        options: Lines for its configuration, over what is set here. See `broker_options`.
        for_speed: With a bigger heap and the compiler that makes the fastest code; else it starts sooner.
    """

    def __init__(
        self,
        folder: Path,
        name_server: NameServer,
        options: Mapping[str, object] | None = None,
        *,
        for_speed: bool = False,
    ) -> None:
        self.folder = folder
        self._names = name_server
        self._options = dict(options or {})
        self._for_speed = for_speed

    def __enter__(self) -> Self:
        for attempts_left in reversed(range(_PORT_ATTEMPTS)):
            try:
                self._start()
                break
            except PeerError as error:
                # somebody took the port between the look and the start
                if not attempts_left or "Address already in use" not in str(error) or "listenPort" in self._options:
                    raise
        return self

    def _start(self) -> None:
        home = _home("broker")
        _write_properties(home / "broker.conf", self._configuration(home))
        flags = ("-XX:+UseG1GC",) if self._for_speed else QUICK_START
        arguments = ("org.apache.rocketmq.broker.BrokerStartup", "-c", f"{home}/broker.conf")
        heap_mib = 2_048 if self._for_speed else 256
        command = command_line(self._names.version, home, "Guarded", *arguments, heap_mib=heap_mib, flags=flags)
        self._process = PeerProcess("broker", command, home)
        self._process.wait_for("boot success")

    def _configuration(self, home: Path) -> dict[str, object]:
        return {
            "brokerClusterName": "DefaultCluster",
            "brokerName": "broker-a",
            "brokerId": 0,
            "brokerIP1": "127.0.0.1",
            "bindAddress": "127.0.0.1",
            "namesrvAddr": self._names.address,
            "listenPort": self._options.get("listenPort") or free_port(),
            "rocketmqHome": home,
            "storePathRootDir": self.folder,
            "storePathCommitLog": self.folder / "commitlog",
            "autoCreateTopicEnable": "true",
            "enablePropertyFilter": "true",
            "recallMessageEnable": "true",
            "diskMaxUsedSpaceRatio": 98,
            "registerNameServerPeriod": 10_000,  # the least it takes; what the first registration missed is told sooner
        } | self._options

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_for_file(self, name: str, is_there: Callable[[str], bool]) -> None:
        """Return when a file of the store holds what *is_there* looks for; tables are written some seconds late."""
        path, deadline = self.folder / name, time.monotonic() + _START_SECONDS
        while not (path.exists() and is_there(path.read_text(errors="replace"))):
            if time.monotonic() > deadline:
                raise PeerError(f"{name} does not hold what was waited for after {_START_SECONDS} s")
            time.sleep(0.05)

    def stop(self) -> None:
        self._process.stop()

    def kill(self) -> None:
        """SIGKILL, as a crash."""
        self._process.kill()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._process.kill()
        if error is not None:
            error.add_note(f"what RocketMQ's broker said:\n{self._process.tail()}")
        shutil.rmtree(self._process.home, ignore_errors=True)
