"""Avro payloads, with the functions of Spark's own package, in sessions of their own; and a schema registry."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")

from bench.peer.fetch import PACKAGES_FOLDER, fetch
from mqtemplate.errors import ConfigurationError, SparkError
from tests.programs import run_python
from tests.spark.listening.avro_program import NO_BODIES, PASSWORD, Registry

ROOT = Path(__file__).parents[3]


def run_listener(work: str, folder: Path) -> Any:
    """Run a part of the program, and return what it found."""
    if (reason := fetch("spark-avro", "Spark's package for Avro")) is not None:
        pytest.skip(reason)
    (jar,) = (PACKAGES_FOLDER / "spark-avro").glob("spark-avro*.jar")

    done = run_python(ROOT, "-m", "tests.spark.listening.avro_program", work, str(folder), str(jar))

    assert done.returncode == 0, done.stderr
    assert PASSWORD not in done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.spark
@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_avro_bodies_become_columns_and_a_bad_one_is_a_dead_letter(tmp_path: Path) -> None:
    """In its mode PERMISSIVE ``from_avro`` returns a struct of nulls for a bad body, not null."""
    assert run_listener("one-schema", tmp_path) == {"rows": [[7, "eu"], [8, "us"]], "dead": ["ff"]}


@pytest.mark.spark
@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_bodies_of_a_registry_are_read_by_the_schemas_that_they_were_written_with(tmp_path: Path) -> None:
    """The older schema has no field ``cents``; ids 1 and 258 are in the five bytes, high byte first."""
    pytest.importorskip("confluent_kafka.schema_registry", reason="it needs the extra registry")

    assert run_listener("registry", tmp_path) == {
        "rows": [[7, "eu", 5], [8, "us", 9]],
        "dead": [body.hex() for body in NO_BODIES],
        "written": ["00000001020e0465750a"],
        "read again": [[7, "eu", 5]],
        "registered": ["0000000103046575"],
        "shown": False,
    }


# --- errors, without a session ----------------------------------------------------------------------


def test_a_registry_that_refuses_is_named_without_its_password() -> None:
    pytest.importorskip("confluent_kafka.schema_registry", reason="it needs the extra registry")
    from mqtemplate.spark import RegistryAvro

    with Registry("orders-value", {1: {"type": "string"}}) as server:
        url = server.url.replace("//", f"//spark:wrong-{PASSWORD}@")
        orders = RegistryAvro("orders-value", {"url": url})
        with pytest.raises(
            SparkError, match=r"schema registry 127\.0\.0\.1:\d+: get_latest_version 'orders-value': .*401"
        ) as raised:
            orders.body(None)  # type: ignore[arg-type]

    assert PASSWORD not in f"{raised.value} {orders}"


def test_a_wrong_setting_of_a_registry_is_refused() -> None:
    pytest.importorskip("confluent_kafka.schema_registry", reason="it needs the extra registry")
    from mqtemplate.spark import RegistryAvro

    with pytest.raises(ConfigurationError, match="schema registry with the settings password, url: .*password"):
        RegistryAvro("orders-value", {"url": "http://127.0.0.1:1", "password": PASSWORD})


def test_the_missing_client_of_a_registry_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "confluent_kafka.schema_registry", None)
    from mqtemplate.spark import RegistryAvro

    with pytest.raises(ConfigurationError, match=r"a schema registry needs its client: pip install"):
        RegistryAvro("orders-value", {"url": "http://127.0.0.1:1"})
