"""The examples of docs/testing.md run."""

from __future__ import annotations

import re
from pathlib import Path

from tests.programs import run_python

PAGE = Path(__file__).parents[2] / "docs" / "testing.md"
DJANGO = """
import django, pytest
from django.conf import settings

settings.configure(ROOT_URLCONF="test_reminders", LOGGING_CONFIG=None)
django.setup()

@pytest.fixture
def client():
    from django.test import Client

    return Client()
"""
"""What pytest-django does for a project."""


def test_the_examples_of_the_page_run(tmp_path: Path) -> None:
    """They run in an empty folder, with the fixtures of the pytest plugin."""
    *examples, _ = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "conftest.py").write_text(DJANGO, encoding="utf-8")
    (tmp_path / "test_reminders.py").write_text("\n".join(examples), encoding="utf-8")

    run = run_python(tmp_path, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "test_reminders.py")

    assert run.returncode == 0, run.stdout + run.stderr
    assert "6 passed" in run.stdout
