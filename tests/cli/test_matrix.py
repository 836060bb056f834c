"""What each command can do on a directory, on a directory in use, and on our server: the table of docs/cli.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqtemplate.brokers import EmbeddedBroker
from tests.cli.matrix import COMMANDS, PAGE, Place, application, check, is_of_application, table
from tests.cli.running import PATIENT, CommandLine, place, prepare
from tests.cli.test_dashboard_command import Client, base_of, dashboard
from tests.operations.brokers import server

pytestmark = pytest.mark.feature("14.1")


def test_the_table_has_each_command_that_works_on_a_broker() -> None:
    assert set(table()) == {*COMMANDS, "dashboard"}


def test_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with place("folder", tmp_path, prepare) as name_server:
        run = CommandLine(name_server, tmp_path, capsys)
        check(Place(run, tmp_path / "store", ""), "directory", lambda name: not is_of_application(name))
        with application(name_server) as url:
            check(Place(run, tmp_path / "store", url), "directory", is_of_application)


def test_a_directory_that_an_application_has_open(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Commands that read work on a snapshot; commands that change something are refused, and change nothing."""
    with EmbeddedBroker(tmp_path / "store") as owner:
        prepare(owner)
    name_server = f"embedded:{tmp_path / 'store'}"
    run = CommandLine(name_server, tmp_path, capsys)

    with application(name_server) as url:
        check(Place(run, tmp_path / "store", url), "directory in use")

        assert len(run.json("delayed", "ls", "--topic", "reminders")) == 4
        assert len(run.json("dlq", "ls", "billing")) == 3


def test_our_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "application.yml").write_text(PATIENT)
    with place("server", tmp_path, prepare) as name_server, application(name_server) as url:
        run = CommandLine(name_server, tmp_path, capsys)
        check(Place(run, tmp_path / "store", url), "our server")


@pytest.mark.slow
def test_the_dashboard_of_each_place(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path / "closed") as owner:
        prepare(owner)
    with server(tmp_path) as settings:
        places = {
            "directory": f"embedded:{tmp_path / 'closed'}",
            "directory in use": f"embedded:{tmp_path / 'store'}",
            "our server": settings.name_servers[0],
        }
        names = (("-n", f"{column.replace(' ', '-')}={name_server}") for column, name_server in places.items())
        with dashboard(*(word for name in names for word in name), "--config", str(tmp_path)) as link:
            client = Client()
            client.get(link)
            pages = {column: f"{base_of(link)}at/{column.replace(' ', '-')}/topics" for column in places}
            assert {column: client.get(page)[0] for column, page in pages.items()} == dict.fromkeys(places, 200)
        assert [table()["dashboard"][column] for column in places] == [0, 0, 0]


def test_no_mistake_of_a_user_shows_a_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each command without its arguments, with an unknown option, and on places that do not exist."""
    (tmp_path / "file").write_text("no directory")
    wrong = ["127.0.0.1:1", f"embedded:{tmp_path / 'missing'}", f"embedded:{tmp_path / 'file'}", "no address", "host:x"]
    for name, words in COMMANDS.items():
        results = [
            CommandLine("", tmp_path, capsys).plain(*name.split(), "--no-such-option"),
            CommandLine("", tmp_path, capsys).plain(*name.split(), *["x"] * 9),
        ]
        if not (is_of_application(name) or name.startswith(("dlq s", "dlq d", "dlq r", "dlq e", "dlq p"))):
            for name_server in wrong:
                run = CommandLine(name_server, tmp_path, capsys)
                given = words(Place(run, Path(name_server), ""))
                results.append(run.plain(*given, "--config", str(tmp_path)))
        for result in results:
            assert "Traceback" not in result.errors + result.output, (name, result)
            assert result.code in (0, 1, 2, 3, 4, 5, 6), (name, result)
            assert result.errors or result.code == 0, (name, result)


def test_the_page_of_the_table_explains_its_codes() -> None:
    codes = {code for row in table().values() for code in row.values()}

    assert all(f"| {code} |" in PAGE.read_text(encoding="utf-8") for code in codes)
