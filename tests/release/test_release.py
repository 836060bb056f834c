"""The checks of a release: what they look at, and what they say if it is wrong. ``make release-check`` runs them."""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import mqtemplate
from tests.release import check_release, quick
from tests.release.environments import (
    PROJECT,
    ROOT,
    CheckFailedError,
    Python,
    environment,
    installed_pythons,
    oldest_and_newest,
    run,
)
from tests.release.sbom import bill_of_materials

# --- types --------------------------------------------------------------------------------------------


def test_the_library_and_each_starter_say_that_they_have_types() -> None:
    packages = [ROOT / "mqtemplate", *(ROOT / "starters").glob("*mqtemplate*")]

    assert len(packages) > 5
    assert [package.name for package in packages if not (package / "py.typed").is_file()] == []


def test_make_test_checks_types_from_a_wheel_and_runs_the_quick_tests() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")

    assert "$(MAKE) --no-print-directory lint types quick &" in makefile


def wheel_of(folder: Path, text: str) -> Path:
    """Write the wheel of a package with one module, `probe`."""
    wheel = folder / "probe-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("probe.py", text)
        archive.writestr("probe-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: probe\nVersion: 1.0\n")
        archive.writestr("probe-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("probe-1.0.dist-info/RECORD", "")
    return wheel


@pytest.mark.thorough
def test_a_kept_environment_gets_the_new_wheel_and_keeps_its_packages(tmp_path: Path) -> None:
    [python, *_] = installed_pythons()
    folder = tmp_path / "environment"
    environment(folder, python, wheel_of(tmp_path, "print('first')"), lock=None, is_kept=True)
    (folder / "installed before").touch()

    inside = environment(folder, python, wheel_of(tmp_path, "print('second')"), lock=None, is_kept=True)

    assert run(inside, "-c", "import probe") == "second\n"
    assert (folder / "installed before").exists()


# --- a wrong Python -----------------------------------------------------------------------------------


def test_an_old_python_is_told_which_one_is_needed() -> None:
    program = "import sys; sys.version_info = (3, 10, 1); import mqtemplate"

    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)

    assert "ImportError: mqtemplate needs Python 3.11 or newer, this is Python 3." in done.stderr


def test_an_old_python_can_parse_the_module_that_says_so() -> None:
    """The check stands before the first import of another module of the package."""
    source = Path(mqtemplate.__file__).read_text("utf-8")

    body = ast.parse(source, feature_version=(3, 7)).body

    check = next(index for index, node in enumerate(body) if isinstance(node, ast.If))
    assert "sys.version_info < (3, 11)" in ast.unparse(body[check])
    assert [ast.unparse(node) for node in body[1:check]] == ["import sys", "from typing import TYPE_CHECKING"]


def test_make_with_an_old_python_says_which_one_is_needed(tmp_path: Path) -> None:
    old = tmp_path / "python3.9"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.18 || exit 1\n', "utf-8")
    old.chmod(0o755)

    command = ["make", f"VENV={tmp_path / 'venv'}", f"PY={old}", str(tmp_path / "venv" / ".ready")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode != 0
    assert f"mqtemplate needs Python 3.11 or newer, and {old} is Python 3.9.18." in done.stderr
    assert not (tmp_path / "venv").exists()


# --- checks of a release ------------------------------------------------------------------------------


def test_each_extra_of_users_is_checked_in_an_environment_of_its_own() -> None:
    extras = set(PROJECT["optional-dependencies"])

    assert extras == set(check_release.MODULES_OF_EXTRAS) | check_release.OF_DEVELOPERS


def test_the_quick_tests_exist() -> None:
    assert [name for name in (*quick.TESTS, *quick.NEED_EXTRAS) if not (ROOT / name).exists()] == []


def test_the_quick_tests_run_on_the_oldest_and_the_newest_python() -> None:
    three = [Python((3, minor), Path(f"python3.{minor}")) for minor in (11, 12, 13)]

    assert [python.name for python in oldest_and_newest(three)] == ["3.11", "3.13"]
    assert oldest_and_newest(three[:1]) == three[:1]


def test_the_python_of_the_tests_is_among_those_that_are_installed() -> None:
    found = installed_pythons()

    assert sys.version_info[:2] in [python.version for python in found]
    assert found == sorted(found)


def test_a_wheel_without_types_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "mqtemplate.whl"
    packages = ["mqtemplate", *(path.name for path in (ROOT / "starters").glob("*mqtemplate*"))]
    with zipfile.ZipFile(wheel, "w") as files:
        files.writestr("mqtemplate-0.1.0.dist-info/licenses/LICENSE", "")
        for package in packages:
            files.writestr(f"{package}/__init__.py", "")
            if package != "mqtemplate_starter_flask":
                files.writestr(f"{package}/py.typed", "")

    with pytest.raises(CheckFailedError, match=r"py\.typed is missing in mqtemplate_starter_flask"):
        check_release.check_contents(wheel)


def test_a_wheel_without_a_starter_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "mqtemplate.whl"
    with zipfile.ZipFile(wheel, "w") as files:
        files.writestr("mqtemplate/py.typed", "")

    with pytest.raises(
        CheckFailedError, match=r"the wheel has the packages \['mqtemplate'\], the clone \['mqtemplate', "
    ):
        check_release.check_contents(wheel)


def test_a_version_that_the_package_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_release.check_version() == mqtemplate.__version__

    monkeypatch.setitem(check_release.PROJECT, "version", "9.9.9")
    with pytest.raises(
        CheckFailedError, match=r"pyproject\.toml has version 9\.9\.9; mqtemplate/__init__\.py has another"
    ):
        check_release.check_version()


def test_a_bill_of_materials_names_each_package_and_what_it_needs() -> None:
    bill = bill_of_materials("hypothesis")

    components = {each["name"]: each for each in bill["components"]}
    [edges] = [each["dependsOn"] for each in bill["dependencies"] if each["ref"].startswith("pkg:pypi/hypothesis@")]
    assert bill["metadata"]["component"]["name"] == "hypothesis"
    assert components["sortedcontainers"]["purl"] in edges
    assert "pytest" not in components
