"""Output of the command line to a terminal or a pipe: lines, tables, JSON, progress, exit codes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from io import StringIO
from types import EllipsisType
from typing import Any, TextIO, TypeAlias

from mqtemplate.errors import escaped
from mqtemplate.processes import discard_output, is_terminal, write_text


class ExitCode(IntEnum):
    """Exit codes of the command line; docs/cli.md has them too."""

    SUCCESS = 0
    FAILED = 1
    """The command failed: invalid settings, no connection, a full disk, a refused request."""
    USAGE = 2
    """The arguments are wrong, or a confirmation is missing."""
    UNKNOWN_NAME = 3
    """A topic, group or message does not exist, or nothing matches."""
    UNSUPPORTED = 4
    """This kind of broker does not support the operation."""
    IN_USE = 5
    """The command changes a store directory, and another process has it open."""
    DAMAGED = 6
    """``doctor`` has found damage."""
    INTERRUPTED = 130
    """Ctrl-C."""


Record: TypeAlias = Mapping[str, Any]
"""One row of a table, as JSON has it."""

Column: TypeAlias = str | Callable[[Record], object]
"""Key of a record, or function that returns the text of a cell."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A column whose text sorts in another order than its values."""

    key: str
    text: Callable[[Any], str]

    def __call__(self, record: Record) -> str:
        return self.text(record[self.key])


Columns: TypeAlias = Mapping[str, Column]
"""Title of a column -> its cells."""

_PIPE_WIDTH = 10_000


def terminal_text(text: str) -> str:
    """Return a text without characters that a terminal obeys, or does not show. A line feed and a tab stay.

    Messages, names and error texts come from others.
    """
    return escaped(text, keep="\n\t")


def json_text(value: object, indent: int | None = None) -> str:
    """Return a value as JSON for a terminal: JSON's own escapes stand for the characters that it must not get."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    return escaped(text, keep="\n", escape=lambda char: json.dumps(char)[1:-1])


def print_line(text: str, stream: TextIO | EllipsisType | None = ...) -> None:
    """Print a line and flush it. The default is standard output. None, as `sys.stderr` may be, takes no line.

    A server continues whatever happens to its output: a character that the terminal cannot show is escaped, and a
    stream that is closed, missing or full is ignored.
    """
    stream = sys.stdout if stream is ... else stream
    try:
        write_text(f"{terminal_text(text)}\n", stream)
    except OSError:
        discard_output(stream)


class Output:
    """Writes results to standard output, and all else to standard error.

    Args:
        as_json: Write results as JSON: one document for a command, or one line for each message of a stream.
        sort: Title of a column or key of a record by which tables are sorted, with a minus for the largest first.
    """

    def __init__(self, *, as_json: bool, sort: str | None = None) -> None:
        self.as_json = as_json
        self._sort = sort

    def line(self, text: str) -> None:
        """Write a line for a reader; with JSON nothing."""
        if not self.as_json:
            self._print(escaped(text))

    def note(self, text: str) -> None:
        """Write a line to standard error, for a reader; with JSON too."""
        print_line(escaped(text), sys.stderr)

    def document(self, value: object) -> None:
        """Write a JSON document; without JSON nothing."""
        if self.as_json:
            self._print(json_text(value, indent=2))

    def json_line(self, value: object) -> None:
        """Write one line of a stream of JSON documents."""
        self._print(json_text(value))

    def table(self, records: Sequence[Record], columns: Columns, empty: str) -> None:
        """Write records as a table, or as a JSON list.

        Args:
            columns: Title -> cell. Numbers are aligned right.
            empty: Text for no records.

        Raises:
            typer.BadParameter: There is no column with the title of ``--sort``.
        """
        if self._sort is not None and records:
            records = _sorted(records, columns, self._sort)
        self.document(list(records))
        if self.as_json:
            return
        if not records:
            self.note(empty)
            return
        self._print(_table_text(records, columns))

    def fields(self, record: Record, titles: Columns) -> None:
        """Write one record as lines ``title  value``, or as a JSON object. Empty values are left out."""
        self.document(record)
        if self.as_json:
            return
        cells = {title: _cell(record, column) for title, column in titles.items()}
        width = max(map(len, cells), default=0)
        for title, cell in cells.items():
            if cell not in (None, ""):
                indented = terminal_text(str(cell)).replace("\n", "\n" + " " * (width + 2))
                self._print(f"{title.ljust(width)}  {indented}")

    def _print(self, text: str) -> None:
        """Print a line. If the reader has closed the pipe, as ``head`` does, end the command without an error.

        Raises:
            SystemExit: Standard output takes no more. Code 1 if a result is lost, as on a full disk.
        """
        try:
            write_text(f"{text}\n", sys.stdout)
        except OSError as exc:
            discard_output(sys.stdout)
            if isinstance(exc, BrokenPipeError):
                raise SystemExit(0) from None
            print_line(f"error: standard output cannot be written: {exc.strerror or exc}", sys.stderr)
            raise SystemExit(1) from None

    @contextmanager
    def progress(self, text: str, total: int | None) -> Iterator[Callable[[int], None]]:
        """Show a progress bar on standard error inside the ``with`` block, if that is a terminal.

        Args:
            total: Number of steps; None if unknown.

        Returns:
            A function that is called with the number of steps done since the last call.
        """
        if not is_terminal(sys.stderr):
            yield lambda count: None
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task(text, total=total)
            yield lambda count: progress.advance(task, count)


def _table_text(records: Sequence[Record], columns: Columns) -> str:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    rows = [[_cell(record, column) for column in columns.values()] for record in records]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, title in enumerate(columns):
        is_number = all(isinstance(row[index], int | float) for row in rows)
        table.add_column(title, justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        # `Text` shows brackets in names and bodies as they are; a string would be markup.
        table.add_row(*(Text("" if cell is None else escaped(str(cell))) for cell in row))
    on_terminal = is_terminal(sys.stdout)
    console = Console(file=sys.stdout if on_terminal else StringIO(), width=None if on_terminal else _PIPE_WIDTH)
    with console.capture() as capture:
        console.print(table)
    lines = capture.get().splitlines()
    return "\n".join(lines if on_terminal else (line.rstrip() for line in lines))


def _sorted(records: Sequence[Record], columns: Columns, sort: str) -> list[Record]:
    """Return records in the order of a column. Empty cells are last."""
    from typer import BadParameter

    name = sort.removeprefix("-")
    by_title = {title.lower(): column for title, column in columns.items()}
    column = name if name in records[0] else by_title.get(name.lower().replace("_", " "))
    if column is None:
        titles = ", ".join(title.lower() for title in columns if title)
        raise BadParameter(f"there is no column {name!r}; there is: {titles}", param_hint="--sort")
    key: Column = column.key if isinstance(column, Shown) else column
    full: list[tuple[Any, Record]] = [
        (value, each) for each in records if (value := _cell(each, key)) not in (None, "")
    ]
    is_number = all(isinstance(value, int | float) for value, _ in full)
    full.sort(key=lambda pair: pair[0] if is_number else str(pair[0]), reverse=sort.startswith("-"))
    return [*(each for _, each in full), *(each for each in records if _cell(each, key) in (None, ""))]


def _cell(record: Record, column: Column) -> object:
    return record.get(column) if isinstance(column, str) else column(record)
