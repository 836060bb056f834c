"""Sends and pulls as golden scripts: see `tests.server.processors.message_commands`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden import check_script, scripts_in
from tests.server.processors.message_commands import MessageCommands


@pytest.mark.parametrize("path", scripts_in(Path(__file__).parent / "scripts"), ids=lambda path: path.stem)
def test_messages_are_stored_and_returned_as_the_script_says(path: Path, tmp_path: Path) -> None:
    commands = MessageCommands(tmp_path)
    try:
        check_script(path, commands)
    finally:
        commands.close()
