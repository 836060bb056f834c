"""The page about the server lists exactly the mqadmin commands that the conformance tests run."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "server.md"
CONFORMANCE = ROOT / "tests" / "conformance" / "test_mqadmin_on_our_server.py"


def test_the_page_lists_the_commands_that_the_tests_run() -> None:
    run = set(re.findall(r"(?:\.mqadmin|prints)\(\s*\"(\w+)", CONFORMANCE.read_text(encoding="utf-8")))
    section = PAGE.read_text(encoding="utf-8").partition("## Tools")[2].partition("\n## ")[0]
    paragraph = section.partition("test_mqadmin_on_our_server.py`:")[2].strip().partition("\n\n")[0]
    listed = re.findall(r"`(\w+)`", paragraph)

    assert listed == sorted(run)
