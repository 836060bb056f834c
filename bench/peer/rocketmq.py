"""Apache RocketMQ on loopback, for the conformance tests and for benches that compare with it.

A `NameServer` serves any number of brokers. A `RocketMQ` is a broker with a store folder. Both are context managers,
and their processes end with this process.
"""

from __future__ import annotations

import random
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from bench.peer.jvm import QUICK_START, PeerError, PeerProcess, command_line
from mqtemplate.brokers import EmbeddedSettings
from mqtemplate.store.checkpoint import NEW_TIMER_LOG_SIZE, file_sizes
from mqtemplate.store.files.layout import NEW_GEOMETRY

_LOGGING = Path(__file__).with_name("logging")
_START_SECONDS = 60
_PORTS = (12_000, 32_000)
_PORT_ATTEMPTS = 3
_LESS_PROCESSOR_TIME = {
    # RocketMQ: TransactionMetricsFlushService.run spins from the start until the first interval has passed.
    "transactionMetricFlushInterval": 200,
    # TransactionalMessageServiceImpl.batchSendOpMessage (5.5.0) makes its thread spin from one interval after the last
    # end of a transaction on. With this size an end is written at once, not once an interval.
    "transactionOpBatchInterval": 600_000,
    "transactionOpMsgMaxSize": 1,
    # A flush copies the whole wheel of 38 MB byte by byte: each second, the default, that is a seventh of a processor.
    "timerFlushIntervalMs": 10_000,
}
TIMER_FLUSH_MS = 1_000
"""RocketMQ's default. After a kill it enqueues again what came after the last flush, so a test of kills needs it."""
_PATIENCE = {
    # On a busy machine a request waits longer than 200 ms, the default, until the broker answers SYSTEM_BUSY.
    "waitTimeMillsInSendQueue": 10_000,
    "waitTimeMillsInTransactionQueue": 10_000,
    "waitTimeMillsInPullQueue": 30_000,
}


def free_port() -> int:
    """Return a free port. The two ports before it and the one after it are free as well, because a broker uses them.

    It is not in the system's range for client sockets: another connection could take it before the broker binds it.
    """
    while True:
        port = random.randrange(*_PORTS)
        try:
            for used in (port - 2, port - 1, port, port + 1):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", used))
        except (OSError, OverflowError):
            continue
        return port


def _write_properties(path: Path, values: Mapping[str, object]) -> None:
    path.write_text("".join(f"{name}={value}\n" for name, value in values.items()), encoding="utf-8")


def _home(kind: str) -> Path:
    """Create a folder for the logs of a program, with the configuration files that 4.x requires."""
    home = Path(tempfile.mkdtemp(prefix=f"rocketmq-{kind}-"))
    (home / "conf").mkdir()
    for name in ("namesrv", "broker"):
        shutil.copy(_LOGGING / "rmq.logback.xml", home / f"conf/logback_{name}.xml")
    return home


class NameServer:
    """RocketMQ's name server.

    Attributes:
        address: ``host:port``, once started.
        version: "5.5.0" or "4.9.7". Its brokers have the same version. With "5.5.1" only they have it, and the name
            server has 5.5.0: Maven has no more of it. Its packages have to be fetched; see `bench.peer.fetch`.
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

    def kill(self) -> None:
        """Kill the process, which has no state to save."""
        self._process.kill()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.kill()
        shutil.rmtree(self._process.home, ignore_errors=True)


def broker_options(settings: EmbeddedSettings) -> dict[str, object]:
    """Return the options with which RocketMQ opens the store of an embedded broker with *settings*.

    A size that they do not set is the size of a new store.
    """
    sizes = file_sizes(settings)
    return {
        "brokerName": settings.broker_name,
        "flushDiskType": settings.flush_disk_type.value,
        "mappedFileSizeCommitLog": sizes.commit_log,
        "mappedFileSizeConsumeQueue": sizes.consume_queue,
        "mappedFileSizeTimerLog": settings.mapped_file_size_timer_log or NEW_TIMER_LOG_SIZE,
        "maxHashSlotNum": settings.max_hash_slot_num or NEW_GEOMETRY.slots,
        "maxIndexNum": settings.max_index_num or NEW_GEOMETRY.units,
        "messageDelayLevel": settings.message_delay_level,
        "timerPrecisionMs": settings.timer_precision_ms,
        "timerMaxDelaySec": settings.timer_max_delay_sec,
        "timerRollWindowSlot": settings.timer_roll_window_slot,
        "timerFlushIntervalMs": TIMER_FLUSH_MS,
        "maxMessageSize": settings.max_message_size,
        "defaultTopicQueueNums": settings.default_topic_queue_nums,
    }


class RocketMQ:
    """RocketMQ's broker with a store folder.

    The broker is killed at the end of the block. Call `stop` for a clean stop, which takes some seconds.

    Args:
        folder: The store folder. It is created if it is missing.
        options: Values of its configuration. They override the values set here. See `broker_options`.
        for_speed: Use a larger heap and the optimizing compiler. Otherwise it starts faster.
    """

    _STARTED: ClassVar[str] = "boot success"  # printed once it has started

    def __init__(
        self,
        folder: Path,
        name_server: NameServer,
        options: Mapping[str, object] | None = None,
        *,
        for_speed: bool = False,
    ) -> None:
        self.folder = folder
        self._name_server = name_server
        self._options = dict(options or {})
        self._for_speed = for_speed

    def __enter__(self) -> Self:
        for attempts_left in reversed(range(_PORT_ATTEMPTS)):
            try:
                self._start()
                break
            except PeerError as error:
                # Another process took the port after the check.
                if not attempts_left or "Address already in use" not in str(error) or "listenPort" in self._options:
                    raise
        return self

    def _start(self) -> None:
        home = _home("broker")
        _write_properties(home / "broker.conf", self._configuration(home))
        self._process = PeerProcess("broker", self._command(home), home)
        self._process.wait_for(self._STARTED)

    def _command(self, home: Path) -> list[str]:
        """Return the command line. The configuration is in *home*."""
        arguments = ("org.apache.rocketmq.broker.BrokerStartup", "-c", f"{home}/broker.conf")
        heap_mib = 2_048 if self._for_speed else 256
        flags = self._flags()
        return command_line(self._name_server.version, home, "Guarded", *arguments, heap_mib=heap_mib, flags=flags)

    def _flags(self) -> Sequence[str]:
        return ("-XX:+UseG1GC",) if self._for_speed else QUICK_START

    def _configuration(self, home: Path) -> dict[str, object]:
        return {
            "brokerClusterName": "DefaultCluster",
            "brokerName": "broker-a",
            "brokerId": 0,
            "brokerIP1": "127.0.0.1",
            "bindAddress": "127.0.0.1",
            "namesrvAddr": self._name_server.address,
            "listenPort": self._options.get("listenPort") or free_port(),
            "rocketmqHome": home,
            "storePathRootDir": self.folder,
            "storePathCommitLog": self.folder / "commitlog",
            "autoCreateTopicEnable": "true",
            "enablePropertyFilter": "true",
            "recallMessageEnable": "true",
            "diskMaxUsedSpaceRatio": 98,
            "reviveQueueNum": 1,  # For POP consumption, which is not tested. A stop waits for the thread of each queue.
            "registerNameServerPeriod": 10_000,  # The minimum. The first registration may miss topics.
            **({} if self._for_speed else _LESS_PROCESSOR_TIME | _PATIENCE),
        } | self._options

    @property
    def pid(self) -> int:
        """Process ID."""
        return self._process.pid

    def wait_for_file(self, name: str, is_complete: Callable[[str], bool]) -> None:
        """Return when *is_complete* accepts a file of the store. RocketMQ writes tables some seconds late."""
        path, deadline = self.folder / name, time.monotonic() + _START_SECONDS
        while not (path.exists() and is_complete(path.read_text(errors="replace"))):
            if time.monotonic() > deadline:
                raise PeerError(f"{name} is not complete after {_START_SECONDS} s")
            time.sleep(0.05)

    def stop(self) -> None:
        """Stop the broker cleanly."""
        self._process.stop()

    def kill(self) -> None:
        """Kill the broker with SIGKILL, as in a crash."""
        self._process.kill()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._process.kill()
        if error is not None:
            error.add_note(f"output of RocketMQ's broker:\n{self._process.tail()}")
        shutil.rmtree(self._process.home, ignore_errors=True)
