"""The real Apache RocketMQ on loopback, for the conformance tests and for benches that name it.

`make setup` copies its packages into ``.rocketmq/lib``; `why_not` tells what is missing where they are not.
A `NameServer` serves any number of brokers; a `RocketMQ` is its broker over a store folder, with the file sizes of an
embedded broker's settings; a `JavaClient` is its own client and tools. All are context managers, and all end with this
process.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple, Self

from mqtemplate.brokers import EmbeddedSettings

__all__ = [
    "JavaClient",
    "NameServer",
    "PeerError",
    "PeerMessage",
    "RocketMQ",
    "broker_options",
    "free_port",
    "java_program",
    "why_not",
]

VERSION = "5.5.0"
_ROOT = Path(__file__).parents[2]
_HOME = _ROOT / ".rocketmq"
_SOURCES = Path(__file__).with_name("java")
_LOGGING = Path(__file__).with_name("logging")
_OPENED = [  # what its store does with direct memory is closed since Java 16
    "--add-exports=java.base/jdk.internal.ref=ALL-UNNAMED",
    "--add-opens=java.base/jdk.internal.ref=ALL-UNNAMED",
    "--add-opens=java.base/java.nio=ALL-UNNAMED",
    "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED",
    "--add-opens=java.base/java.lang=ALL-UNNAMED",
    "--add-opens=java.base/java.util=ALL-UNNAMED",
]
_QUICK_START = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xshare:auto"]
"""For brokers that live for seconds. A bench leaves them out: they cost speed."""
_START_SECONDS = 60
_STOP_SECONDS = 60


class PeerError(Exception):
    """RocketMQ did not start, or answered with an error; the text holds the end of what it printed."""


class PeerMessage(NamedTuple):
    """A message as RocketMQ's client read it."""

    topic: str
    queue_id: int
    queue_offset: int
    physical_offset: int
    msg_id: str
    keys: str | None
    tags: str | None
    flag: int
    sys_flag: int
    born_timestamp: int
    store_timestamp: int
    reconsume_times: int
    body: bytes
    properties: dict[str, str]


def why_not() -> str | None:
    """Why RocketMQ cannot run here; None if it can."""
    if _tool("java") is None or _tool("javac") is None:
        return "no JDK found (java, javac; by JAVA_HOME or PATH); install one, 17 or newer, and run `make setup`"
    if not (_HOME / ".ready").exists():
        return "Apache RocketMQ is not in .rocketmq/; run `make setup` where there is a JDK 17 or newer and Maven"
    return None


@cache
def _tool(name: str) -> str | None:
    home = os.environ.get("JAVA_HOME")
    return (shutil.which(name, path=str(Path(home, "bin"))) if home else None) or shutil.which(name)


@cache
def _classes() -> Path:
    """The folder with the classes of ``java/``, compiled if their sources changed."""
    sources = sorted(_SOURCES.glob("*.java"))
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
    folder = _HOME / f"classes-{digest}"
    if not folder.exists():
        fresh = Path(tempfile.mkdtemp(prefix="classes.tmp-", dir=_HOME))
        command = [str(_tool("javac")), "-nowarn", "-encoding", "UTF-8", "-cp", f"{_HOME}/lib/*", "-d", str(fresh)]
        done = subprocess.run([*command, *map(str, sources)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise PeerError(f"javac failed: {done.stderr}")
        for old in _HOME.glob("classes-*"):
            shutil.rmtree(old, ignore_errors=True)
        fresh.rename(folder)
    return folder


def _java(home: Path, main: str, *arguments: str, heap_mib: int, flags: Sequence[str] = _QUICK_START) -> list[str]:
    """A command line; *home* is where the program leaves its logs."""
    return [
        str(_tool("java")),
        *_OPENED,
        *flags,
        f"-Xms{min(heap_mib, 128)}m",
        f"-Xmx{heap_mib}m",
        f"-XX:MaxDirectMemorySize={2 * heap_mib}m",
        f"-Duser.home={home}",
        f"-Drocketmq.home.dir={home}",
        "-Dcom.rocketmq.remoting.client.closeChannelTimeout=1000",
        "-cp",
        f"{_LOGGING}:{_classes()}:{_HOME}/lib/*",
        main,
        *arguments,
    ]


class _Process:
    """A program of RocketMQ: started, awaited, ended."""

    def __init__(self, name: str, command: list[str], home: Path) -> None:
        self.name = name
        self.home = home
        self._printed = home / f"{name}.out"
        with self._printed.open("wb") as output:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output, cwd=home)

    def wait_for(self, text: str) -> None:
        """Return when it has printed *text*; what does not come so far is ended, and leaves nothing behind."""
        try:
            self._wait_for(text)
        except BaseException:
            self.kill()
            shutil.rmtree(self.home, ignore_errors=True)
            raise

    def _wait_for(self, text: str) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while text not in self._printed.read_text(errors="replace"):
            if self._process.poll() is not None:
                code = self._process.returncode
                raise PeerError(f"{self.name} ended with {code} instead of starting:\n{self.tail()}")
            if time.monotonic() > deadline:
                raise PeerError(f"{self.name} did not start in {_START_SECONDS} s:\n{self.tail()}")
            time.sleep(0.02)

    def tail(self) -> str:
        """The end of what it printed."""
        return "\n".join(_lines(self._printed)[-40:])

    def stop(self) -> None:
        """End it cleanly; harmless if it has ended."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        self._wait()

    def kill(self) -> None:
        """End it with SIGKILL."""
        if self._process.poll() is None:
            self._process.kill()
        self._wait()

    def _wait(self) -> None:
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise PeerError(f"{self.name} did not end in {_STOP_SECONDS} s and was killed:\n{self.tail()}") from None
        finally:
            if self._process.stdin is not None:
                self._process.stdin.close()


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines()


def free_port() -> int:
    """A port that is free, as are the two before it and the one behind it: a broker takes them too."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        try:
            for neighbour in (port - 2, port - 1, port, port + 1):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", neighbour))
        except (OSError, OverflowError):
            continue
        return port


def _write_properties(path: Path, values: Mapping[str, object]) -> None:
    path.write_text("".join(f"{name}={value}\n" for name, value in values.items()), encoding="utf-8")


class NameServer:
    """RocketMQ's name server.

    Attributes:
        address: ``host:port``, once started.
    """

    def __init__(self) -> None:
        self.address = ""

    def __enter__(self) -> Self:
        home = Path(tempfile.mkdtemp(prefix="rocketmq-names-"))
        port = free_port()
        _write_properties(home / "namesrv.conf", {"listenPort": port, "bindAddress": "127.0.0.1", "rocketmqHome": home})
        command = _java(
            home, "Guarded", "org.apache.rocketmq.namesrv.NamesrvStartup", "-c", f"{home}/namesrv.conf", heap_mib=64
        )
        self._process = _Process("namesrv", command, home)
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
        home = Path(tempfile.mkdtemp(prefix="rocketmq-broker-"))
        _write_properties(home / "broker.conf", self._configuration(home))
        flags = ("-XX:+UseG1GC",) if self._for_speed else _QUICK_START
        arguments = ("org.apache.rocketmq.broker.BrokerStartup", "-c", f"{home}/broker.conf")
        heap_mib = 2_048 if self._for_speed else 256
        self._process = _Process("broker", _java(home, "Guarded", *arguments, heap_mib=heap_mib, flags=flags), home)
        self._process.wait_for("boot success")
        return self

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
        } | self._options

    @property
    def pid(self) -> int:
        return self._process._process.pid

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


class JavaClient:
    """RocketMQ's own client and tools, in one JVM that stays: see ``java/Client.java``.

    Call `connect` for each broker anew.
    """

    def __init__(self, name_server: NameServer) -> None:
        self._names = name_server

    def __enter__(self) -> Self:
        self._home = Path(tempfile.mkdtemp(prefix="rocketmq-client-"))
        self._errors = (self._home / "client.out").open("wb")
        self._process = subprocess.Popen(
            _java(self._home, "Client", self._names.address, heap_mib=128),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=self._home,
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._process.kill()  # it keeps nothing
        self._process.communicate()
        self._errors.close()
        shutil.rmtree(self._home, ignore_errors=True)

    def ask(self, do: str, **question: object) -> Any:
        """One question; gives the answer, or raises `PeerError`."""
        questions, answers = self._process.stdin, self._process.stdout
        assert questions is not None
        assert answers is not None
        questions.write(json.dumps({"do": do, **question}).encode() + b"\n")
        questions.flush()
        line = answers.readline()
        answer = json.loads(line) if line else {"error": "the client ended"}
        if "error" in answer:
            printed = _lines(self._home / "client.out")
            raise PeerError("\n".join([f"{do} {question}: {answer['error']}", *printed[-30:]]))
        return answer["answer"]

    def connect(self) -> None:
        """Forget the last broker, and talk to the one that runs now."""
        self.ask("connect")

    def send(self, *messages: Mapping[str, object]) -> list[dict[str, Any]]:
        """Send one after the other. A message is a mapping: topic, body (bytes); tags, keys, flag, level, delay_sec,
        delay_ms, deliver_ms, properties, queue_id."""
        return list(self.ask("send", messages=[_with_text_body(message) for message in messages]))

    def send_batch(self, *messages: Mapping[str, object]) -> dict[str, Any]:
        return dict(self.ask("send_batch", messages=[_with_text_body(message) for message in messages]))

    def read(self, topic: str, count: int = 0, timeout_ms: int = 0, *, until: bytes | None = None) -> list[PeerMessage]:
        """All messages of *topic*, queue by queue, once there are *count* of them and one with the body *until*, or the
        time has passed."""
        body = None if until is None else base64.b64encode(until).decode()
        answer = self.ask("read", topic=topic, count=count, until=body, timeout_ms=timeout_ms)
        return [_message(found) for found in answer]

    def consume(
        self, group: str, topic: str, count: int, timeout_ms: int, *, fail: Sequence[bytes] = (), linger: bool = False
    ) -> list[PeerMessage]:
        """Be a push consumer of *group* until *count* messages were handled; *fail* are given back once.

        Args:
            linger: Stay another second, to see whether more comes.
        """
        failing = [base64.b64encode(body).decode() for body in fail]
        question = {"group": group, "topic": topic, "count": count, "timeout_ms": timeout_ms, "fail": failing}
        return [_message(found) for found in self.ask("consume", **question, linger=linger)]

    def committed(self, group: str, topic: str) -> dict[int, int]:
        """Queue id -> the group's offset."""
        return {int(queue): offset for queue, offset in self.ask("committed", group=group, topic=topic).items()}

    def by_id(self, topic: str, message_id: str) -> PeerMessage:
        """By the id a broker gives or the sender's."""
        return _message(self.ask("by_id", topic=topic, id=message_id))

    def by_key(self, topic: str, key: str) -> list[PeerMessage]:
        return [_message(found) for found in self.ask("by_key", topic=topic, key=key)]

    def topic_status(self, topic: str) -> dict[int, tuple[int, int]]:
        """Queue id -> first offset and end, of the queues that have messages."""
        status = self.ask("topic_status", topic=topic)
        return {int(queue): (low, high) for queue, (low, high) in status.items()}

    def recall(self, topic: str, handle: str) -> str:
        return str(self.ask("recall", topic=topic, handle=handle))

    def mqadmin(self, *arguments: str) -> str:
        """What a tool of ``mqadmin`` prints."""
        return str(self.ask("mqadmin", arguments=arguments))


def _with_text_body(message: Mapping[str, object]) -> dict[str, object]:
    body = message["body"]
    assert isinstance(body, bytes)
    return {**message, "body": base64.b64encode(body).decode()}


def _message(found: Mapping[str, Any]) -> PeerMessage:
    fields: dict[str, Any] = {**found, "body": base64.b64decode(found["body"]), "properties": dict(found["properties"])}
    values: dict[str, Any] = {name: fields.get(name) for name in PeerMessage._fields}
    return PeerMessage(**values)


@contextmanager
def java_program(main: str, *arguments: str) -> Iterator[IO[str]]:
    """One of the programs in ``java/``, such as a bench: gives the lines it prints, and waits for its end."""
    home = Path(tempfile.mkdtemp(prefix="rocketmq-program-"))
    with (home / "errors.out").open("w+") as errors:
        process = subprocess.Popen(
            _java(home, main, *arguments, heap_mib=512, flags=()), stdout=subprocess.PIPE, stderr=errors, text=True
        )
        assert process.stdout is not None
        try:
            yield process.stdout
            if process.wait(_STOP_SECONDS):
                errors.seek(0)
                raise PeerError(f"{main} ended with {process.returncode}:\n{errors.read()[-3_000:]}")
        finally:
            process.kill()
            process.communicate()
            shutil.rmtree(home, ignore_errors=True)
