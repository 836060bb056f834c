"""Listeners over Spark Connect, in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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
from tests.spark.listening.listeners import Collect, NeedsService, fail

ROOT = Path(__file__).parents[3]


@pytest.mark.spark
@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_a_listener_runs_over_spark_connect(tmp_path: Path) -> None:
    """It has the batches, payloads, redeliveries, dead letters, metrics and errors of an ordinary session."""
    pytest.importorskip("grpc", reason="Spark Connect needs the packages of pyspark[connect]")
    command = [sys.executable, "-m", "tests.spark.listening.connect_program", str(tmp_path)]
    variables = {
        **os.environ,
        "SEEN": str(tmp_path / "seen"),
        "PYTHONPATH": str(ROOT),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }

    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=variables, check=False)

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["listener"] == {
        "seen": [[1, 0, 4], [2, 0, 4], [2, 1, 1], [3, 0, 4]],
        "lag": 0,
        "dead": ["not json", '{"id": 2}'],
        "messages": 5,
        "exception": None,
    }
    assert found["failure"] == {"error": "Spark listener fail: no place for 4 messages", "failures": 1}
    assert found["read"] == 2


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
