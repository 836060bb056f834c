"""Messages of a hostile client in the lists of the command line: each row is shown, and none commands the terminal."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqtemplate.broker import Broker
from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.cli import output
from mqtemplate.converters.readable import pretty_body, time_text
from mqtemplate.errors import MessageError
from mqtemplate.message import Message, Property
from mqtemplate.pending import PendingQuery
from mqtemplate.topics import MARKS_TOPIC
from tests.cli.running import CommandLine, place
from tests.operations.brokers import CAUSE, HOUR_MS

NUMBERS = ["9" * 5_000, "9" * 18, "-9", "1e9", "1_000", " 7", "\u0663", "\u00b2", "NaN", "0x10", "+", "-", "\x1b[2J"]
"""Texts where a number is expected; `int` refuses the first one, and takes some that no other program writes."""

UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
ESCAPES = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202egnp.exe\u2066\u2028\x7f\r\b"
"""Clears the screen, sets the title, colours; changes the direction of text; new lines, backspaces."""


def prepare(broker: Broker) -> None:
    """Store a dead letter and a delayed message for each wrong number, and one whose texts are all escapes."""
    broker.create_topic("%DLQ%billing", 1)
    broker.create_topic(MARKS_TOPIC, 1)
    for body in (
        b"{",
        b"[]",
        b"[" * 100_000,
        b'{"state": "none", "ids": []}',
        b'{"state": "purged", "ids": [[1], {}]}',
    ):
        broker.sends.send(Message(MARKS_TOPIC, body, {Property.KEYS: "billing"}))
    for number, text in enumerate(NUMBERS):
        cause = CAUSE | {"dead_letter_attempts": text, "dead_letter_failed_at": text}
        keys = {Property.KEYS: f"letter-{number}", Property.RETRY_TOPIC: "orders"}
        broker.sends.send(Message("%DLQ%billing", b"x", cause | keys))
        due = {Property.TIMER_DELAY_MS: str(HOUR_MS), Property.KEYS: f"due-{number}"}
        names = (Property.UNIQ_KEY, Property.RECONSUME_TIME, Property.LEVEL_DELAY_MS)
        broker.sends.send(Message("reminders", b"later", due | dict.fromkeys(names, text)))
    texts = dict.fromkeys(("dead_letter_exception", "dead_letter_message", "custom"), ESCAPES + "\nID  forged")
    named = texts | {Property.KEYS: f"{ESCAPES} last", Property.TAGS: "[red]bold[/red]", Property.UNIQ_KEY: ESCAPES}
    broker.sends.send(Message("%DLQ%billing", ESCAPES.encode(), named | {Property.RETRY_TOPIC: "[link=x]y"}))
    broker.sends.send(Message("reminders", ESCAPES.encode(), named | {Property.TIMER_DELAY_MS: "1000000"}))
    broker.sends.send(Message("orders", ESCAPES.encode(), named))
    broker.sends.send(Message("orders", "caf\u00e9 \r\n\x1b[2J".encode(), {Property.TAGS: ESCAPES}))


@pytest.fixture(params=["folder", "server"])
def run(request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[CommandLine]:
    (tmp_path / "config").mkdir()
    with place(request.param, tmp_path, prepare) as name_server:
        yield CommandLine(name_server, tmp_path / "config", capsys)


def test_one_dead_letter_with_a_wrong_number_does_not_hide_the_others(run: CommandLine) -> None:
    """Its number of attempts is its number of deliveries; the group is listed with all of its letters.

    The topic of the marks has messages of another program, too.
    """
    found = {each["keys"]: each["attempts"] for each in run.json("dlq", "ls", "billing", "--max-count", "100")}

    assert len(found) == len(NUMBERS) + 1
    assert found["letter-0"] == found["letter-3"] == found["letter-6"] == 1
    assert run.ok("dlq", "ls", "billing", "--max-count", "100").output.count("\n") == len(NUMBERS) + 2


def test_one_delayed_message_with_a_wrong_number_does_not_hide_the_others(run: CommandLine) -> None:
    found = run.json("delayed", "ls", "--topic", "reminders", "--max-count", "100")

    assert {each["keys"] for each in found} >= {f"due-{number}" for number in range(len(NUMBERS))}


def test_pages_of_delayed_messages_go_on_behind_any_id(tmp_path: Path) -> None:
    """A producer chooses the id, which is part of the handle; the page that follows does not depend on it."""
    with EmbeddedBroker(tmp_path) as broker:
        prepare(broker)
        seen, cursor = [], None
        while True:
            page = broker.delayed.pending(PendingQuery(topic="reminders"), 1, cursor)
            seen += [each.keys for each in page.messages]
            cursor = page.cursor
            if cursor is None:
                break

        assert len(seen) == len(set(seen)) == len(NUMBERS) + 1
        for bad in ("9" * 5_000 + "-1", "\u00b2-1", "1", "--", "1-x"):
            with pytest.raises(MessageError, match="is not a cursor; pass PendingPage.cursor unchanged"):
                broker.delayed.pending(PendingQuery(), 1, bad)


COMMANDS = [
    ("dlq", "ls", "billing", "--max-count", "100"),
    ("dlq", "resend", "billing", "--all", "--dry-run"),
    ("dlq", "purge", "billing", "--all", "--dry-run"),
    ("delayed", "ls", "--max-count", "100"),
    ("delayed", "purge", "--topic", "reminders", "--dry-run"),
    ("delayed", "reschedule", "--topic", "reminders", "--shift", "1h", "--dry-run"),
    ("delayed", "histogram"),
    ("messages", "orders"),
    ("messages", "%DLQ%billing"),
    ("tail", "orders", "--from", "earliest", "--max-count", "2"),
    ("topics",),
    ("groups",),
]


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["text", "json"])
def test_no_command_prints_a_control_character_of_a_message(run: CommandLine, options: list[str]) -> None:
    """A terminal would obey them: they hide rows, forge output, or type commands."""
    for command in COMMANDS:
        result = run.ok(*command, *options)

        assert not UNSAFE.search(result.output + result.errors), command
        assert not any(line.startswith("ID  forged") for line in result.output.splitlines()), command


def test_one_message_is_shown_without_its_control_characters(run: CommandLine) -> None:
    """By its id, as dead letter, and as delayed message; markup in it is text."""
    for listed, shown in (
        (("messages", "orders"), ("messages", "--id")),
        (("dlq", "ls", "billing", "--max-count", "100"), ("dlq", "show", "billing")),
        (("delayed", "ls", "--topic", "reminders", "--max-count", "100"), ("delayed", "show")),
    ):
        for record in run.json(*listed):
            name = record.get("id") or record.get("offset_msg_id") or record["handle"]
            for options in ([], ["--json"]):
                result = run.ok(*shown, name, *options)
                assert not UNSAFE.search(result.output + result.errors)
    assert "[red]bold[/red]" in run.ok("messages", "orders").output


def test_an_error_text_is_escaped(run: CommandLine) -> None:
    """It may contain the answer of a server, or a name from a message."""
    result = run("messages", "--id", "A" + ESCAPES.replace(" ", ""))

    assert result.code == 3
    assert not UNSAFE.search(result.errors)


def test_escaped_text_shows_what_was_there() -> None:
    assert output.terminal_text("a\x1b[31m\n\tb\u202e\x9b") == "a\\x1b[31m\n\tb\\u202e\\x9b"
    assert output.escaped("a\nb\tc") == "a\\nb\\tc"
    assert (
        output.terminal_text("caf\u00e9 \u6771 \U0001f468\u200d\U0001f469")
        == "caf\u00e9 \u6771 \U0001f468\u200d\U0001f469"
    )
    value = {"a\x7f\x9b": "\u202e\u2028\x1b\ud800\n"}
    assert json.loads(output.json_text(value)) == value
    assert not UNSAFE.search(output.json_text(value))


@pytest.mark.parametrize(
    "body",
    [b"[" * 100_000, b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 20_000 + b"1" + b"}" * 20_000, b"[" * 60 + b"]" * 60],
    ids=["open", "closed", "objects", "60 levels"],
)
def test_deep_json_is_shown_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str], body: bytes) -> None:
    """To indent it would exceed the recursion limit, or take much more space than the body."""

    def send(broker: Broker) -> None:
        broker.sends.send(Message("orders", body, {Property.KEYS: "deep"}))

    with place("folder", tmp_path, send) as name_server:
        run = CommandLine(name_server, tmp_path, capsys)
        [record] = run.json("messages", "orders")
        assert body.decode() in run.ok("messages", "--id", record["msg_id"]).output
        assert run.json("messages", "--id", record["msg_id"])["body"] == body.decode()


def test_a_large_json_body_is_shown_as_it_is() -> None:
    body = json.dumps([[1] * 10] * 100_000).encode()

    assert pretty_body(body) == body.decode()
    assert pretty_body(b'{"a": [1]}') == '{\n  "a": [\n    1\n  ]\n}'


def test_a_time_that_no_calendar_has_is_shown_in_milliseconds() -> None:
    """A client writes the time of birth of a message."""
    assert time_text(10**17) == f"{10**17} ms"
    assert time_text(-(10**17)) == f"{-(10**17)} ms"
    assert time_text(10**400) == f"{10**400} ms"
