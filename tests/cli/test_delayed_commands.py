"""``delayed``: list, show, cancel, reschedule, purge, histogram."""

from __future__ import annotations

import pytest

from tests.cli.running import CommandLine

HOUR_MS = 3_600_000


def keys(records: list[dict[str, object]]) -> list[object]:
    return [record["keys"] for record in records]


def test_pending_messages_are_listed_by_deliver_time(run: CommandLine) -> None:
    text = run.ok("delayed", "ls").output.splitlines()

    assert keys(run.json("delayed", "ls")) == ["due-1", "due-2", "due-level", "due-30"]
    assert text[0].split() == ["DUE", "IN", "TOPIC", "TAG", "KEYS", "LEVEL", "SIZE", "ID"]
    assert len(text) == 5


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--key", "due-2"], {"due-2"}),
        (["--tag", "reminder"], {"due-1", "due-2", "due-30"}),
        (["--topic", "reminders", "--before", "90m"], {"due-1"}),
        (["--after", "3h"], {"due-30"}),
        (["--topic", "orders"], set()),
    ],
)
def test_filters(run: CommandLine, options: list[str], expected: set[str]) -> None:
    assert set(keys(run.json("delayed", "ls", *options))) == expected


def test_a_long_list_says_that_there_is_more(on_folder: CommandLine) -> None:
    result = on_folder.ok("delayed", "ls", "--max-count", "2", "--json")

    assert len(result.json) == 2
    assert "there are more than 2; see more with --max-count, or filter" in result.errors


def test_a_pending_message_is_shown_with_its_body(run: CommandLine) -> None:
    [timer] = run.json("delayed", "show", "due-2")
    [level] = run.json("delayed", "show", "due-level")

    assert (timer["body"], timer["delay_level"]) == ("in 2 hours", 0)
    assert (level["body"], level["delay_level"]) == ("by level", 18)
    assert "in 2 hours" in run.ok("delayed", "show", timer["handle"]).output


def test_a_message_is_cancelled_by_key_or_handle(run: CommandLine) -> None:
    [pending] = run.json("delayed", "show", "due-30")

    assert run.json("delayed", "cancel", "due-1") == {"status": "cancelled", "count": 1, "handles": []}
    assert run.ok("delayed", "cancel", pending["handle"]).output == "1 cancelled\n"
    assert set(keys(run.json("delayed", "ls"))) == {"due-2", "due-level"}


def test_a_missing_message_ends_with_code_3(run: CommandLine) -> None:
    for verb in (["show"], ["cancel"], ["reschedule", "--now"]):
        result = run("delayed", *verb, "nothing")
        assert result.code == 3, result
        assert "error: " in result.errors


def test_a_message_is_rescheduled(run: CommandLine) -> None:
    changed = run.json("delayed", "reschedule", "due-30", "--to", "5h")
    [pending] = run.json("delayed", "show", "due-30")

    assert changed["status"] == "rescheduled"
    assert changed["handles"] == [pending["handle"]]
    assert 4.9 * HOUR_MS < pending["in_ms"] <= 5 * HOUR_MS


def test_a_message_is_delivered_now(run: CommandLine) -> None:
    run.ok("delayed", "reschedule", "due-30", "--now")

    assert "due-30" not in keys(run.json("delayed", "ls", "--after", "1m"))


def test_many_messages_are_moved_after_a_preview(run: CommandLine) -> None:
    before = {each["keys"]: each["deliver_ms"] for each in run.json("delayed", "ls")}
    options = ("--tag", "reminder", "--before", "3h", "--shift", "30m")
    preview = run.json("delayed", "reschedule", *options, "--dry-run")
    changed = run.json("delayed", "reschedule", *options, "--yes")
    after = {each["keys"]: each["deliver_ms"] for each in run.json("delayed", "ls")}

    assert set(keys(preview)) == {"due-1", "due-2"}
    assert changed["counts"] == {"rescheduled": 2}
    moved = {key: after[key] - before[key] for key in after}
    assert moved == {"due-1": HOUR_MS // 2, "due-2": HOUR_MS // 2, "due-level": 0, "due-30": 0}


def test_one_message_is_moved_by_a_shift(on_folder: CommandLine) -> None:
    [before] = on_folder.json("delayed", "show", "due-2")
    on_folder.ok("delayed", "reschedule", "due-2", "--shift", "-30m", "--yes")

    [after] = on_folder.json("delayed", "show", "due-2")
    assert after["deliver_ms"] == before["deliver_ms"] - HOUR_MS // 2


def test_matching_messages_are_purged_after_a_preview(run: CommandLine) -> None:
    preview = run.ok("delayed", "purge", "--tag", "reminder", "--dry-run")
    purged = run.ok("delayed", "purge", "--tag", "reminder", "--rate", "1000", "--yes")

    assert "3 pending messages match; nothing was changed" in preview.errors
    assert purged.output == "3 messages: 3 cancelled\n"
    assert keys(run.json("delayed", "ls")) == ["due-level"]


def test_a_histogram_counts_by_time_span(run: CommandLine) -> None:
    counts = run.json("delayed", "histogram", "--by", "24h")
    drawn = run.ok("delayed", "histogram", "--topic", "reminders").output

    assert counts["total"] == 4
    assert sum(each["count"] for each in counts["buckets"]) == 4
    assert drawn.splitlines()[-1] == "4 messages"
    assert "#" * 40 in drawn


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["purge"], "give a filter such as --topic, or --all"),
        (["purge", "--all"], "Cancel 4 pending messages? There is no terminal to ask on"),
        (["reschedule", "due-1"], "give one of --to, --now and --shift"),
        (["reschedule", "--now"], "name one message, or move all that match with --shift"),
        (["reschedule", "due-1", "--to", "eventually"], "'eventually' is no time; give a duration (from now)"),
        (["histogram", "--by", "0s"], "it must be longer than 0"),
        (["histogram", "--by", "hour"], "a duration with units"),
    ],
)
def test_wrong_arguments_end_with_code_2(on_folder: CommandLine, arguments: list[str], text: str) -> None:
    result = on_folder("delayed", *arguments)

    assert result.code == 2
    assert text in " ".join(result.errors.split())
