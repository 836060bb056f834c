"""Golden scripts of a server: requests, their answers, and what is stored. See `tests.server.script_commands`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.golden import check_script, scripts_in
from tests.server.script_commands import ServerCommands


@pytest.fixture
def commands() -> Iterator[ServerCommands]:
    commands = ServerCommands()
    yield commands
    commands.close()


@pytest.mark.parametrize("path", scripts_in(Path(__file__).parent / "scripts"), ids=lambda path: path.stem)
def test_a_server_answers_as_the_script_says(path: Path, commands: ServerCommands) -> None:
    check_script(path, commands)
