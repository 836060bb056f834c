"""Listeners over Spark Connect, in a process of their own."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")

from mqtemplate.errors import ListenerError
from mqtemplate.message import MessageQueue
from mqtemplate.spark import SparkBatch
from mqtemplate.spark.listening.batches import summary_of
from mqtemplate.spark.listening.connect import ImportedFunction
from mqtemplate.spark.listening.shared_broker import messages_of
from mqtemplate.spark.records.offsets import to_spark
from tests.programs import environment, run
from tests.spark.connect_server import VARIABLES, connect_server
from tests.spark.listening.connect_program import SECRETS
from tests.spark.listening.listeners import Collect, NeedsService, fail

pytest.importorskip("grpc", reason="Spark Connect needs the packages of pyspark[connect]")

ROOT = Path(__file__).parents[3]
REDACTED = r'(?s)(accessKey|secretKey|securityToken)".*?value: "[^"]*"'
"""Setting of docs/spark.md: what Spark removes from the texts of plans."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """Folder and address of a server. Its log of events and its web interface show what others can see."""
    folder = tmp_path_factory.mktemp("connect")
    (folder / "events").mkdir()
    conf = {
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": str(folder / "events"),
        "spark.eventLog.compress": "false",
        "spark.sql.redaction.string.regex": REDACTED,
    }
    variables = {
        "SEEN": str(folder / "seen"),
        "MQTEMPLATE_ACCESS_KEY": "by-variable",
        "MQTEMPLATE_SECRET_KEY": SECRETS["by-variable"],
    }
    with connect_server(folder, conf, **variables) as address:
        yield folder, address


def run_client(work: str, folder: Path, address: str) -> dict[str, Any]:
    """Run a part of the program, and return what it found."""
    command = [sys.executable, "-m", "tests.spark.listening.connect_program", work, str(folder), address]

    done = run(command, ROOT, environment(SEEN=str(folder / "seen"), **VARIABLES))

    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.spark
@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_a_listener_runs_over_spark_connect(server: tuple[Path, str]) -> None:
    """It has the batches, payloads, redeliveries, dead letters, metrics and errors of an ordinary session."""
    found = run_client("listeners", *server)

    assert found["listener"] == {
        "seen": [[1, 0, 4], [2, 0, 4], [2, 1, 1], [3, 0, 4]],
        "lag": 0,
        "dead": ["not json", '{"id": 2}'],
        "messages": 5,
        "exception": None,
    }
    assert found["failure"] == {"error": "Spark listener fail: no place for 4 messages", "failures": 1}
    assert found["read"] == 2


@pytest.mark.spark
@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_keys_are_not_shown_over_spark_connect(server: tuple[Path, str]) -> None:
    """Keys in the environment of the server, and as options with the setting of the page that removes them."""
    found = run_client("secrets", *server)

    assert found["copies"] == dict.fromkeys(SECRETS, 6)
    assert found["shown"] == {"by-option": [], "by-variable": []}
    assert found["searched"] > 20


def test_the_message_of_an_error_is_the_last_line_of_its_stack() -> None:
    """Spark's own lines before and after it are left out."""
    text = (
        "[STREAM_FAILED] Query [id = 1] terminated with exception: [PYTHON_EXCEPTION] Found error: "
        'Traceback (most recent call last):\n  File "work.py", line 1, in fail\n    raise ValueError("x")\n'
        "ValueError: the sink is down\n SQLSTATE: 38000\n\nJVM stacktrace:\norg.apache.spark.SparkException: x"
    )

    assert summary_of(RuntimeError(text)) == "the sink is down"


def test_the_messages_of_a_batch_are_counted_by_its_offsets() -> None:
    """A batch with a new queue, and the first batch, which has no start."""
    queues = [MessageQueue("orders", "broker-a", queue_id) for queue_id in range(2)]
    first, second = {queues[0]: 3}, {queues[0]: 10, queues[1]: 4}

    def progress(start: dict[MessageQueue, int] | None, end: dict[MessageQueue, int]) -> dict[str, Any]:
        texts = [None if table is None else json.dumps(to_spark(table)) for table in (start, end)]
        return {"sources": [dict(zip(("startOffset", "endOffset"), texts, strict=True))]}

    assert messages_of(progress(None, second), first) == 7 + 4
    assert messages_of({"sources": [{"startOffset": "null", "endOffset": "null"}]}, first) == 0
    older = {"startOffset": str(None), "endOffset": str(to_spark(second))}  # as PySpark 4.0 and 4.1 have it
    assert messages_of({"sources": [older]}, first) == 7 + 4
    assert messages_of(progress(second, {**second, queues[1]: 5}), first) == 1


def test_a_listener_is_found_by_its_module() -> None:
    assert ImportedFunction.of(fail, "fail").load() is fail
    assert ImportedFunction.of(Collect(), "Collect").load().__qualname__ == "Collect.on_batch"


def test_a_listener_that_another_process_cannot_import_is_refused() -> None:
    def local(messages: object, batch: SparkBatch) -> None: ...

    with pytest.raises(ListenerError, match="which must import it; define .*local at the top of a module that the"):
        ImportedFunction.of(local, "Spark listener local")
    with pytest.raises(ListenerError, match="give the constructor of NeedsService no arguments, or use a function"):
        ImportedFunction.of(NeedsService(object()), "Spark listener NeedsService")
