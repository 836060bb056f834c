"""``dlq``: list, show, diff, edit, resend, purge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cli.running import CommandLine


def letters(run: CommandLine, *options: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = run.json("dlq", "ls", "billing", *options)
    return found


def test_groups_with_dead_letters_are_listed(run: CommandLine) -> None:
    assert run.json("dlq", "ls") == [{"group": "billing", "count": 3}]


def test_dead_letters_have_their_cause(run: CommandLine) -> None:
    found = letters(run)

    assert [each["keys"] for each in found] == ["order-0", "order-1", "order-2"]
    assert {each["cause"] for each in found} == {"shop.CardRefusedError: card 4466 expired"}
    assert {(each["attempts"], each["state"], each["origin_topic"]) for each in found} == {(17, "open", "orders")}
    assert "shop.CardRefusedError" in run.ok("dlq", "ls", "billing").output


@pytest.mark.parametrize(
    ("options", "count"),
    [
        (["--cause", "cardrefused"], 3),
        (["--cause", "TimeoutError"], 0),
        (["--key", "order-1"], 1),
        (["--tag", "open"], 2),
        (["--topic", "orders", "--since", "1h"], 3),
        (["--topic", "others"], 0),
        (["--until", "1h"], 0),
        (["--max-count", "2"], 2),
    ],
)
def test_filters(on_folder: CommandLine, options: list[str], count: int) -> None:
    assert len(letters(on_folder, *options)) == count


def test_a_dead_letter_is_shown_by_its_id_or_that_of_its_message(run: CommandLine) -> None:
    [letter] = letters(run, "--key", "order-1")

    for letter_id in (letter["id"], letter["msg_id"]):
        assert run.json("dlq", "show", "billing", letter_id)["body"] == '{"number": 1}'
    shown = run.ok("dlq", "show", "billing", letter["id"]).output
    assert "File shop.py, line 7" in shown
    assert '"number": 1' in shown


def test_unknown_names_end_with_code_3(run: CommandLine) -> None:
    unknown_group, unknown_letter = run("dlq", "ls", "biling"), run("dlq", "show", "billing", "nothing")

    assert (unknown_group.code, unknown_letter.code) == (3, 3)
    assert "did you mean 'billing'?" in unknown_group.errors
    assert "group 'billing' has no dead letter 'nothing'; list them with: dlq ls billing" in unknown_letter.errors


def test_a_dead_letter_is_compared_with_the_message_that_failed(run: CommandLine) -> None:
    first, second, _ = letters(run)

    compared = run.json("dlq", "diff", "billing", first["id"])
    assert compared["same_body"]
    assert compared["before"]["topic"] == "orders"
    assert compared["properties"]["dead_letter_exception"] == {"before": None, "after": "shop.CardRefusedError"}
    assert "KEYS" not in compared["properties"]
    text = run.ok("dlq", "diff", "billing", first["id"], second["id"]).output
    assert '-  "number": 1' in text
    assert '+  "number": 0' in text


# --- resend -------------------------------------------------------------------------------------


def test_a_dead_letter_is_sent_to_its_original_topic_again(run: CommandLine) -> None:
    letter = letters(run)[0]

    [sent] = run.json("dlq", "resend", "billing", letter["id"], "--yes")

    found = run.json("messages", "orders", "--key", "order-0")
    assert sent["topic"] == "orders"
    assert [each["body"] for each in found] == ['{"number": 0}'] * 2
    resent = max(found, key=lambda each: each["store_timestamp"])
    assert resent["msg_id"] == letter["msg_id"]
    assert resent["properties"]["dead_letter_resent_from"] == letter["id"]
    assert not [name for name in resent["properties"] if name.startswith(("dead_letter_ex", "DLQ_", "RETRY"))]


def test_resent_dead_letters_are_left_out_afterwards(run: CommandLine) -> None:
    preview = run.ok("dlq", "resend", "billing", "--all", "--dry-run")
    run.ok("dlq", "resend", "billing", "--key", "order-1", "--yes")
    second = run.ok("dlq", "resend", "billing", "--all", "--rate", "1000", "--yes")
    third = run.ok("dlq", "resend", "billing", "--all", "--yes")

    assert "3 dead letters match; nothing was changed" in preview.errors
    assert second.output == "sent 2 messages to orders\n"
    assert "0 dead letters match" in third.errors
    assert letters(run) == []
    assert {each["state"] for each in letters(run, "--all")} == {"resent"}
    assert run.json("topics", "orders")["message_count"] == 13


def test_only_the_group_may_get_a_message_again(run: CommandLine) -> None:
    letter = letters(run)[0]

    run.ok("dlq", "resend", "billing", letter["id"], "--only-group", "--yes")

    [retry] = run.json("messages", "%RETRY%billing")
    assert retry["properties"]["RETRY_TOPIC"] == "orders"
    assert run.json("topics", "orders")["message_count"] == 10


# --- edit and purge -----------------------------------------------------------------------------


def test_a_dead_letter_is_edited_and_sent(run: CommandLine, tmp_path: Path) -> None:
    first, second, _ = letters(run)
    (tmp_path / "new.json").write_text('{"number": 77}')

    options = ("--set", "region=eu", "--unset", "TAGS", "--yes")
    edited = run.ok("dlq", "edit", "billing", first["id"], "--body-file", str(tmp_path / "new.json"), *options)
    run.ok("dlq", "edit", "billing", second["id"], "--body", "plain", "--yes")

    found = run.json("messages", "orders", "--key", "order-0")
    new = next(each for each in found if each["body"] == '{"number": 77}')
    assert (new["tags"], new["properties"]["region"]) == (None, "eu")
    assert '+  "number": 77' in edited.errors
    assert "plain" in {each["body"] for each in run.json("messages", "orders", "--key", "order-1")}


def test_purged_dead_letters_are_left_out(run: CommandLine) -> None:
    purged = run.ok("dlq", "purge", "billing", "--key", "order-2", "--yes")
    run.ok("dlq", "purge", "billing", letters(run)[0]["id"], "--yes")

    assert purged.output == "purged 1 dead letters\n"
    assert [each["keys"] for each in letters(run)] == ["order-1"]
    assert sorted(each["state"] for each in letters(run, "--all")) == ["open", "purged", "purged"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["resend", "billing"], "give ids, or a filter such as --cause, or --all"),
        (["resend", "billing", "ID", "--all"], "give ids, or a filter such as --cause, or --all"),
        (["purge", "billing", "--all"], "Purge 3 dead letters? There is no terminal to ask on"),
        (["resend", "billing", "--all"], "Send 3 dead letters to their original topics again? There is no terminal"),
    ],
)
def test_wrong_arguments_end_with_code_2(on_folder: CommandLine, arguments: list[str], text: str) -> None:
    result = on_folder("dlq", *arguments)

    assert result.code == 2
    assert text in " ".join(result.errors.split())


def test_an_edit_without_a_terminal_needs_an_option(on_folder: CommandLine) -> None:
    letter_id = letters(on_folder)[0]["id"]

    neither = on_folder("dlq", "edit", "billing", letter_id)
    both = on_folder("dlq", "edit", "billing", letter_id, "--body", "x", "--body-file", "y")

    assert (neither.code, both.code) == (2, 2)
    assert "there is no terminal for an editor" in " ".join(neither.errors.split())
