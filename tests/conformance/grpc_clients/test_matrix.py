"""The table in the documentation has each client and case, and a run changes only what it has run."""

from __future__ import annotations

from tests.conformance.grpc_clients.matrix import CELLS, PAGE, Matrix, Result, results_of
from tests.conformance.grpc_clients.programs import CLIENTS
from tests.conformance.grpc_clients.servers import SERVERS


def test_the_page_has_each_client_and_case_with_its_reasons() -> None:
    page = PAGE.read_text(encoding="utf-8")

    assert Matrix().written_to(page) == page, "run the tests of tests/conformance/grpc_clients with REAL_ROCKETMQ=1"


def test_each_cell_of_the_page_passes_or_has_a_reason() -> None:
    results = results_of(PAGE.read_text(encoding="utf-8"))

    for name, client in CLIENTS.items():
        for cell in CELLS:
            for server in SERVERS:
                found = results.get((name, cell, server))
                expected = {Result.PASSES.value}
                if client.failure(cell, server):
                    expected.add(Result.FAILS.value)
                assert client.missing(cell) or found in expected, (name, cell, server, found)


def test_a_run_changes_its_own_cells_only() -> None:
    page = "# Title\n\n<!-- written by the tests: begin -->\n<!-- end -->\n\nThe end.\n"
    first, second = Matrix(), Matrix()
    first.add("java", "normal", "local", Result.PASSES)
    first.add("java", "fifo", "local", Result.FAILED)
    second.add("java", "fifo", "local", Result.PASSES)

    page = second.written_to(first.written_to(page))

    assert results_of(page) == dict.fromkeys(
        [("java", "normal", "local"), ("java", "fifo", "local")], Result.PASSES.value
    )
    assert page.startswith("# Title\n")
    assert page.endswith("\n\nThe end.\n")


def test_the_worst_result_of_a_cell_is_kept() -> None:
    """A test may fail in its call, and another one of the same cell may pass."""
    matrix = Matrix()
    matrix.add("java", "normal", "local", Result.FAILED)
    matrix.add("java", "normal", "local", Result.PASSES)

    assert "FAILED" in matrix.lines()[1]
    assert "passes" not in matrix.lines()[1]
