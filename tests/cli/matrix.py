"""Every command of operators on one broker, for the table "What each command can do where" of docs/cli.md."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from mqtemplate import MQApplication
from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.copy import CopiedBroker
from mqtemplate.engine.settings import CopyOptions
from tests.cli import matrix_app
from tests.cli.running import CommandLine, Result, prepare
from tests.waiting import eventually

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
_TITLE = "### What each command can do where"
TOKEN = "t-0123456789abcde"
_MODULE = matrix_app.__name__


@dataclass(frozen=True)
class Place:
    """A broker, and what the commands need to know about it.

    Attributes:
        store: Its store directory.
        url: Actuator of an application on it.
        letters: Ids of dead letters of the group ``billing``.
    """

    run: CommandLine
    store: Path
    url: str
    letters: list[str] = field(default_factory=list)

    @property
    def token_file(self) -> Path:
        """File with the token of the application."""
        file = self.store.parent / "token"
        file.write_text(TOKEN, "utf-8")
        return file


Words = Callable[[Place], list[str]]


def _fixed(*words: str) -> Words:
    """Return the arguments of a command that takes ``--name-server``."""
    return lambda place: [*words, "--name-server", place.run.name_server]


def _letter(verb: str, index: int, *options: str) -> Words:
    def words(place: Place) -> list[str]:
        if not place.letters:
            place.letters.extend(each["id"] for each in place.run.json("dlq", "ls", "billing"))
        return ["dlq", verb, "billing", place.letters[index], *options, "--name-server", place.run.name_server]

    return words


def _newest_change(place: Place) -> str:
    result = place.run.plain("changes", "--json", "--config", str(place.run.config))
    return next(each["id"] for each in result.json if each["undo"] == "yes")


def _of_application(*words: str) -> Words:
    return lambda place: [*words, "--url", place.url, "--token-file", str(place.token_file)]


def _hand_over(verb: str, *options: str) -> Words:
    """Return the arguments of a command for the hand-over from a broker to a new directory."""

    def words(place: Place) -> list[str]:
        target = place.run.config / "target"
        if not target.exists():
            with EmbeddedBroker(target):
                pass
        return ["hand-over", verb, *options, "--from", place.run.name_server, "--to", f"embedded:{target}"]

    return words


def _copy(place: Place) -> str:
    """Return the place of a continuous copy of another directory."""
    copy = place.run.config / "copy"
    if not copy.exists():
        with CopiedBroker(place.run.config / "copied", None, None, copy=CopyOptions(to=f"file://{copy}")) as owner:
            prepare(owner)
    return f"file://{copy}"


COMMANDS: dict[str, Words] = {
    # in an order in which each finds its messages
    "status": _fixed("status"),
    "topics": _fixed("topics", "orders"),
    "groups": _fixed("groups", "billing"),
    "messages": _fixed("messages", "orders", "--key", "order-1"),
    "why": _fixed("why", "order-1"),
    "tail": _fixed("tail", "orders", "--from", "earliest", "--no-follow"),
    "delayed ls": _fixed("delayed", "ls", "--topic", "reminders"),
    "delayed show": _fixed("delayed", "show", "due-2"),
    "delayed histogram": _fixed("delayed", "histogram", "--topic", "reminders"),
    "delayed status": _fixed("delayed", "status"),
    "dlq ls": _fixed("dlq", "ls", "billing"),
    "dlq show": _letter("show", 0),
    "dlq diff": _letter("diff", 0),
    "offsets show": _fixed("offsets", "show", "billing", "orders"),
    "capabilities": lambda place: ["capabilities", place.run.name_server],
    "config show": _fixed("config", "show", "--origins"),
    "beans": _fixed("beans", _MODULE),
    "conditions": _fixed("conditions", _MODULE),
    "doctor": lambda place: ["doctor", str(place.store)],
    "simulate": lambda place: ["simulate", str(place.store), "--for", "3h"],
    # commands that change something
    "send": _fixed("send", "letters:paid", "hello", "--delay", "9h"),
    "delayed cancel": _fixed("delayed", "cancel", "due-1"),
    "delayed reschedule": _fixed("delayed", "reschedule", "due-2", "--to", "5h"),
    "delayed purge": _fixed("delayed", "purge", "--topic", "reminders", "--tag", "reminder", "--yes"),
    "dlq resend": _letter("resend", 0, "--yes"),
    "dlq edit": _letter("edit", 1, "--body", "changed", "--yes"),
    "dlq purge": _letter("purge", 2, "--yes"),
    "offsets reset": _fixed("offsets", "reset", "billing", "orders", "--to", "earliest", "--yes"),
    "offsets forget": _fixed("offsets", "forget", "billing", "--yes"),
    "topics create": _fixed("topics", "create", "refunds", "--queues", "2", "--type", "FIFO", "--yes"),
    "undo": lambda place: ["undo", _newest_change(place), "--yes", "--name-server", place.run.name_server],
    "bench": _fixed("bench", "--count", "20", "--topic", "bench"),
    # copies
    "backup": lambda place: ["backup", str(place.store), str(place.run.config / "backup")],
    "restore": lambda place: ["restore", _copy(place), str(place.run.config / "restored")],
    "copy ls": lambda place: ["copy", "ls", _copy(place)],
    "copy verify": lambda place: ["copy", "verify", _copy(place)],
    # commands for a running application on the broker
    "listeners ls": _of_application("listeners", "ls"),
    "listeners pause": _of_application("listeners", "pause", "book"),
    "listeners seek": _of_application("listeners", "seek", "book", "--to", "first", "--yes"),
    "listeners concurrency": _of_application("listeners", "concurrency", "book", "3"),
    "listeners resume": _of_application("listeners", "resume", "book"),
    "schedules ls": _of_application("schedules", "ls"),
    "schedules pause": _of_application("schedules", "pause", "report"),
    "schedules resume": _of_application("schedules", "resume", "report"),
    "schedules trigger": _of_application("schedules", "trigger", "report"),
    "topics delete": _fixed("topics", "delete", "reminders", "--yes"),
    # a hand-over to another directory
    "hand-over plan": _hand_over("plan"),
    "hand-over start": _hand_over("start", "--yes"),
    "hand-over status": _hand_over("status"),
    "hand-over pause": _hand_over("pause", "--yes"),
    "hand-over resume": _hand_over("resume", "--yes"),
    "hand-over run": _hand_over("run", "--yes"),
    "hand-over abort": _hand_over("abort", "--yes"),
}
_LINES = ("tail",)
"""Commands that write a JSON document for each line."""


def table() -> dict[str, dict[str, int]]:
    """Return the table of the page: command -> place -> exit code."""
    text = PAGE.read_text(encoding="utf-8").partition(_TITLE)[2]
    rows = [line for line in text.partition("\n## ")[0].splitlines() if line.startswith("|")]
    places = [cell.strip() for cell in rows[0].strip("|").split("|")][1:]
    found: dict[str, dict[str, int]] = {}
    for row in rows[2:]:
        first, *cells = [cell.strip() for cell in row.strip("|").split("|")]
        group, *verbs = re.findall(r"`([^`]+)`", first)
        names = [group, *(f"{group.split()[0]} {verb}" for verb in verbs)]
        for name in names:
            found[name] = dict(zip(places, map(_code, cells), strict=True))
    return found


def _code(cell: str) -> int:
    """Return the exit code that a cell announces: "yes", or "no: code 5"."""
    if cell.startswith("yes"):
        return 0
    found = re.fullmatch(r"no: code (\d+)", cell)
    assert found is not None, f"a cell is 'yes' or 'no: code N', got {cell!r}"
    return int(found[1])


def check(place: Place, column: str, only: Callable[[str], bool] = lambda _: True) -> None:
    """Run the commands with ``--json``, and compare their exit codes with a column of the table."""
    expected = {name: codes[column] for name, codes in table().items() if name in COMMANDS}
    results = {name: _run(place, name, words) for name, words in COMMANDS.items() if only(name)}
    assert {name: result.code for name, result in results.items()} == {name: expected[name] for name in results}, (
        results
    )
    for name, result in results.items():
        assert "Traceback" not in result.errors + result.output, (name, result)
        if result.code:
            assert re.search(r"(?:^|\n)error: [^\n]+\n$", result.errors), (name, result)
        elif name in _LINES:
            assert result.json_lines, (name, result)
        else:
            assert result.json is not None, (name, result)


def _run(place: Place, name: str, words: Words) -> Result:
    return place.run.plain(*words(place), "--json", "--config", str(place.run.config))


def is_of_application(name: str) -> bool:
    return name.startswith(("listeners", "schedules"))


@contextmanager
def application(name_server: str) -> Iterator[str]:
    """Run an application on a broker; yield the address of its actuator."""
    with ExitStack() as stack:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        management = {"enabled": True, "port": port, "token": TOKEN}
        settings: Mapping[str, object] = {"rocketmq.name-server": name_server} | {
            f"mqtemplate.management.{key}": value for key, value in management.items()
        }
        components = (matrix_app.book, matrix_app.report)
        app = stack.enter_context(MQApplication(*components, settings=settings, environment={}))
        eventually(app.containers[0].positions, "the listener has its queues", timeout_s=60)
        yield f"http://127.0.0.1:{port}"
