"""Golden scripts of commands for operators: what they write on a store directory, and on a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.operator import Operator
from tests.cli.running import CommandLine
from tests.golden import check_script, scripts_in

SCRIPTS = scripts_in(Path(__file__).parent / "scripts")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_commands_write_what_the_script_says(run: CommandLine, script: Path) -> None:
    check_script(script, Operator(run))


def test_a_histogram_has_bars(on_folder: CommandLine) -> None:
    assert "#" * 40 in on_folder.ok("delayed", "histogram").output
