"""Java programs beside the tests: which class paths there are, how programs are compiled, started and ended.

`make setup` copies packages from Maven into folders of ``.rocketmq``, one folder a class path (see ``pom.xml``);
`why_not` tells what is missing where they are not.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO, NamedTuple

__all__ = [
    "QUICK_START",
    "PeerError",
    "PeerProcess",
    "Program",
    "command_line",
    "java_program",
    "lines",
    "scratch_home",
    "why_not",
]

_ROOT = Path(__file__).parents[2]
_HOME = _ROOT / ".rocketmq"
_SOURCES = Path(__file__).with_name("java")
_LOGGING = Path(__file__).with_name("logging")
_OPENED = [  # what RocketMQ's store does with direct memory is closed since Java 16
    "--add-exports=java.base/jdk.internal.ref=ALL-UNNAMED",
    "--add-opens=java.base/jdk.internal.ref=ALL-UNNAMED",
    "--add-opens=java.base/java.nio=ALL-UNNAMED",
    "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED",
    "--add-opens=java.base/java.lang=ALL-UNNAMED",
    "--add-opens=java.base/java.util=ALL-UNNAMED",
]
_EARLY_ROUNDS = [
    # A consumer divides the queues in rounds, of which the first can come to nothing: while a broker is busy, the list
    # of members arrives too late, or does not hold the caller yet, and the round still counts as a good one. The next
    # is 20 s away unless told otherwise, as long as a test waits altogether. So is the next attempt to lock a queue.
    "-Drocketmq.client.rebalance.waitInterval=1000",
    "-Drocketmq.client.rebalance.minInterval=200",
    "-Drocketmq.client.rebalance.lockInterval=1000",
]
QUICK_START = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xshare:auto")
"""For programs that live for seconds. A bench leaves them out: they cost speed."""
_START_SECONDS = 60
_STOP_SECONDS = 60


class PeerError(Exception):
    """RocketMQ did not start, or answered with an error; the text holds the end of what it printed."""


class Program(NamedTuple):
    """A class path, and which folders of ``java/`` are compiled against it."""

    packages: str
    sources: tuple[str, ...]


_PROGRAMS = {
    "5.5.0": Program("rocketmq-5", ("guarded", "lines", "client", "five")),
    "4.9.8": Program("client-4", ("lines", "client", "four")),
    "4.9.7": Program("rocketmq-4", ("guarded",)),
    "spring": Program("spring", ("lines", "spring")),
    "proxy": Program("proxy", ("guarded", "proxy")),
}


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
def _classes(name: str) -> Path:
    """The folder with the classes of a program, compiled if their sources changed."""
    program = _PROGRAMS[name]
    sources = sorted(source for folder in program.sources for source in (_SOURCES / folder).glob("*.java"))
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
    folder = _HOME / f"classes-{name}-{digest}"
    if not folder.exists():
        fresh = Path(tempfile.mkdtemp(prefix="classes.tmp-", dir=_HOME))
        libraries = f"{_HOME}/{program.packages}/*"
        command = [
            str(_tool("javac")),
            "-nowarn",
            "-encoding",
            "UTF-8",
            "-parameters",
            "-cp",
            libraries,
            "-d",
            str(fresh),
        ]
        done = subprocess.run([*command, *map(str, sources)], capture_output=True, text=True, check=False)
        if done.returncode:
            shutil.rmtree(fresh)
            raise PeerError(f"javac failed: {done.stderr}")
        for old in _HOME.glob(f"classes-{name}-*"):
            shutil.rmtree(old, ignore_errors=True)
        fresh.rename(folder)
    return folder


def command_line(
    version: str,
    home: Path,
    main: str,
    *arguments: str,
    heap_mib: int,
    flags: Sequence[str] = QUICK_START,
    tls: bool = False,
) -> list[str]:
    """A command line; *home* is where the program leaves its logs."""
    return [
        str(_tool("java")),
        *_OPENED,
        *_EARLY_ROUNDS,
        *flags,
        f"-Xms{min(heap_mib, 128)}m",
        f"-Xmx{heap_mib}m",
        f"-XX:MaxDirectMemorySize={2 * heap_mib}m",
        f"-Duser.home={home}",
        f"-Drocketmq.home.dir={home}",
        # With TLS a server generates a key and a certificate when it starts: half of the CPU time of its start.
        f"-Dtls.server.mode={'permissive' if tls else 'disabled'}",
        "-Dcom.rocketmq.remoting.client.closeChannelTimeout=1000",
        "-cp",
        f"{_LOGGING}:{_classes(version)}:{_HOME}/{_PROGRAMS[version].packages}/*",
        main,
        *arguments,
    ]


@contextmanager
def scratch_home(name: str) -> Iterator[Path]:
    """A folder for a program's logs, gone afterwards."""
    home = Path(tempfile.mkdtemp(prefix=f"rocketmq-{name}-"))
    try:
        yield home
    finally:
        shutil.rmtree(home, ignore_errors=True)


class PeerProcess:
    """A program of RocketMQ: started, awaited, ended."""

    def __init__(self, name: str, command: list[str], home: Path) -> None:
        self.name = name
        self.home = home
        self._printed = home / f"{name}.out"
        with self._printed.open("wb") as output:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output, cwd=home)

    @property
    def pid(self) -> int:
        return self._process.pid

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
        return "\n".join(lines(self._printed)[-100:])

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


def lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines()


@contextmanager
def java_program(main: str, *arguments: str, version: str = "5.5.0") -> Iterator[IO[str]]:
    """One of the programs in ``java/``, such as a bench: gives the lines it prints, and waits for its end."""
    with scratch_home("program") as home, (home / "errors.out").open("w+") as errors:
        process = subprocess.Popen(
            command_line(version, home, main, *arguments, heap_mib=512, flags=()),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        assert process.stdout is not None
        try:
            yield process.stdout
            if process.wait(_STOP_SECONDS):
                errors.seek(0)
                raise PeerError(f"{main} ended with {process.returncode}:\n{errors.read()[-3_000:]}")
        finally:
            process.kill()
            process.stdout.close()
            process.wait()
