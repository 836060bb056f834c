"""The blocks of docs/spark.md, in a program of their own with a session of Spark."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.fences import DOCS, fences
from tests.programs import run_python

pytestmark = [pytest.mark.spark, pytest.mark.thorough, pytest.mark.timeout(300)]

BY_SERVER = "nameServer"
"""Blocks with this word read from or write to a server at a fixed address; tests/spark does so with free ports."""

BEFORE = """
import json
from datetime import UTC, datetime

from mqtemplate import *
from mqtemplate.spark import LocalServer, session

broker = EmbeddedBroker("./data")
broker.start()
server = LocalServer(broker)
server.start()
template = RocketMQTemplate(broker)
for region in ("north", "south", "east"):
    template.sync_send("payments:paid", {"region": region, "cents": 100})
template.sync_send("orders:paid", "tea")
template.sync_send("reminders", "later", delay="3h", keys="4466")
"""

AFTER = """
server.stop()
broker.close()
session().stop()
print("the end of the page")
"""


def test_the_blocks_of_the_page_run_one_after_the_other(tmp_path: Path) -> None:
    """Listeners are defined, and the first one handles a batch; a topic and the delayed messages are read."""
    blocks = [block.text for block in fences(DOCS / "spark.md") if block.language == "python" and not block.reason]
    program = "\n".join([BEFORE, *(block for block in blocks if BY_SERVER not in block), AFTER])
    (tmp_path / "page.py").write_text(program, "utf-8")

    done = run_python(tmp_path, "page.py")

    assert done.returncode == 0, done.stdout + done.stderr
    assert "the end of the page" in done.stdout
    assert list(tmp_path.glob("out/**/*.parquet"))
