"""Programs with RocketMQ's clients in other languages, in ``clients/``: how they are built, started and read.

A program is called with ``NAME_SERVER PREFIX [ACCESS_KEY SECRET_KEY]`` and prints an event a line, as JSON. All do the
same, as far as their client can:

- A push consumer of the group ``PREFIXplain-group`` subscribes to the topic ``PREFIXplain`` with the tags
  ``paid || late``. It fails for the body ``fails once`` at its first delivery. One of ``PREFIXordered-group`` consumes
  ``PREFIXordered`` in order.
- A producer sends to the first topic ``sync`` (tag ``paid``, key ``k-1``), ``async`` and ``one-way`` (``paid``),
  ``not selected`` (``open``), ``delayed`` (``late``, delay level 1) and ``fails once`` (``paid``); to the second one
  ``a 0``, ``b 0``, ``a 1``, ... with the hash keys ``a`` and ``b``.
- A pull consumer reads the second topic.

Events are ``sent`` (body, status, msg_id; null where the client does not show them), ``received`` (listener, body,
tags, keys, reconsume_times, msg_id, delay_ms from the time at which the message was created), ``error`` (call, text),
and ``finished`` when all was sent. The program stops its client when its standard input ends.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bench.peer.fetch import fetch
from bench.peer.jvm import command_line, scratch_home, unavailable_reason
from mqtemplate.remoting import Credentials

_SOURCES = Path(__file__).with_name("clients")
BUILT = Path(__file__).parents[2] / ".rocketmq" / "clients"
"""Folder of the built programs."""
_FETCH_TIMEOUT_S = 600
_BUILD_TIMEOUT_S = 1_800
_STOP_TIMEOUT_S = 60


class ClientUnavailableError(Exception):
    """The client cannot run here. The text says why, and what to install."""


class ClientProgramError(Exception):
    """The program could not be built, or failed. The text has its last lines."""


@dataclass(frozen=True, slots=True)
class Client:
    """A client and its program.

    Attributes:
        package: Name of the client in the registry of its language, with its version.
        command: Build the program, and return its command line without arguments.
        can: What the program does of the list above: "tags" (it selects by tag, and shows the tag and key of a
            message), "async", "one-way", "delay", "retry", "ordered", "pull", "accounts".
        fails_with_rocketmq: Reason why the client does not work with RocketMQ 5.5.0 itself. Empty if it does.
    """

    package: str
    command: Callable[[], Sequence[str]]
    can: frozenset[str]
    fails_with_rocketmq: str = ""


# --- toolchains ----------------------------------------------------------------------------------------


def require(tool: str, oldest: str, install: str, *arguments: str) -> None:
    """Raise an error if *tool* is missing or older than *oldest*."""
    advice = f"install {install} to test with it"
    if shutil.which(tool) is None:
        raise ClientUnavailableError(f"{tool} is not on the PATH; {advice}")
    printed = subprocess.run([tool, *arguments], capture_output=True, text=True, check=False).stdout
    found = re.search(r"\d+(\.\d+)+", printed)
    if found is None or _numbers(found[0]) < _numbers(oldest):
        raise ClientUnavailableError(f"{tool} must be {oldest} or newer, and it printed {printed.strip()!r}; {advice}")


def _numbers(version: str) -> list[int]:
    return [int(number) for number in version.split(".")]


def _run(command: Sequence[str], folder: Path, timeout_s: float, **variables: str) -> str | None:
    """Run *command* in *folder*. Return the last lines that it printed if it fails."""
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it did not end in {timeout_s:g} s"
    return "\n".join(done.stdout.strip().splitlines()[-30:]) if done.returncode else None


def fetch_client(command: Sequence[str], folder: Path, **variables: str) -> None:
    """Run a command that downloads a client.

    Raises:
        ClientUnavailableError: It failed.
    """
    if failure := _run(command, folder, _FETCH_TIMEOUT_S, **variables):
        raise ClientUnavailableError(f"`{' '.join(command)}` failed, which fetches the client: {failure}")


def build_client(command: Sequence[str], folder: Path, **variables: str) -> None:
    """Run a command that builds a program.

    Raises:
        ClientProgramError: It failed.
    """
    if failure := _run(command, folder, _BUILD_TIMEOUT_S, **variables):
        raise ClientProgramError(f"`{' '.join(command)}` failed:\n{failure}")


def built(name: str, build: Callable[[Path, Path], None], sources: Path | None = None) -> Path:
    """Return the folder with the built program. Build it if its sources have changed.

    Args:
        build: Build the sources of the first folder into the second folder.
        sources: Folder of the sources. By default it is the folder *name* of ``clients/``.
    """
    sources = sources or _SOURCES / name
    files = sorted(path for path in sources.rglob("*") if path.is_file())
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]
    folder = BUILT / f"{name}-{digest}"
    if not folder.exists():
        BUILT.mkdir(parents=True, exist_ok=True)
        new_folder = Path(tempfile.mkdtemp(prefix=f"{name}.tmp-", dir=BUILT))
        try:
            build(sources, new_folder)
            new_folder.rename(folder)
        except OSError:  # another process was first
            if not folder.exists():
                raise
        finally:
            shutil.rmtree(new_folder, ignore_errors=True)
    return folder


def go_program(name: str = "go") -> Sequence[str]:
    """Build a program in Go: by default the one with RocketMQ's client."""
    require("go", "1.19", "Go 1.19 or newer (Debian: apt-get install golang-go)", "version")

    def build(sources: Path, folder: Path) -> None:
        fetch_client(["go", "mod", "download"], sources)
        build_client(["go", "build", "-buildvcs=false", "-mod=readonly", "-o", f"{folder}/program", "."], sources)

    return [str(built(name, build) / "program")]


def node_program() -> Sequence[str]:
    """Install ali-ons, and return the command of its program."""
    require("node", "16.0", "Node.js 16 or newer with npm (Debian: apt-get install nodejs npm)", "--version")
    require("npm", "8.0", "npm 8 or newer (Debian: apt-get install npm)", "--version")

    def build(sources: Path, folder: Path) -> None:
        shutil.copytree(sources, folder, dirs_exist_ok=True)
        fetch_client(["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"], folder)

    return ["node", str(built("ali-ons", build) / "program.js")]


def rust_program(name: str) -> Sequence[str]:
    """Build a program with a client for Rust. Both have one folder for the crates that they share."""
    require("cargo", "1.95", "Rust 1.95 or newer (https://rustup.rs)", "--version")

    def build(sources: Path, folder: Path) -> None:
        fetch_client(["cargo", "fetch", "--locked"], sources)
        target = BUILT / "target-rust"
        build_client(["cargo", "build", "--locked", "--target-dir", str(target)], sources)
        shutil.copy2(target / "debug" / f"conformance-{name}", folder / "program")

    return [str(built(name, build) / "program")]


def stream_program() -> Sequence[str]:
    """Fetch Spring Cloud Stream with its binder for RocketMQ, and return the command of its program."""
    if reason := unavailable_reason() or fetch(
        "spring-cloud-stream", "Spring Cloud Stream with its binder for RocketMQ"
    ):
        raise ClientUnavailableError(f"{reason} (Debian: apt-get install openjdk-17-jdk-headless maven)")
    # The program runs in its own folder.
    return command_line("stream", Path(), "StreamApp", heap_mib=256)


_EVERYTHING = frozenset({"tags", "async", "one-way", "delay", "retry", "ordered", "pull", "accounts"})
CLIENTS = {
    "go": Client(
        "github.com/apache/rocketmq-client-go/v2 v2.1.2",
        go_program,
        _EVERYTHING,
    ),
    "rust": Client("rocketmq-client-rust 1.0.0", partial(rust_program, "rust"), _EVERYTHING),
    # It has no accounts and no tags to select by, and its calls return before the broker answers.
    "rust-v4": Client(
        "rocketmq-client-v4 0.4.2",
        partial(rust_program, "rust-v4"),
        frozenset(),
        "RocketMQ 5.5.0 answers with a header in JSON without extFields, at which rocketmq-client-v4 0.4.2 panics",
    ),
    # It has no ordered consumer, and does not send all messages with a sharding key to one queue if that is queue 0.
    "ali-ons": Client("ali-ons 3.12.0", node_program, frozenset({"tags", "delay", "retry", "accounts"})),
    "spring-cloud-stream": Client(
        "com.alibaba.cloud:spring-cloud-starter-stream-rocketmq 2023.0.3.3 with Spring Boot 3.2.12",
        stream_program,
        frozenset({"tags", "delay", "retry", "ordered", "accounts"}),
    ),
}


# --- a running program ---------------------------------------------------------------------------------


class ClientProgram:
    """Process of a program until the end of the block, at which it must stop without an error.

    Args:
        name: Key of `CLIENTS`.
        prefix: Start of the names of its topics and groups.

    Raises:
        ClientUnavailableError: The toolchain is missing.
        ClientProgramError: The program could not be built, or failed.
    """

    def __init__(self, name: str, name_server: str, prefix: str, account: Credentials | None = None) -> None:
        self.name = name
        keys = [account.access_key, account.secret_key] if account else []
        self._command = [*CLIENTS[name].command(), name_server, prefix, *keys]
        self._changed = threading.Condition()
        self._events: list[dict[str, Any]] = []
        self._has_ended = False

    def __enter__(self) -> Self:
        self._scratch = scratch_home(self.name)
        home = self._scratch.__enter__()
        self._errors = home / "errors.out"
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=home,
                env=os.environ | {"HOME": str(home)},  # clients write logs there
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # a client may print there, too
                with self._changed:
                    self._events.append(json.loads(line))
                    self._changed.notify_all()
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def events(self, kind: str, count: int = 0, timeout_s: float = 0) -> list[dict[str, Any]]:
        """Return the events of a kind: when there are *count* of them, the program has ended, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._of(kind)) >= count or self._has_ended, timeout_s)
            return self._of(kind)

    def _of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self._events if event["event"] == kind]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
            try:
                code: int | None = self._process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                code = None
            tail = "\n".join(self._errors.read_text(errors="replace").splitlines()[-40:])
            if error is not None:
                error.add_note(f"{self.name} printed {self._events}\n{tail}")
            elif code != 0:
                ending = "did not stop" if code is None else f"ended with {code}"
                raise ClientProgramError(f"{self.name} {ending}; it printed:\n{tail}")
        finally:
            self._process.kill()
            self._process.wait()
            self._reader.join(_STOP_TIMEOUT_S)
            self._process.stdout.close()
            self._scratch.__exit__(None, None, None)
