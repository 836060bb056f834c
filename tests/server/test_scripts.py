"""Requests and their responses, as golden scripts: see `tests.server.script_commands`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden import check_script, scripts_in
from tests.server.script_commands import ServerCommands

SCRIPTS = scripts_in(Path(__file__).parent / "scripts")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_server_answers_requests_as_the_script_says(script: Path, tmp_path: Path) -> None:
    commands = ServerCommands(tmp_path)
    try:
        check_script(script, commands)
    finally:
        commands.close()
