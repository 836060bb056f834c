"""``topics create`` and ``topics delete``: the preview, the question, the type of the messages, and the undo."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqtemplate.brokers import EmbeddedBroker
from tests.cli.running import CommandLine, place, prepare
from tests.cli.test_changes_commands import answer, change_id

pytestmark = pytest.mark.feature("14.1")


@pytest.fixture(params=["folder", "server"])
def run(
    request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[CommandLine]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with place(request.param, tmp_path, prepare) as name_server:
        yield CommandLine(name_server, tmp_path, capsys)


def names(run: CommandLine) -> list[str]:
    return [each["name"] for each in run.json("topics")]


def test_a_topic_is_created_without_a_question_and_the_undo_deletes_it(run: CommandLine) -> None:
    created = run.ok("topics", "create", "refunds", "--queues", "3")
    queues = run.json("topics", "refunds")["queue_count"]

    run.ok("undo", change_id(created), "--yes")

    assert "topic 'refunds' has 3 queues" in created.errors
    assert queues == 3
    assert "refunds" not in names(run)


def test_a_topic_is_created_for_one_type_of_messages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with place("folder", tmp_path, prepare) as name_server:
        run = CommandLine(name_server, tmp_path, capsys)

        run.ok("topics", "create", "refunds", "--type", "fifo")
        again = run("topics", "create", "refunds", "--type", "delay", "--queues", "9")
        wrong = run("topics", "create", "others", "--type", "lifo")

    with EmbeddedBroker(tmp_path / "store") as broker:
        config = broker.engine.topics.config("refunds")
    assert config is not None
    assert config["attributes"] == {"message.type": "FIFO"}
    assert again.code == 1
    assert "topic 'refunds' exists, and another type would make proxies refuse" in again.errors
    assert "mqadmin updateTopic -t refunds -a +message.type=DELAY" in again.errors
    assert "is not one of 'normal', 'fifo', 'delay', 'transaction', 'priority', 'mixed'" in " ".join(
        wrong.errors.lower().split()
    )


def test_a_topic_is_deleted_after_a_question_that_says_what_is_in_it(
    run: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = answer(monkeypatch, "n")
    refused = run("topics", "delete", "orders")
    kept = names(run)
    answer(monkeypatch, "y")

    deleted = run.ok("topics", "delete", "orders", "--json")

    assert questions == ["Delete topic 'orders' with 10 messages?"]
    assert (refused.code, "nothing was changed" in refused.errors, "orders" in kept) == (1, True, True)
    assert "by topic: orders 10" in refused.errors
    assert "These groups lose their offsets in it: billing." in refused.errors
    assert deleted.json == {"topic": "orders", "messages": 10, "changed": True}
    assert "orders" not in names(run)

    run.ok("undo", change_id(deleted), "--yes")
    assert run.json("topics", "orders")["queue_count"] == 2


def test_a_dry_run_changes_nothing(run: CommandLine) -> None:
    shown = run.ok("topics", "delete", "orders", "--dry-run")
    run.ok("topics", "create", "refunds", "--dry-run")

    assert "nothing was changed" in shown.errors
    assert names(run) == ["orders", "reminders"]


def test_a_topic_that_does_not_exist_is_not_deleted(run: CommandLine) -> None:
    result = run("topics", "delete", "order", "--yes")

    assert (result.code, result.errors) == (3, "error: topic 'order' does not exist; did you mean 'orders'?\n")


def test_shapes_of_releases_are_listed_with_their_topics(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = {"reminders": {"fair-by": "tenant", "max-rate": 500, "max-rate-per-key": 20}}
    (tmp_path / "application.yml").write_text(json.dumps({"mqtemplate": {"broker": {"topic-shapes": shapes}}}))
    with place("folder", tmp_path, prepare) as name_server:
        run = CommandLine(name_server, tmp_path, capsys)
        listed, shown, found = run.ok("topics").output, run.ok("topics", "reminders").output, run.json("topics")

    shape = "max-rate 500/s, fair-by tenant, max-rate-per-key 20/s"
    assert "RELEASES" in listed.splitlines()[0]
    assert shape in listed
    assert f"releases of delayed messages: {shape}" in shown
    assert [(each["name"], each["shape"]) for each in found] == [("orders", None), ("reminders", shape)]


def test_topics_without_shapes_have_no_column_for_them(run: CommandLine) -> None:
    assert "RELEASES" not in run.ok("topics").output


def test_a_topic_with_the_name_of_a_command_is_shown_by_ls(run: CommandLine) -> None:
    run.ok("topics", "create", "delete")

    assert run.json("topics", "ls", "delete")["name"] == "delete"
    assert run.json("topics", "orders")["name"] == "orders"
