"""Avro payloads, with the function of Spark's own package, in a session of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from bench.peer.fetch import PACKAGES_FOLDER, fetch

pytestmark = [pytest.mark.spark, pytest.mark.thorough, pytest.mark.timeout(900)]


def test_avro_bodies_become_columns_and_a_bad_one_is_a_dead_letter(tmp_path: Path) -> None:
    """In its mode PERMISSIVE ``from_avro`` returns a struct of nulls for a bad body, not null."""
    if (reason := fetch("spark-avro", "Spark's package for Avro")) is not None:
        pytest.skip(reason)
    (jar,) = (PACKAGES_FOLDER / "spark-avro").glob("spark-avro*.jar")
    command = [sys.executable, "-m", "tests.spark.listening.avro_program", str(tmp_path), str(jar)]

    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3])

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"rows": [[7, "eu"], [8, "us"]], "dead": ["ff"]}
