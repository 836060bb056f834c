"""The blocks of the pages on Spark, in a program for each page with a session of Spark, or as code of an example."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.fences import DOCS, ROOT, fences
from tests.programs import run_python

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

FOR_STREAMS = """
from mqtemplate import EmbeddedBroker, Message
from mqtemplate.spark import LocalServer, session

broker = EmbeddedBroker("./data")
broker.start()
server = LocalServer(broker)
server.start()
for key, customer, message_id in (("1", "ann", "A1"), ("2", "bob", "B1"), ("1", "ann", "A1")):
    body = b'{"customer": "%s", "cents": 100}' % customer.encode()
    broker.sends.send(Message("payments", body, {"KEYS": key, "UNIQ_KEY": message_id}))
broker.sends.send(Message("orders", b"tea", {"KEYS": "2"}))
"""

AFTER = """
server.stop()
broker.close()
session().stop()
print("the end of the page")
"""


AFTER_STREAMS = """
count = lambda name: session().read.parquet(f"out/{name}").count()
balances = {row.customer: row.cents for row in session().read.parquet("out/balances").collect()}
found = [count(name) for name in ("once", "with_region", "pairs", "hourly")]
assert (found, balances) == ([2, 3, 1, 3], {"ann": 200, "bob": 100}), (found, balances)
"""


@pytest.mark.parametrize("page", ["delta", "iceberg", "databases", "parquet"])
def test_a_page_on_tables_shows_the_listeners_that_are_killed(page: str) -> None:
    """`bench/spark_exactly_once.py` and its test run them. The attributes of their decorators are written out here."""
    example = (ROOT / "examples" / "spark_tables.py").read_text("utf-8")
    blocks = [block.text for block in fences(DOCS / "spark" / f"{page}.md") if block.language == "python"]
    functions = re.findall(
        r"^def (\w+)\([^\n]*\n(.*?)(?=\n\n\n|\n*\Z)", "\n\n\n".join(blocks), re.DOTALL | re.MULTILINE
    )

    assert functions
    for name, body in functions:
        assert f"def {name}(" in example
        assert body in example


@pytest.mark.spark
@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_the_page_on_streams_runs(tmp_path: Path) -> None:
    """Each example reads the same three messages, two of which are one that a producer sent twice."""
    blocks = [block.text for block in fences(DOCS / "spark" / "streams.md") if block.language == "python"]
    (tmp_path / "page.py").write_text("\n".join([FOR_STREAMS, *blocks, AFTER_STREAMS, AFTER]), "utf-8")

    done = run_python(tmp_path, "page.py")

    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 payments\n" in done.stdout
    assert "3 payments in the files" in done.stdout


@pytest.mark.spark
@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_the_blocks_of_the_page_run_one_after_the_other(tmp_path: Path) -> None:
    """Listeners are defined, and the first one handles a batch; a topic and the delayed messages are read."""
    blocks = [block.text for block in fences(DOCS / "spark.md") if block.language == "python" and not block.reason]
    program = "\n".join([BEFORE, *(block for block in blocks if BY_SERVER not in block), AFTER])
    (tmp_path / "page.py").write_text(program, "utf-8")

    done = run_python(tmp_path, "page.py")

    assert done.returncode == 0, done.stdout + done.stderr
    assert "the end of the page" in done.stdout
    assert list(tmp_path.glob("out/**/*.parquet"))
