"""Java programs: their class paths, compilation, start and end.

`make setup` copies packages from Maven to folders of ``.rocketmq``, one folder per class path (see ``pom.xml``).
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

_PACKAGES = Path(__file__).parents[2] / ".rocketmq"
_SOURCES = Path(__file__).with_name("java")
_LOGGING = Path(__file__).with_name("logging")
_OPENED = [  # RocketMQ's store uses packages that are closed since Java 16.
    "--add-exports=java.base/jdk.internal.ref=ALL-UNNAMED",
    "--add-opens=java.base/jdk.internal.ref=ALL-UNNAMED",
    "--add-opens=java.base/java.nio=ALL-UNNAMED",
    "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED",
    "--add-opens=java.base/java.lang=ALL-UNNAMED",
    "--add-opens=java.base/java.util=ALL-UNNAMED",
]
_SHORT_INTERVALS = [
    # The first rebalance of a consumer can assign no queues: on a busy broker the list of members arrives late or lacks
    # the consumer, and RocketMQ counts this as a success. The next rebalance is 20 s later by default. So is the next
    # attempt to lock a queue.
    "-Drocketmq.client.rebalance.waitInterval=1000",
    "-Drocketmq.client.rebalance.minInterval=200",
    "-Drocketmq.client.rebalance.lockInterval=1000",
]
QUICK_START = (
    "-XX:TieredStopAtLevel=1",
    "-XX:+UseSerialGC",
    "-Xshare:auto",
    "-XX:+UnlockDiagnosticVMOptions",
    "-XX:-BytecodeVerificationRemote",  # a sixth of the processor time of a start (measured)
)
"""For programs that run for seconds. A bench does not use them: they reduce the throughput."""
_START_SECONDS = 60
_STOP_SECONDS = 60


class PeerError(Exception):
    """RocketMQ did not start, or returned an error. The text has the last lines that it printed."""


class Program(NamedTuple):
    """A folder of packages, and the folders of ``java/`` that are compiled against it."""

    packages: str
    sources: tuple[str, ...]


_PROGRAMS = {
    "5.5.0": Program("rocketmq-5", ("guarded", "commands", "client", "five")),
    "5.5.1": Program("rocketmq-5.5.1", ("guarded", "commands", "client", "five")),  # see `fetch`
    "4.9.8": Program("client-4", ("guarded", "commands", "client", "four")),
    "4.9.7": Program("rocketmq-4", ("guarded", "tools")),
    "spring": Program("spring", ("commands", "spring")),
    "spring-v5": Program("spring-v5", ("commands", "spring5")),
    "stream": Program("spring-cloud-stream", ("stream",)),
    "proxy": Program("proxy", ("guarded", "proxy")),
    "grpc": Program("grpc-client", ("guarded", "grpc")),
}


def unavailable_reason() -> str | None:
    """Return the reason why RocketMQ cannot run here, None if it can."""
    if _tool("java") is None or _tool("javac") is None:
        return "no JDK found (java, javac; by JAVA_HOME or PATH); install one, 17 or newer, and run `make setup`"
    if not (_PACKAGES / ".ready").exists():
        return "Apache RocketMQ is not in .rocketmq/; run `make setup` where there is a JDK 17 or newer and Maven"
    return None


@cache
def _tool(name: str) -> str | None:
    home = os.environ.get("JAVA_HOME")
    return (shutil.which(name, path=str(Path(home, "bin"))) if home else None) or shutil.which(name)


@cache
def _classes(name: str) -> Path:
    """Return the folder with the classes of a program. Compile them if the sources have changed."""
    program = _PROGRAMS[name]
    sources = sorted(source for folder in program.sources for source in (_SOURCES / folder).glob("*.java"))
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
    folder = _PACKAGES / f"classes-{name}-{digest}"
    if not folder.exists():
        new_folder = Path(tempfile.mkdtemp(prefix="classes.tmp-", dir=_PACKAGES))
        options = ["-nowarn", "-encoding", "UTF-8", "-parameters", "-cp", f"{_PACKAGES}/{program.packages}/*"]
        command = [str(_tool("javac")), *options, "-d", str(new_folder), *map(str, sources)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            shutil.rmtree(new_folder)
            raise PeerError(f"javac failed: {done.stderr}")
        for old in set(_PACKAGES.glob(f"classes-{name}-*")) - {folder}:
            shutil.rmtree(old, ignore_errors=True)
        try:
            new_folder.rename(folder)
        except OSError:
            shutil.rmtree(new_folder)
            if not folder.exists():
                raise
            # else another process was first, and its programs run already
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
    """Return a command line. The program writes its logs to *home*."""
    return [
        str(_tool("java")),
        *_OPENED,
        *_SHORT_INTERVALS,
        *flags,
        f"-Xms{min(heap_mib, 128)}m",
        f"-Xmx{heap_mib}m",
        f"-XX:MaxDirectMemorySize={2 * heap_mib}m",
        f"-Duser.home={home}",
        f"-Djava.io.tmpdir={home}",  # a killed process leaves unpacked libraries there
        f"-Drocketmq.home.dir={home}",
        # With TLS a server generates a key and a certificate when it starts: half of the CPU time of its start.
        f"-Dtls.server.mode={'permissive' if tls else 'disabled'}",
        "-Dcom.rocketmq.remoting.client.closeChannelTimeout=1000",
        "-cp",
        f"{_LOGGING}:{_classes(version)}:{_PACKAGES}/{_PROGRAMS[version].packages}/*",
        main,
        *arguments,
    ]


@contextmanager
def scratch_home(name: str) -> Iterator[Path]:
    """Create a folder for the logs of a program, and delete it at the end of the block."""
    home = Path(tempfile.mkdtemp(prefix=f"rocketmq-{name}-"))
    try:
        yield home
    finally:
        shutil.rmtree(home, ignore_errors=True)


class PeerProcess:
    """A running program of RocketMQ."""

    def __init__(self, name: str, command: list[str], home: Path) -> None:
        self.name = name
        self.home = home
        self._output = home / f"{name}.out"
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output, cwd=home)

    @property
    def pid(self) -> int:
        """Process ID."""
        return self._process.pid

    def wait_for(self, text: str) -> None:
        """Return when the program has printed *text*. Kill it and delete its folder if that fails."""
        try:
            self._wait_for(text)
        except BaseException:
            self.kill()
            shutil.rmtree(self.home, ignore_errors=True)
            raise

    def _wait_for(self, text: str) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while text not in self._output.read_text(errors="replace"):
            if self._process.poll() is not None:
                code = self._process.returncode
                raise PeerError(f"{self.name} ended with {code} instead of starting:\n{self.tail()}")
            if time.monotonic() > deadline:
                raise PeerError(f"{self.name} did not start in {_START_SECONDS} s:\n{self.tail()}")
            time.sleep(0.02)

    def tail(self) -> str:
        """Return the last lines of the output."""
        return "\n".join(lines(self._output)[-100:])

    def stop(self) -> None:
        """Stop the program cleanly if it runs."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        self._wait()

    def kill(self) -> None:
        """Kill the program with SIGKILL if it runs."""
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
    """Return the lines of a file."""
    return path.read_text(errors="replace").splitlines()


@contextmanager
def java_program(main: str, *arguments: str, version: str = "5.5.0") -> Iterator[IO[str]]:
    """Run a program of ``java/``, such as a bench: return its output lines, and wait until it has ended."""
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
