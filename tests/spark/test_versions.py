"""Versions of PySpark, and the search of Spark for sources: a plain session has the source without a call."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from pkgutil import iter_modules

import pytest

pytest.importorskip("pyspark")

import pyspark

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.errors import SparkError
from mqtemplate.message import Message
from mqtemplate.spark import MqTemplateSource, session
from mqtemplate.spark.driver.sessions import SHIPPED_VARIABLE
from mqtemplate.spark.records.versions import HAS_READ_LIMITS
from tests.programs import environment, run
from tests.spark.listening.listeners import HANDLED
from tests.spark.reads import rows_of, stream_reader
from tests.spark.versions_program import SECRET

ROOT = Path(__file__).parents[2]


@pytest.mark.spark
@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_the_installed_pyspark_has_the_capabilities_of_the_documented_table(tmp_path: Path) -> None:
    """Batches, tables, streams, listeners and writes in a plain session; and no secret is shown.

    PySpark 4.0 and 4.1 run ``availableNow`` as one batch, so a run with a limit does not read everything.
    """
    variables = environment(PYSPARK_PYTHON=sys.executable, SPARK_LOCAL_IP="127.0.0.1")

    done = run([sys.executable, "-m", "tests.spark.versions_program", str(tmp_path)], ROOT, variables)

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    secrets = found.pop("secrets")
    assert "option 'secretKey' would be stored in the catalog" in secrets.pop("refused")
    assert secrets.pop("searched") > 15
    assert secrets == {"shown": [], "copies": 6}
    assert SECRET not in done.stdout + done.stderr
    at_once = found.pop("available_now"), found.pop("repeated"), found.pop("continued")
    # The second run repeats the batch whose commit was removed; its rows are stored once.
    assert [sum(batches) for batches in at_once] == ([50, 12, 0] if HAS_READ_LIMITS else [18, 18, 32])
    inserts_some = found.pop("insert_of_some_columns")
    assert inserts_some == (not pyspark.__version__.startswith("4.0."))
    assert found == {
        "version": pyspark.__version__,
        "batch": 50,
        "table": 50,
        "written": 5,
        "inserted": 1 + inserts_some,
        "pending": 1,
        "limited": [18, 20, 12],
        "streamed": [50, True],
        "handled": [list(each) for each in HANDLED],
        "dead": ["not json", '{"id": 2}'],
        "run_of_a_job": [12, True],
    }


# --- the search for sources -------------------------------------------------------------------------

PROGRAM = """
import sys
from pkgutil import iter_modules
import pyspark.sql.datasource
names = [each.name for each in iter_modules() if each.name.startswith("pyspark_")]
found = [getattr(__import__(name), "DefaultSource", None) for name in names]
loaded = [name for name in sys.modules if name.startswith("mqtemplate")]
print(names, [each and each.name() for each in found], loaded)
"""


def test_spark_finds_the_source_without_loading_the_library(tmp_path: Path) -> None:
    """Spark imports the package in each session, also where nothing reads our topics."""
    found = run([sys.executable, "-c", PROGRAM], tmp_path, environment())

    assert found.stdout.strip() == "['pyspark_mqtemplate'] ['mqtemplate'] []", found.stderr


def test_a_session_that_ships_the_library_registers_the_source_itself(tmp_path: Path) -> None:
    """Spark does not send a package with a source that it has found by itself."""
    found = run([sys.executable, "-c", PROGRAM], tmp_path, environment(**{SHIPPED_VARIABLE: "1"}))

    assert found.stdout.strip() == "['pyspark_mqtemplate'] [None] []", found.stderr


def test_the_source_that_spark_finds_is_the_source_of_the_library() -> None:
    assert "pyspark_mqtemplate" in {each.name for each in iter_modules([str(ROOT / "starters")])}

    from pyspark_mqtemplate import DefaultSource

    assert type(DefaultSource(options={"store": "./data"})) is MqTemplateSource
    assert DefaultSource.name() == MqTemplateSource.name()


def test_a_python_without_the_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark runs ``python3`` unless PYSPARK_PYTHON names another one."""
    from pyspark_mqtemplate import DefaultSource

    monkeypatch.setitem(sys.modules, "mqtemplate.spark", None)

    with pytest.raises(ModuleNotFoundError, match=r"with which Spark runs Python; .* let PYSPARK_PYTHON name the"):
        DefaultSource(options={})


def test_pyspark_3_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyspark.__version__", "3.5.9")

    with pytest.raises(
        SparkError, match=r"pyspark 4\.0 or newer, got 3\.5\.9, which has no data sources in Python: pip"
    ):
        session()


# --- calls of PySpark 4.0 and 4.1 -------------------------------------------------------------------


def test_a_stream_without_the_start_of_a_batch_continues_after_the_planned_one(broker: EmbeddedBroker) -> None:
    """PySpark 4.0 and 4.1 call ``latestOffset()``. Each batch has the limit, and each message is in one batch."""
    for number in range(10):
        broker.sends.send(Message("orders", b"%d" % number))
    reader = stream_reader(broker, maxOffsetsPerTrigger="4")
    seen, start = [], reader.initialOffset()

    while (end := reader.latestOffset()) != start:
        rows = rows_of(reader, reader.partitions(start, end))
        assert len(rows) <= 4
        seen += [int(row["body"]) for row in rows]
        start = end

    assert sorted(seen) == list(range(10))


def test_a_restarted_stream_continues_at_its_checkpoint(broker: EmbeddedBroker) -> None:
    """Spark reports the end of the last planned batch by ``partitions(end, end)``, before any other call."""
    for number in range(10):
        broker.sends.send(Message("orders", b"%d" % number))
    first = stream_reader(broker, maxOffsetsPerTrigger="4")
    end = first.latestOffset()
    seen = rows_of(first, first.partitions(first.initialOffset(), end))

    again = stream_reader(broker)
    assert again.partitions(end, end) == []
    seen += rows_of(again, again.partitions(end, again.latestOffset()))

    assert sorted(int(row["body"]) for row in seen) == list(range(10))
