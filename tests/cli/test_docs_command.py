"""``mqtemplate docs asyncapi``, and the page about it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import yaml

from tests.programs import run_python

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "asyncapi.md"

PROGRAM = """
from mqtemplate import MQApplication, message_listener

@message_listener("orders", "billing")
def bill(order: dict[str, int]) -> None:
    "Write a bill."

app = MQApplication(bill, settings={"rocketmq.name-server": "embedded:./data"})
"""


def docs(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a folder."""
    return run_python(folder, "-m", "mqtemplate", "docs", "asyncapi", *arguments)


def test_the_document_is_written_as_yaml_and_as_json(tmp_path: Path) -> None:
    """Both are the same document; nothing is started, so there is no store."""
    (tmp_path / "shop.py").write_text(PROGRAM, "utf-8")

    as_yaml = docs(tmp_path, "shop:app", "--app-version", "1.2.0")
    as_json = docs(tmp_path, "shop", "--app-version", "1.2.0", "--format", "json", "--output", "asyncapi.json")

    assert (as_yaml.returncode, as_json.returncode) == (0, 0), as_yaml.stderr + as_json.stderr
    document = json.loads((tmp_path / "asyncapi.json").read_text("utf-8"))
    assert yaml.safe_load(as_yaml.stdout) == document
    assert document["info"] == {"title": "shop", "version": "1.2.0"}
    assert document["operations"]["bill"]["summary"] == "Write a bill."
    assert as_json.stderr == "asyncapi.json written\n"
    assert not (tmp_path / "data").exists()


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(PROGRAM, "utf-8")

    run = docs(tmp_path, "shop", "--output", "no/asyncapi.json")

    assert run.returncode == 1
    assert "--output no/asyncapi.json: No such file or directory; name a file in a folder that exists" in run.stderr


def test_the_page_shows_the_messages_of_the_shop(tmp_path: Path) -> None:
    """``mqtemplate docs asyncapi examples.shop.with_spark:messages --format markdown`` writes this part of the page."""
    text = PAGE.read_text("utf-8")
    shown = text.partition("<!-- generated -->\n")[2].partition("<!-- end -->")[0]

    run = docs(tmp_path, "examples.shop.with_spark:messages", "--format", "markdown")

    assert shown.strip() == run.stdout.strip(), run.stderr
