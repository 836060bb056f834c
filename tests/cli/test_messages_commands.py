"""``send``, ``tail`` and ``messages``."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from tests.cli.running import CommandLine

# --- send ---------------------------------------------------------------------------------------


def test_a_delayed_message_has_a_handle(run: CommandLine) -> None:
    [sent] = run.json("send", "reminders", "call back", "--delay", "3h", "--key", "later")

    [pending] = run.json("delayed", "show", sent["handle"])
    assert pending["keys"] == "later"
    assert 10_700_000 < pending["in_ms"] <= 10_800_000
    at_ms = pending["deliver_ms"] + 60_000
    [again] = run.json("send", "reminders", "call back", "--at", str(at_ms))
    assert run.json("delayed", "show", again["handle"])[0]["deliver_ms"] == at_ms


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


# --- tail ---------------------------------------------------------------------------------------


def test_tail_writes_a_json_document_a_line(run: CommandLine) -> None:
    shown = run.ok("tail", "orders", "--from", "earliest", "--no-follow", "--json").json_lines

    assert sorted(json.loads(each["body"])["number"] for each in shown) == list(range(10))


def test_tail_selects_by_sql92(on_folder: CommandLine) -> None:
    on_folder.ok("send", "orders", "big", "--property", "total=300")
    shown = on_folder.ok("tail", "orders", "--sql", "total > 200", "--no-follow", "--json").json_lines

    assert [each["body"] for each in shown] == ["big"]


# --- messages -----------------------------------------------------------------------------------


def test_a_message_is_shown_by_either_id(run: CommandLine) -> None:
    [message] = run.json("messages", "orders", "--key", "order-2")

    for msg_id in (message["msg_id"], message["offset_msg_id"]):
        assert run.json("messages", "--id", msg_id)["body"] == '{"number": 2}'
    shown = run.ok("messages", "--id", message["msg_id"]).output
    assert '"number": 2' in shown
    assert "KEYS=order-2" in shown


# --- pending keys ---------------------------------------------------------------------------------


def test_a_pending_key_replaces_keeps_or_refuses(run: CommandLine) -> None:
    """The result says what happened, and the list of pending messages shows the key."""
    key = ("--delay", "3h", "--pending-key", "cart-17")

    [first] = run.json("send", "carts", "2 books", *key)
    [second] = run.json("send", "carts", "3 books", *key)
    [kept] = run.json("send", "carts", "4 books", *key, "--on-pending", "keep")
    refused = run("send", "carts", "5 books", *key, "--on-pending", "refuse")

    assert (first["decision"], second["decision"], kept["decision"]) == ("stored", "replaced", "kept")
    assert second["replaced"] == [first["handle"]]
    assert kept["msg_id"] == second["msg_id"]
    assert refused.code != 0
    assert "with pending_key 'cart-17' is pending for topic 'carts'" in refused.errors
    [pending] = run.json("delayed", "ls", "--topic", "carts")
    assert (pending["msg_id"], pending["pending_key"]) == (second["msg_id"], "cart-17")
    assert "replaced" in run.ok("send", "carts", "6 books", *key).output


def test_a_pending_key_needs_a_delay_and_a_limit_needs_postpone(run: CommandLine) -> None:
    without_delay = run("send", "carts", "2 books", "--pending-key", "cart-17")
    without_postpone = run(
        "send", "carts", "2 books", "--delay", "1h", "--pending-key", "cart-17", "--no-later-than", "2h"
    )

    assert "needs a delay" in without_delay.errors
    assert "needs on_pending='postpone'" in without_postpone.errors
