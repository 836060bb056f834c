"""Times by name, the order of tables, and the completion of names."""

from __future__ import annotations

import threading
from datetime import datetime

import pytest
import typer
from typer.main import get_command

from mqtemplate.cli.commands import topics as _commands  # noqa: F401 - it adds its commands to the program
from mqtemplate.cli.formats import past_time
from mqtemplate.cli.invocation import TOP, completed
from mqtemplate.cli.output import Columns, Output, Shown
from mqtemplate.errors import UnknownNameError
from mqtemplate.operations.application import listeners_named
from mqtemplate.operations.bulk import named_time
from tests.cli.running import CommandLine
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.feature("14.5")


@pytest.mark.parametrize(
    ("text", "past", "future"),
    [
        ("20:00", "28 20:00", "29 20:00"),
        ("08:00", "29 08:00", "30 08:00"),
        ("tonight", "29 18:00", "29 18:00"),
        ("yesterday", "28 00:00", "28 00:00"),
        ("yesterday 20:00", "28 20:00", "28 20:00"),
        ("Tomorrow 7:30", "30 07:30", "30 07:30"),
        ("mon", "26 00:00", "02 00:00"),
        ("mon 09:00", "26 09:00", "02 09:00"),
        ("thu 13:00", "22 13:00", "29 13:00"),
        ("sunday", "25 00:00", "01 00:00"),
        ("tonight 02:00", "30 02:00", "30 02:00"),
        ("25:00", None, None),
        ("soon", None, None),
        ("next mon 09:00", None, None),
        ("", None, None),
    ],
)
def test_a_time_has_a_name(thursday: int, text: str, past: str | None, future: str | None) -> None:
    found = [named_time(text, thursday, sign) for sign in (-1, 1)]

    shown = [
        None if each is None else datetime.fromtimestamp(each / 1_000).astimezone().strftime("%d %H:%M")
        for each in found
    ]
    assert shown == [past, future]


def test_a_day_stands_for_its_end_where_an_end_is_asked_for(thursday: int, capsys: pytest.CaptureFixture[str]) -> None:
    """``--from yesterday --to yesterday`` is the whole day. What was understood is said with its zone."""
    for text in ("yesterday", "tonight", "mon"):
        past_time(text, thursday, f"--until {text}", is_end=True)
    past_time("tonight", round(datetime(2026, 1, 29, 2).astimezone().timestamp() * 1_000), "--since")

    assert capsys.readouterr().err.splitlines() == [
        "--until yesterday is 2026-01-29 00:00:00+01:00 (CET)",
        "--until tonight is 2026-01-30 06:00:00+01:00 (CET)",
        "--until mon is 2026-01-27 00:00:00+01:00 (CET)",
        "--since is 2026-01-28 18:00:00+01:00 (CET)",
    ]


ROWS = [{"name": "a", "lag": 9, "at": None}, {"name": "b", "lag": 10, "at": 3}, {"name": "c", "lag": 2, "at": 12}]
COLUMNS: Columns = {"NAME": "name", "LAG": "lag", "AT": Shown("at", lambda value: f"{value} ms")}


@pytest.mark.parametrize(
    ("sort", "order"),
    [("lag", "cab"), ("-lag", "bac"), ("-NAME", "cba"), ("at", "bca"), ("-at", "cba")],
)
def test_a_table_is_sorted_by_a_column(sort: str, order: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers as numbers; rows without a value are last."""
    Output(as_json=False, sort=sort).table(ROWS, COLUMNS, "none")

    assert "".join(line[0] for line in capsys.readouterr().out.splitlines()[1:]) == order


def test_a_column_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(typer.BadParameter) as raised:
        Output(as_json=False, sort="lga").table(ROWS, COLUMNS, "none")

    assert raised.value.message == "there is no column 'lga'; there is: name, lag, at"


def test_names_are_completed_from_the_broker(on_folder: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell asks with the options before the word; without a broker there is no name and no error."""
    monkeypatch.setattr("mqtemplate.cli.invocation._COMPLETION_S", PATIENCE_S)
    command = get_command(TOP).commands["topics"].commands["ls"]  # type: ignore[attr-defined]
    argument = next(each for each in command.params if each.param_type_name == "argument")

    def complete(name_server: str) -> list[str]:
        context = typer.Context(command)
        context.params = {"name_server": name_server, "config": str(on_folder.config)}
        return [each.value for each in argument.shell_complete(context, "or")]

    assert complete(on_folder.name_server) == ["orders"]
    assert complete("embedded:/nowhere/at-all") == []


def test_a_completion_that_takes_too_long_has_no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mqtemplate.cli.invocation._COMPLETION_S", 0.01)
    release = threading.Event()

    def read() -> list[str]:
        release.wait()
        return ["late"]

    assert completed("", read) == []
    release.set()


LISTENERS = [
    {"id": "shop.orders.bill", "group": "billing"},
    {"id": "shop.returns.bill", "group": "returns"},
    {"id": "shop.orders.ship", "group": "shipping"},
    {"id": "shop.orders.track", "group": "shipping"},
]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("shop.orders.bill", ["shop.orders.bill"]),
        ("ship", ["shop.orders.ship"]),
        ("returns.bill", ["shop.returns.bill"]),
        ("shipping", ["shop.orders.ship", "shop.orders.track"]),
    ],
)
def test_a_listener_is_named_by_the_end_of_its_id_or_by_its_group(name: str, found: list[str]) -> None:
    assert [each["id"] for each in listeners_named(LISTENERS, name)] == found


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("bill", "'bill' is the end of several ids: shop.orders.bill, shop.returns.bill; give more of one"),
        ("bil", "there is no listener 'bil'; there is: " + ", ".join(each["id"] for each in LISTENERS)),
    ],
)
def test_a_name_of_no_listener_or_of_several_is_an_error(name: str, text: str) -> None:
    with pytest.raises(UnknownNameError) as raised:
        listeners_named(LISTENERS, name)

    assert str(raised.value) == text
