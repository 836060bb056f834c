"""Servers for RocketMQ's gRPC clients, each started once, and the matrix of what the tests found."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator

import pytest

from tests.conformance.grpc_clients.matrix import PAGE, Matrix, Result
from tests.conformance.grpc_clients.programs import CLIENTS
from tests.conformance.grpc_clients.servers import OWN, SERVERS, GrpcServer
from tests.conformance.servers import REAL


@pytest.fixture(scope="session", params=SERVERS if os.environ.get(REAL) == "1" else [OWN])
def server_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def open_server(server_name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrpcServer]:
    """Server without access control. It accepts TLS, too."""
    start, _ = SERVERS[server_name]
    with start(tmp_path_factory.mktemp("open")) as server:
        yield server


@pytest.fixture(scope="session")
def guarded_server(server_name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrpcServer]:
    """Server with access control."""
    _, start = SERVERS[server_name]
    with start(tmp_path_factory.mktemp("guarded")) as server:
        yield server


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests here server by server, and client by client: otherwise each server is started several times."""

    def rank(item: pytest.Item) -> tuple[int, int]:
        params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        return _index(SERVERS, params.get("server_name")), _index(CLIENTS, params.get("client"))

    here = [item for item in items if item.nodeid.startswith("tests/conformance/grpc_clients/")]
    in_order = iter(sorted(here, key=rank))
    positions = set(here)
    items[:] = [next(in_order) if item in positions else item for item in items]


def _index(names: Iterable[str], name: str | None) -> int:
    """Return the position of a name, -1 without one."""
    return list(names).index(name) if name is not None else -1


# --- the matrix ----------------------------------------------------------------------------------------

_MATRIX = Matrix()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "cell(name): cell of the matrix of clients that the test shows; by default *user*"
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if isinstance(item, pytest.Function) and (marker := item.get_closest_marker("cell")):
        params = item.callspec.params
        name = marker.args[0] if marker.args else params["user"]
        report.user_properties.append(("cell", [params["client"], name, params["server_name"]]))
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    for name, value in report.user_properties:
        if name == "cell" and (result := _result(report)):
            _MATRIX.add(*value, result)


def _result(report: pytest.TestReport) -> Result | None:
    """Return what a report says on its cell. None: nothing, such as the report of a fixture, or without a toolchain."""
    if report.failed:
        return Result.FAILED
    if report.skipped:
        return Result.FAILS if hasattr(report, "wasxfail") else None
    return Result.PASSES if report.when == "call" else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the matrix, and write it to its page if the tests ran with RocketMQ's proxy, too."""
    if not _MATRIX:
        return
    terminalreporter.section("RocketMQ's gRPC clients")
    for line in _MATRIX.lines():
        terminalreporter.write_line(line)
    if os.environ.get(REAL) == "1":
        PAGE.write_text(_MATRIX.written_to(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        terminalreporter.write_line(f"written to {PAGE}")
