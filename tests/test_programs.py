"""Programs that tests start: what they leave behind is ended, and a slow machine has more time."""

from __future__ import annotations

import fcntl
import sys
from pathlib import Path

import pytest

from tests import waiting
from tests.conftest import multiply_limits
from tests.programs import ROOT, ForkedPython, run_python
from tests.waiting import Patience, eventually

PARENT = """
import fcntl, subprocess, sys
file = open("lock", "w")
fcntl.flock(file, fcntl.LOCK_EX)
subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], pass_fds=[file.fileno()])
print("ended")
"""


def test_a_program_that_ends_takes_its_children_with_it(tmp_path: Path) -> None:
    """The child has the lock of its parent, as long as it lives. It has its output too, which then has no end."""
    assert run_python(tmp_path, "-c", PARENT).stdout == "ended\n"

    with (tmp_path / "lock").open("w", encoding="utf-8") as file:

        def is_free() -> bool:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

        eventually(is_free, "the child has ended")


def test_each_forked_program_has_its_own_state_output_and_exit_code(tmp_path: Path) -> None:
    program = "import os, sys, fractions; print(os.getcwd(), vars(fractions).setdefault('first', sys.argv[1]))"
    with ForkedPython(modules=("fractions",)) as python:
        one, other = (python.run(tmp_path, program, name) for name in ("one", "other"))
        failed = python.run(tmp_path, "import sys; sys.exit('no order')")
        after = python.run(tmp_path, "import atexit; atexit.register(print, 'ended')")

    assert [one.stdout, other.stdout] == [f"{tmp_path} one\n", f"{tmp_path} other\n"]
    assert (failed.returncode, failed.stderr) == (1, "no order\n")
    assert (after.returncode, after.stdout) == (0, "ended\n")


@pytest.mark.parametrize(
    ("slowness", "passed_s", "is_over"), [(1, 59, False), (1, 61, True), (4, 239, False), (4, 241, True)]
)
def test_patience_grows_with_the_slowness_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, slowness: float, passed_s: float, is_over: bool
) -> None:
    now_s = 1_000.0
    monkeypatch.setattr(waiting.time, "monotonic", lambda: now_s)
    monkeypatch.setattr(waiting, "slowness", lambda: slowness)
    patience = Patience(60)
    now_s += passed_s

    assert patience.is_over is is_over


def test_the_limits_of_tests_grow_too(request: pytest.FixtureRequest) -> None:
    multiply_limits([request.node], 1)
    multiply_limits([request.node], 3)
    limits = [marker.args[0] for marker in request.node.iter_markers("timeout")]

    assert limits[0] == 3 * limits[1]


def test_a_machine_without_chromium_is_told_the_command_that_installs_it(tmp_path: Path) -> None:
    """``make setup`` prints it, and the tests in a browser are skipped with it."""
    pytest.importorskip("playwright")
    nowhere = {"PATH": str(tmp_path), "PLAYWRIGHT_BROWSERS_PATH": str(tmp_path)}

    done = run_python(tmp_path, "-m", "tests.chromium", **nowhere)

    command = f"{sys.executable} -m playwright install chromium"
    assert done.stdout == f"The tests of pages in a browser are skipped: no Chromium: {command}\n", done.stderr
    assert "@$(PYTHON) -m tests.chromium\n" in (ROOT / "Makefile").read_text("utf-8")
