"""The notebook with the pending messages per minute: its cells run, and draw a picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.programs import run_python

ROOT = Path(__file__).parents[2]


@pytest.mark.spark
@pytest.mark.thorough
@pytest.mark.timeout(240)
def test_the_cells_count_all_pending_messages_and_draw_them(tmp_path: Path) -> None:
    notebook = json.loads((ROOT / "examples" / "pending_per_minute.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    program = "\n".join([*cells, "assert sum(counts) == 2_000"])

    run = run_python(tmp_path, "-c", program)

    assert run.returncode == 0, run.stdout + run.stderr
    assert (tmp_path / "out" / "pending_per_minute.svg").read_text().count("<rect") > 20
