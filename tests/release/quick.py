"""The quick tests, on the oldest and the newest Python of this machine: ``make quick``.

They run against an installed wheel, in an environment without extras.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from time import monotonic

from tests.release.environments import (
    BUILD,
    ROOT,
    CheckFailedError,
    Python,
    build_wheel,
    check_origin,
    environment,
    installed_pythons,
    oldest_and_newest,
    run,
    step,
)

TESTS = ("tests/template", "tests/typing", "tests/listener/handler", "tests/test_futures.py")
NEED_EXTRAS = ("tests/template/test_values_arrive_equal.py",)


def run_quick_tests(inside: Path, folder: Path) -> str:
    """Run the quick tests by the Python of an environment; return the last line of pytest.

    The tests are copied: beside the clone's `mqtemplate` they would import that one.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copy(ROOT / "pyproject.toml", folder)
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    check_origin(inside, folder)
    # fmt: off
    output = run(
        inside, "-m", "pytest", "--quiet", "--override-ini", "pythonpath=.", "-p", "no:cacheprovider",
        "-m", "not thorough and not slow and not spark and not conformance", "--basetemp", folder / "temporary",
        *(f"--ignore={name}" for name in NEED_EXTRAS), *TESTS,
        cwd=folder,
    )
    # fmt: on
    return output.strip().splitlines()[-1].strip("= ")


def check(python: Python, wheel: Path) -> None:
    """Run the quick tests on one Python."""
    started = monotonic()
    inside = environment(BUILD / f"python{python.name}", python, wheel, is_kept=True)
    summary = run_quick_tests(inside, BUILD / f"quick{python.name}")
    step(f"Python {python.name}, without extras: {summary}", started)


def main() -> int:
    """Run the quick tests on both ends of the installed Pythons."""
    try:
        wheel = build_wheel(BUILD / "wheel")
        for python in oldest_and_newest(installed_pythons()):
            check(python, wheel)
    except CheckFailedError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
