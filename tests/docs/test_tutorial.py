"""The tutorial, followed by its text alone: files with their titles, commands with the output that the page shows."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.peer.rocketmq import free_port
from tests.docs.fences import DOCS, Fence, fences, missing_lines
from tests.programs import end_group, run
from tests.waiting import PATIENCE_S, eventually

STEPS = sorted((DOCS / "tutorial").glob("[0-9]*.md"))
SHORT = {"05-cancel", "09-schedules"}
"""Steps in ``make test``: one that runs the package, and one that runs all tests of the tutorial."""


class Terminal:
    """A terminal of the text: a program that runs until the end of the step."""

    def __init__(self, command: str, folder: Path, environment: dict[str, str]) -> None:
        self._log = folder / f".{len(list(folder.iterdir()))}.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                shlex.split(command),
                cwd=folder,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def shows(self, lines: str) -> None:
        """Wait until the program has written these lines."""
        eventually(lambda: self._process.poll() is not None or not missing_lines(lines, self.output()), lines)
        assert missing_lines(lines, self.output()) == [], self.output()

    def output(self) -> str:
        return self._log.read_text("utf-8")

    def kill(self) -> None:
        """End the program of a step that failed."""
        end_group(self._process)
        self._process.wait()

    def interrupt(self) -> None:
        """Press Ctrl-C, and wait for the end."""
        self._process.send_signal(signal.SIGINT)
        assert self._process.wait(PATIENCE_S) == 0, self.output()


class Reader:
    """A reader of the tutorial in an empty folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.terminals: dict[str, Terminal] = {}
        name_server = f"127.0.0.1:{free_port()}"
        self.environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONUNBUFFERED": "1",
            "COLUMNS": "200",
            "SHOP_NAME_SERVER": name_server,  # not the ports of another server on this machine
            "MQTEMPLATE_SERVER_NAME_SERVER": name_server,
            "MQTEMPLATE_SERVER_LISTEN": f"127.0.0.1:{free_port()}",
        }

    def write_files(self, page: Path) -> None:
        """Write the files of a page."""
        for fence in fences(page):
            if fence.title and fence.language in ("python", "yaml"):
                path = self.folder / fence.title
                path.parent.mkdir(exist_ok=True)
                path.write_text(fence.text, "utf-8")

    def run_commands(self, page: Path) -> None:
        """Run the commands of a page, and compare the output."""
        for fence in fences(page):
            if fence.language == "console":
                self._run(fence)
            elif fence.language == "text" and fence.title:
                self.terminals[fence.title].shows(fence.text)
        for terminal in reversed(self.terminals.values()):
            terminal.interrupt()

    def _run(self, fence: Fence) -> None:
        command, _, shown = fence.text.removeprefix("$ ").partition("\n")
        if fence.title:
            self.terminals[fence.title] = Terminal(command, self.folder, self.environment)
            self.terminals[fence.title].shows(shown)
            return
        done = run(["sh", "-c", command], self.folder, self.environment)
        assert done.returncode == 0, done.stdout + done.stderr
        assert missing_lines(shown, done.stdout) == [], done.stdout + done.stderr


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    reader = Reader(tmp_path)
    yield reader
    for terminal in reader.terminals.values():
        terminal.kill()


@pytest.mark.parametrize(
    "step",
    [pytest.param(page, id=page.stem, marks=[] if page.stem in SHORT else [pytest.mark.thorough]) for page in STEPS],
)
def test_a_step_of_the_tutorial_works_by_its_text(step: Path, reader: Reader) -> None:
    """The folder has the files of the earlier steps, in the versions that the reader has by then."""
    for page in STEPS[: STEPS.index(step) + 1]:
        reader.write_files(page)

    reader.run_commands(step)


@pytest.mark.spark
@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_the_tutorial_for_data_engineers_works_by_its_text(reader: Reader) -> None:
    pytest.importorskip("pyspark")
    page = DOCS / "spark" / "tutorial" / "index.md"
    reader.write_files(page)

    reader.run_commands(page)


@pytest.mark.thorough
@pytest.mark.timeout(600)  # thirty programs, one after the other
def test_the_whole_tutorial_in_one_folder(reader: Reader) -> None:
    """A reader goes from the first step to the last; each step finds the messages that the earlier ones left."""
    for page in STEPS:
        reader.write_files(page)
        reader.run_commands(page)
        reader.terminals.clear()
