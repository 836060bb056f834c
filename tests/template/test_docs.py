"""What the pages on transactions, requests and selectors show prints what they say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("page", ["transactions.md", "request-reply.md", "selectors.md"])
def test_the_example_of_the_page_prints_what_it_promises(page: str, tmp_path: Path) -> None:
    text = (DOCS / page).read_text("utf-8")
    [program, promised] = re.search(r"```python\n(.*?)```\n+```text\n(.*?)```", text, re.DOTALL).groups()  # type: ignore[union-attr]
    (tmp_path / "app.py").write_text(program, "utf-8")

    run = subprocess.run(
        [sys.executable, "-W", "error", "app.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )

    assert run.returncode == 0, run.stdout + run.stderr
    assert promised.strip() in run.stdout


def test_the_test_of_the_page_on_requests_passes(tmp_path: Path) -> None:
    program, test = re.findall(r"```python\n(.*?)```", (DOCS / "request-reply.md").read_text("utf-8"), re.DOTALL)
    declarations = program.partition("with MQApplication")[0]
    (tmp_path / "test_prices.py").write_text(declarations + test, "utf-8")

    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_prices.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )

    assert run.returncode == 0, run.stdout + run.stderr
