"""The examples of docs/testing.md run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "testing.md"


def test_the_examples_of_the_page_run(tmp_path: Path) -> None:
    """They run in an empty folder, with the fixtures of the pytest plugin."""
    *examples, _ = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "test_reminders.py").write_text("\n".join(examples), encoding="utf-8")

    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_reminders.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )

    assert run.returncode == 0, run.stdout + run.stderr
    assert "3 passed" in run.stdout
