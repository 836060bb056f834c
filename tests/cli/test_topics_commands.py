"""``topics``, ``groups`` and ``offsets``."""

from __future__ import annotations

import pytest

from tests.cli.running import CommandLine


def test_topics_are_listed(run: CommandLine) -> None:
    listed = run.ok("topics").output.splitlines()
    as_json = {each["name"]: each for each in run.json("topics")}

    assert listed[0].split() == ["TOPIC", "KIND", "QUEUES", "MESSAGES", "LAST", "STORED"]
    assert next(line.split()[:4] for line in listed if line.startswith("orders")) == ["orders", "normal", "2", "10"]
    assert as_json["orders"]["message_count"] == 10
    assert as_json.keys() == {"orders", "reminders"}
    assert "%DLQ%billing" not in as_json
    assert "%DLQ%billing" in {each["name"] for each in run.json("topics", "--all")}


def test_a_topic_has_queues_and_groups(run: CommandLine) -> None:
    record = run.json("topics", "orders")

    assert record["groups"] == ["billing"]
    assert [(each["queue_id"], each["min_offset"], each["max_offset"]) for each in record["queues"]] == [
        (0, 0, 5),
        (1, 0, 5),
    ]
    assert "orders: 10 messages, groups: billing" in run.ok("topics", "orders").output


def test_an_unknown_topic_ends_with_code_3(run: CommandLine) -> None:
    result = run("topics", "order")

    assert (result.code, result.output) == (3, "")
    assert "error: topic 'order' does not exist; did you mean 'orders'?" in result.errors


def test_groups_have_their_lag(run: CommandLine) -> None:
    [record] = run.json("groups")

    assert (record["name"], record["lag"], record["members"]) == ("billing", 4, [])
    assert run.ok("groups").output.splitlines()[1].split()[:3] == ["billing", "0", "4"]


def test_a_group_has_its_queues(run: CommandLine) -> None:
    record = run.json("groups", "billing")
    text = run.ok("groups", "billing").output

    progress = [each for each in record["progress"] if each["topic"] == "orders"]
    assert [(each["committed"], each["max_offset"], each["lag"]) for each in progress] == [(3, 5, 2), (3, 5, 2)]
    assert "billing: lag 4, 0 members, not connected" in text


def test_offsets_are_shown(run: CommandLine) -> None:
    assert [each["committed"] for each in run.json("offsets", "show", "billing", "orders")] == [3, 3]


def test_offsets_are_reset_after_a_preview(run: CommandLine) -> None:
    preview = run.json("offsets", "reset", "billing", "orders", "--to", "earliest", "--dry-run")
    unchanged = run.json("offsets", "show", "billing", "orders")
    done = run.ok("offsets", "reset", "billing", "orders", "--to", "earliest", "--yes")

    assert [(each["before"], each["after"]) for each in preview] == [(3, 0), (3, 0)]
    assert [each["committed"] for each in unchanged] == [3, 3]
    assert "set 2 offsets of group 'billing'" in done.errors
    assert [each["committed"] for each in run.json("offsets", "show", "billing", "orders")] == [0, 0]


@pytest.mark.parametrize(
    ("options", "after"),
    [
        (["--to", "latest"], [5, 5]),
        (["--to", "1h"], [0, 0]),
        (["--to", "2020-01-31T08:00"], [0, 0]),
        (["--shift", "-1"], [2, 2]),
        (["--offset", "1", "--queue", "1"], [3, 1]),
    ],
)
def test_targets_of_a_reset(on_folder: CommandLine, options: list[str], after: list[int]) -> None:
    on_folder.ok("offsets", "reset", "billing", "orders", *options, "--yes")

    assert [each["committed"] for each in on_folder.json("offsets", "show", "billing", "orders")] == after


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ([], "give one of --to, --offset and --shift"),
        (["--to", "latest", "--shift", "1"], "give one of --to, --offset and --shift"),
        (["--to", "soon"], "'soon' is no time; give a duration (ago) such as 2h"),
        (["--to", "latest"], "There is no terminal to ask on: add --yes, or --dry-run"),
    ],
)
def test_wrong_arguments_of_a_reset_end_with_code_2(on_folder: CommandLine, options: list[str], text: str) -> None:
    result = on_folder("offsets", "reset", "billing", "orders", *options)

    assert result.code == 2
    assert text in " ".join(result.errors.split())
