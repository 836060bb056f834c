"""The commands of golden scripts: what a command line writes, without what differs in each run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from tests.cli.running import Result

_MASKS = (
    # what differs in each run
    (r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d+)?([+-]\d\d:?\d\d|Z)?", "TIME"),
    (r"\b[0-9A-F]{32,}\b", "ID"),
    (r"\b[A-Za-z0-9_-]{60,}={0,2}", "HANDLE"),
    (r"\b[0-9a-f]{10}\b", "CHANGE"),  # before a span: one in a thousand ends with its only letter, a d
    (r"\b\d+(ms|[dhms])\b( \d+(ms|[dhms])\b)*", "SPAN"),
    (r"\d+\.\d+\.\d+\.\d+:\d+", "ADDRESS"),
    (r"(?<=\S)  +", "  "),
)


class Operator:
    """The commands of a script.

    A word ``@letter:KEY`` is the id of a dead letter, ``@message:KEY`` the id of its message, ``@handle:KEY`` the
    handle of a pending message, and ``@change`` the id of the last change.
    """

    def __init__(self, run: Callable[..., Result]) -> None:
        self._run = run
        self._change = ""

    def mq(self, *words: str, **options: str) -> list[str]:
        """Run a command: its lines, ``!`` for those to standard error, and its exit code if it is not 0."""
        result = self._result(words, options)
        lines = [f"! {line}" for line in _errors(result)] + result.output.splitlines()
        return [*_masked(lines), *([f"code {result.code}"] if result.code else [])]

    def pick(self, fields: str, *words: str, **options: str) -> list[str]:
        """Run a command with ``--json``: the values of some fields of each record, ``a.b`` for one that is inside."""
        result = self._result((*words, "--json"), options)
        assert result.code == 0, result
        found = result.json if isinstance(result.json, list) else [result.json]
        return _masked([" | ".join(_value(record, field) for field in fields.split(",")) for record in found])

    def first(self, *words: str, **options: str) -> list[str]:
        """Run a command: the first line of `mq`."""
        return self.mq(*words, **options)[:1]

    def _result(self, words: tuple[str, ...], options: dict[str, str]) -> Result:
        result = self._run(*map(self._named, words), *(f"{name}={value}" for name, value in options.items()))
        assert "Traceback" not in result.errors, result
        if (found := re.search(r"this is change (\w+)", result.errors)) is not None:
            self._change = found[1]
        return result

    def _json(self, *words: str) -> Any:
        return self._result((*words, "--json"), {}).json

    def _named(self, word: str) -> str:
        kind, _, key = word.partition(":")
        if kind == "@change":
            return self._change
        if kind == "@handle":
            return str(self._json("delayed", "show", key)[0]["handle"])
        if kind in ("@letter", "@message"):
            [found] = self._json("dlq", "ls", "billing", "--key", key, "--all")
            return str(found["id" if kind == "@letter" else "msg_id"])
        return word


def _errors(result: Result) -> list[str]:
    """Return the lines to standard error; of wrong arguments the text only, which is wrapped for the terminal."""
    if result.code != 2:
        return result.errors.splitlines()
    return [" ".join(result.errors.split()).rpartition("Error: ")[2]]


def _value(record: Any, field: str) -> str:
    for name in field.split("."):
        record = record[name]
    return record if isinstance(record, str) else json.dumps(record)


def _masked(lines: list[str]) -> list[str]:
    found = []
    for line in lines:
        for pattern, text in _MASKS:
            line = re.sub(pattern, text, line)
        found.append(line.rstrip())
    return [line for line in found if line]
