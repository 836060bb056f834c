"""Golden scripts: commands, and below them what they leave behind.

A script is a text file of blocks. A block has commands, a line ``---``, and the lines that the commands print::

    # A message waits on the wheel for its due time.
    send a after=5300ms
    wheel
    ---
    slot at 5s: 1 unit, last at 0

An empty line ends a block. A line that begins with ``#`` is a comment. Lines that begin with ``| `` are a text for the
command above them, such as the content of a file. ``UPDATE_SCRIPTS=1`` writes what the
commands print into the scripts: read the difference before it is committed.
"""

from __future__ import annotations

import os
import shlex
from difflib import unified_diff
from itertools import takewhile
from pathlib import Path

_UPDATE = "UPDATE_SCRIPTS"


def scripts_in(folder: Path) -> list[Path]:
    """Return the scripts of a folder."""
    return sorted(folder.glob("*.script"))


def check_script(path: Path, commands: object) -> None:
    """Run the commands of a script, and compare what they print with what the script says.

    Args:
        commands: Its methods are the commands. They get the words of their line, ``name=value`` as a keyword argument,
            and return the lines that they print, or None. A text below the line is the argument ``text``.
    """
    expected = path.read_text(encoding="utf-8")
    actual = "\n\n".join(_run_block(block, commands) for block in expected.strip().split("\n\n")) + "\n"
    if os.environ.get(_UPDATE):
        path.write_text(actual, encoding="utf-8")
    else:
        lines = expected.splitlines(), actual.splitlines()
        difference = "\n".join(unified_diff(*lines, path.name, "printed", lineterm=""))
        assert lines[0] == lines[1], f"{path.name}: {_UPDATE}=1 writes what is printed now\n{difference}"


def _run_block(block: str, commands: object) -> str:
    asked = block.partition("\n---")[0]
    printed: list[str] = []
    lines = asked.splitlines()
    for at, line in enumerate(lines):
        text = "".join(f"{each[2:]}\n" for each in takewhile(lambda each: each.startswith("|"), lines[at + 1 :]))
        printed += [] if line.startswith(("#", "|")) else _run(line, {"text": text} if text else {}, commands)
    return "\n".join([asked, "---", *printed] if printed else [asked])


def _run(line: str, given: dict[str, str], commands: object) -> list[str]:
    name, *words = shlex.split(line)
    options = given | dict(word.split("=", 1) for word in words if "=" in word)
    return list(getattr(commands, name)(*(word for word in words if "=" not in word), **options) or ())
