"""The locks of what make installs: they fit pyproject.toml, and each package in them has a version and hashes."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCKS = ROOT / ".ci" / "locks"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
EXTRAS = {
    "develop": ("spark", "speed", "test", "dev"),
    "docs": ("docs",),
    "spark-jre": ("spark-jre",),
    "check": ("check",),
    "build": (),
    "base": (),
}
"""Lock -> extras of pyproject.toml that it has to satisfy."""
PYSPARKS = sorted(path.stem for path in LOCKS.glob("spark-4*.txt"))
"""Locks of other versions of PySpark, each with this package only."""

_ENTRY = re.compile(
    r"(?P<requirement>[a-zA-Z0-9][^\\\n]*?) \\\n(?P<hashes>(?: +--hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)"
)


def entries(lock: str) -> list[tuple[Requirement, int]]:
    """Return the requirements of a lock, each with the number of its hashes."""
    text = (LOCKS / f"{lock}.txt").read_text("utf-8")
    found = [(Requirement(each["requirement"]), each["hashes"].count("--hash")) for each in _ENTRY.finditer(text)]
    assert _ENTRY.sub("", re.sub(r"#.*\n", "", text)).strip() == "", "the lock has a line of another kind"
    return found


@pytest.mark.parametrize("lock", [*EXTRAS, *PYSPARKS])
def test_each_package_has_one_version_and_hashes(lock: str) -> None:
    """Of a package with several versions each has a marker. Nothing else is in the file, such as an index."""
    found = entries(lock)

    assert found
    for requirement, count in found:
        assert re.fullmatch(r"==[^,*]+", str(requirement.specifier)), requirement
        assert count > 0, requirement


@pytest.mark.parametrize("lock", EXTRAS)
def test_the_lock_satisfies_what_the_project_requires(lock: str) -> None:
    """After a change of pyproject.toml: make lock."""
    names = EXTRAS[lock]
    required = [Requirement(text) for extra in names for text in PROJECT["project"]["optional-dependencies"][extra]]
    required += [Requirement(text) for text in PROJECT["project"]["dependencies"]] if lock != "build" else []
    required += [Requirement(text) for text in PROJECT["build-system"]["requires"]] if lock == "build" else []
    locked: dict[str, list[Requirement]] = {}
    for requirement, _ in entries(lock):
        locked.setdefault(canonicalize_name(requirement.name), []).append(requirement)

    for each in required:
        found = locked.get(canonicalize_name(each.name), [])
        assert found, f"{each} is not in the lock {lock}: make lock"
        for version in (str(one.specifier).removeprefix("==") for one in found):
            assert each.specifier.contains(version, prereleases=True), f"{each} and version {version}: make lock"


@pytest.mark.parametrize("lock", PYSPARKS)
def test_the_lock_of_a_pyspark_has_a_version_that_the_extra_allows(lock: str) -> None:
    [(locked, _)] = entries(lock)
    allowed = next(each for each in map(Requirement, PROJECT["project"]["optional-dependencies"]["spark"]))

    assert (allowed.name, locked.name) == ("pyspark", "pyspark")
    version = str(locked.specifier).removeprefix("==")
    assert version.startswith(lock.removeprefix("spark-") + ".")
    assert allowed.specifier.contains(version)


def test_the_locks_agree_on_versions() -> None:
    """They are installed into one environment."""
    versions: dict[tuple[str, str], set[str]] = {}
    for lock in EXTRAS:
        for requirement, _ in entries(lock):
            key = (canonicalize_name(requirement.name), str(requirement.marker or ""))
            versions.setdefault(key, set()).add(str(requirement.specifier))

    assert {key: found for key, found in versions.items() if len(found) > 1} == {}


def test_make_installs_nothing_without_a_hash() -> None:
    """Except this project itself, and the tool that writes the locks."""
    text = (ROOT / "Makefile").read_text("utf-8").replace("\\\n", " ")
    installs = [line for line in text.splitlines() if re.search(r"PIP_INSTALL\)|-m pip install|uv pip install", line)]
    unlocked = [line for line in installs if "--require-hashes" not in line and "PIP_INSTALL =" not in line]

    assert len(unlocked) == 2
    assert "--no-deps --no-build-isolation --editable ." in unlocked[0]
    assert "install --quiet uv" in unlocked[1]


def test_the_documentation_is_built_without_pyspark(tmp_path: Path) -> None:
    """It has a lock of its own, and an environment that has nothing else is enough."""
    command = ["make", "--dry-run", "docs", f"VENV={tmp_path / 'venv'}", f"PY={sys.executable}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)

    assert "pyspark" not in {canonicalize_name(requirement.name) for requirement, _ in entries("docs")}
    assert set(re.findall(r"--requirement \S*/(\w+)\.txt", done.stdout)) == {"build", "docs"}
