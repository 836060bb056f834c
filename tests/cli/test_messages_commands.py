"""``send``, ``tail`` and ``messages``."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from tests.cli.running import CommandLine

# --- send ---------------------------------------------------------------------------------------


def test_a_message_is_sent_with_tag_keys_and_properties(run: CommandLine) -> None:
    [sent] = run.json("send", "orders:paid", '{"id": 1}', "--key", "new-1", "--property", "region=eu")
    [found] = run.json("messages", "orders", "--key", "new-1")

    assert sent["send_status"] == "SEND_OK"
    assert (found["body"], found["tags"], found["msg_id"]) == ('{"id": 1}', "paid", sent["msg_id"])
    assert found["properties"]["region"] == "eu"


def test_a_delayed_message_has_a_handle(run: CommandLine) -> None:
    [sent] = run.json("send", "reminders", "call back", "--delay", "3h", "--key", "later")

    [pending] = run.json("delayed", "show", sent["handle"])
    assert pending["keys"] == "later"
    assert 10_700_000 < pending["in_ms"] <= 10_800_000
    at_ms = pending["deliver_ms"] + 60_000
    [again] = run.json("send", "reminders", "call back", "--at", str(at_ms))
    assert run.json("delayed", "show", again["handle"])[0]["deliver_ms"] == at_ms


def test_many_messages_are_sent(run: CommandLine) -> None:
    done = run.ok("send", "orders", "again", "--count", "25", "--hash-key", "7")

    assert done.output == "sent 25 messages to orders\n"
    assert run.json("topics", "orders")["message_count"] == 35


def test_bodies_come_from_a_file_or_from_lines(
    on_folder: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "body.bin").write_bytes(b"\x00\xff")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"first\n\nsecond\n")))

    on_folder.ok("send", "files", "--file", str(tmp_path / "body.bin"))
    on_folder.ok("send", "files", "--lines")

    found = on_folder.json("messages", "files")
    assert [each.get("body") for each in found] == [None, "first", "second"]
    assert found[0]["body_base64"] == "AP8="
    assert "2 bytes" in on_folder.ok("messages", "files").output


def test_the_first_message_may_create_a_store_directory(
    tmp_path: Path, on_folder: CommandLine, capsys: pytest.CaptureFixture[str]
) -> None:
    new = CommandLine(f"embedded:{tmp_path / 'new'}", tmp_path / "config", capsys)

    refused = new("topics")
    assert (refused.code, (tmp_path / "new").exists()) == (1, False)
    assert f"store directory '{tmp_path / 'new'}' does not exist" in refused.errors
    new.ok("send", "orders", "hello")
    assert [each["name"] for each in new.json("topics")] == ["orders"]


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["orders"], 2, "give the body as an argument, or --file, or --lines"),
        (["orders", "x", "--lines"], 2, "give the body as an argument, or --file, or --lines"),
        (["orders", "x", "--delay", "soon"], 2, "a duration with units, such as 90s"),
        (["orders", "x", "--property", "region"], 2, "'region' is not name=value"),
        (["orders", "--file", "/nowhere/at-all"], 2, "/nowhere/at-all cannot be read"),
        (["or ders", "x"], 1, "topic 'or ders' has characters that are not allowed"),
        (["orders", "x", "--level", "-1"], 1, "delay_level"),
        (["orders", "x", "--level", "3", "--delay", "1h"], 1, "two delays for one message"),
        (["SCHEDULE_TOPIC_XXXX", "x"], 1, "belongs to the broker"),
        (["orders", "x", "--rate", "0"], 1, "the rate must be above 0 per second"),
    ],
)
def test_mistakes_are_reported_without_a_traceback(
    on_folder: CommandLine, arguments: list[str], code: int, text: str
) -> None:
    result = on_folder("send", *arguments)

    assert result.code == code
    assert text in " ".join(result.errors.split())
    assert "Traceback" not in result.errors


# --- tail ---------------------------------------------------------------------------------------


def test_tail_shows_the_last_messages(run: CommandLine) -> None:
    shown = run.ok("tail", "orders", "--last", "4", "--no-follow").output.splitlines()

    assert len(shown) == 4
    assert '{"number": 9}' in shown[-1]


def test_tail_writes_a_json_document_a_line(run: CommandLine) -> None:
    shown = run.ok("tail", "orders", "--from", "earliest", "--no-follow", "--json").json_lines

    assert sorted(json.loads(each["body"])["number"] for each in shown) == list(range(10))


def test_tail_filters_and_ends_after_a_number_of_messages(run: CommandLine) -> None:
    by_tag = run.ok("tail", "orders", "--from", "earliest", "--tags", "paid", "--no-follow", "--json").json_lines
    by_key = run.ok("tail", "orders", "--from", "1h", "--key", "order-3", "--no-follow", "--json").json_lines
    limited = run.ok("tail", "orders", "--from", "earliest", "--max-count", "2", "--json").json_lines

    assert {each["tags"] for each in by_tag} == {"paid"}
    assert [each["keys"] for each in by_key] == ["order-3"]
    assert len(limited) == 2


def test_tail_selects_by_sql92(on_folder: CommandLine) -> None:
    on_folder.ok("send", "orders", "big", "--property", "total=300")
    shown = on_folder.ok("tail", "orders", "--sql", "total > 200", "--no-follow", "--json").json_lines

    assert [each["body"] for each in shown] == ["big"]


def test_tail_reads_dead_letter_topics(run: CommandLine) -> None:
    shown = run.ok("tail", "%DLQ%billing", "--from", "earliest", "--no-follow", "--json").json_lines

    assert len(shown) == 3


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        (["--tags", "a", "--sql", "b = 1"], 2, "give --tags or --sql, not both"),
        (["--sql", "total >"], 1, "SQL92 expression"),
        (["--tags", "a | b"], 1, "write 'a || b'"),
        (["--from", "never"], 2, "'never' is no time"),
    ],
)
def test_wrong_filters_are_reported(on_folder: CommandLine, options: list[str], code: int, text: str) -> None:
    result = on_folder("tail", "orders", *options)

    assert result.code == code
    assert text in " ".join(result.errors.split())


# --- messages -----------------------------------------------------------------------------------


def test_a_message_is_shown_by_either_id(run: CommandLine) -> None:
    [message] = run.json("messages", "orders", "--key", "order-2")

    for msg_id in (message["msg_id"], message["offset_msg_id"]):
        assert run.json("messages", "--id", msg_id)["body"] == '{"number": 2}'
    shown = run.ok("messages", "--id", message["msg_id"]).output
    assert '"number": 2' in shown
    assert "KEYS=order-2" in shown


def test_messages_are_found_by_time(run: CommandLine) -> None:
    assert len(run.json("messages", "orders", "--from", "1h")) == 10
    assert len(run.json("messages", "orders", "--from", "1h", "--max-count", "3")) == 3
    assert run.json("messages", "orders", "--to", "1h") == []
    assert run("messages", "orders", "--to", "1h").code == 3


def test_a_missing_message_ends_with_code_3(run: CommandLine) -> None:
    result = run("messages", "--id", "0" * 32)

    assert result.code == 3
    assert "is not in any topic; it was deleted, or the id is another one" in result.errors


def test_messages_needs_a_topic_or_an_id(on_folder: CommandLine) -> None:
    assert on_folder("messages").code == 2
