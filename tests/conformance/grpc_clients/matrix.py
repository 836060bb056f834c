"""The matrix of RocketMQ's gRPC clients: what each can do with each server, as the tests found it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum
from pathlib import Path

from tests.conformance.grpc_clients.accounts import USERS
from tests.conformance.grpc_clients.programs import CLIENTS
from tests.conformance.grpc_clients.servers import SERVERS

PAGE = Path(__file__).parents[3] / "docs" / "compare" / "grpc-clients.md"
"""Page with the table."""

CELLS = {
    "normal": "a message with tag, keys and a property",
    "fifo": "messages of a group in order",
    "delay": "delay by time",
    "level": "delay by level",
    "transaction": "transactions: commit, rollback, check",
    "simple": "simple consumer: acknowledge, expire",
    "change": "simple consumer: change the invisible time",
    "push": "push consumer: retries, dead letter",
    "tags": "selection by tags",
    "sql": "selection by SQL92",
    "recall": "recall of a delayed message",
    "tls": "TLS",
    **{user: f"access control: {user}" for user in USERS},
}
"""Name of a cell -> its title, in the order of the table."""

_TITLES = ["Client", "Case", "mqtemplate", "RocketMQ, LOCAL", "RocketMQ, CLUSTER", "Why"]
_BEGIN, _END = "<!-- written by the tests: begin -->", "<!-- end -->"
_UNKNOWN = "not run"


class Result(Enum):
    """What a client does in a cell."""

    PASSES = "passes"
    FAILS = "fails, as expected"
    FAILED = "FAILED"


class Matrix:
    """Results of a run."""

    def __init__(self) -> None:
        self._results: dict[tuple[str, str, str], str] = {}

    def __bool__(self) -> bool:
        return bool(self._results)

    def add(self, client: str, cell: str, server_name: str, result: Result) -> None:
        """Add a result. If there are several, the worst is kept."""
        key = (client, cell, server_name)
        order = [each.value for each in Result]
        self._results[key] = max(self._results.get(key, result.value), result.value, key=order.index)

    def lines(self) -> list[str]:
        """Return the rows of the clients that have run, in columns."""
        clients = [name for name in CLIENTS if any(client == name for client, _, _ in self._results)]
        rows = [_TITLES[:-1], *(row[:-1] for row in _rows(self._results, clients))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]

    def written_to(self, page: str) -> str:
        """Return a page whose table has the results of this run. Where it has none, the table keeps its own."""
        rows = _rows(results_of(page) | self._results, list(CLIENTS))
        table = ["|".join(("", *(f" {text} " for text in row), "")) for row in [_TITLES, *rows]]
        table.insert(1, "|" + "---|" * len(_TITLES))
        return _table(page, "\n".join(table))


def _table(page: str, table: str) -> str:
    head, _, rest = page.partition(_BEGIN)
    return f"{head}{_BEGIN}\n\n{table}\n\n{_END}{rest.partition(_END)[2]}"


def _rows(results: dict[tuple[str, str, str], str], clients: Sequence[str]) -> list[list[str]]:
    """Return the rows of clients, one for each cell, without the titles."""
    rows = []
    for name in clients:
        client = CLIENTS[name]
        for cell, title in CELLS.items():
            if lacks := client.missing(cell):
                found = ["the client lacks it"] * len(SERVERS)
            else:
                found = [results.get((name, cell, server), _UNKNOWN) for server in SERVERS]
            reasons = {lacks} | {client.failure(cell, server) for server in SERVERS}
            rows.append([client.package, title, *found, "; ".join(sorted(reasons - {""}))])
    return rows


def results_of(page: str) -> dict[tuple[str, str, str], str]:
    """Return the results that the table of a page has."""
    packages = {client.package: name for name, client in CLIENTS.items()}
    cells = {title: cell for cell, title in CELLS.items()}
    known = {result.value for result in Result}
    results = {}
    for row in re.findall(r"^\| (.+) \|$", page, re.MULTILINE):
        package, title, *found = row.split(" | ")
        if package in packages and title in cells:
            for server, text in zip(SERVERS, found, strict=False):
                if text in known:
                    results[packages[package], cells[title], server] = text
    return results
