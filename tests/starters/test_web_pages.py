"""The programs and tests in docs/web run as they stand."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from mqtemplate.context.settings.source import load_settings
from tests.programs import run_python

ROOT = Path(__file__).parents[2]
WEB = ROOT / "docs" / "web"


def blocks(page: Path, language: str) -> list[str]:
    """Return the fenced blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", ["fastapi.md", "flask.md"])
def test_the_program_of_a_page_passes_its_test(page: str, tmp_path: Path) -> None:
    (tmp_path / "test_web.py").write_text("\n\n".join(blocks(WEB / page, "python")), "utf-8")

    done = run_python(tmp_path, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", ".", bare=True)

    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_the_blocks_in_yaml_are_valid() -> None:
    for page in (WEB / "deployment.md", ROOT / "docs" / "run.md"):
        for block in blocks(page, "yaml"):
            assert isinstance(yaml.safe_load(block), dict)


def test_the_block_in_toml_has_only_known_keys(tmp_path: Path) -> None:
    [block] = blocks(ROOT / "docs" / "configuration.md", "toml")
    (tmp_path / "application.toml").write_text(block, "utf-8")

    assert load_settings(tmp_path, environment={}).mqtemplate.broker.topics == ("orders", "payments")
    assert tomllib.loads(block)
