"""Changes of many messages by commands: the preview, the question, the audit log, ``changes`` and ``undo``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.cli.commands import delayed
from mqtemplate.message import Message, Property
from tests.cli.running import CommandLine, Result
from tests.operations.brokers import HOUR_MS, create_dead_letters, fill

pytestmark = pytest.mark.feature("14.1")

_COUNT = 107


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the audit log."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "mqtemplate"


def backlog_of(tmp_path: Path, capsys: pytest.CaptureFixture[str], times: int) -> CommandLine:
    """Return commands on a store folder with pending messages of one key, for three topics: 107 for each time."""
    with EmbeddedBroker(tmp_path / "store") as broker:
        topics = ["reminders"] * 80 * times + ["invoices"] * 24 * times + ["orders"] * 3 * times
        futures = []
        for number, topic in enumerate(topics):
            properties = {Property.KEYS: "4466", Property.TAGS: "trial" if number % 5 else "paid"}
            properties[Property.TIMER_DELAY_MS] = str(HOUR_MS + number)
            futures.append(broker.sends.send_async([Message(topic, b"x", properties)]))
        for each in futures:
            each.result()
    (tmp_path / "config").mkdir()
    return CommandLine(f"embedded:{tmp_path / 'store'}", tmp_path / "config", capsys)


@pytest.fixture
def backlog(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return backlog_of(tmp_path, capsys, 1)


def answer(monkeypatch: pytest.MonkeyPatch, text: str) -> list[str]:
    """Answer the questions on a terminal, and return them."""
    questions: list[str] = []

    def confirm(question: str, **_: Any) -> bool:
        questions.append(question)
        return text == "y"

    monkeypatch.setattr("mqtemplate.cli.invocation.is_terminal", lambda stream: True)
    monkeypatch.setattr("typer.confirm", confirm)
    return questions


def pending(run: CommandLine) -> int:
    return int(run.json("delayed", "histogram")["total"])


def change_id(result: Result) -> str:
    line = next(line for line in result.errors.splitlines() if line.startswith("this is change"))
    return line.split()[3]


# --- the question -------------------------------------------------------------------------------


def test_a_key_that_names_many_messages_is_shown_and_asked_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, state: Path
) -> None:
    backlog = backlog_of(tmp_path, capsys, 25)
    with monkeypatch.context() as terminal:
        questions = answer(terminal, "n")
        refused = backlog("delayed", "cancel", "4466")

    assert questions == ["Cancel 2,675 pending messages of 3 topics?"]
    assert (refused.code, pending(backlog)) == (1, 2_675)
    assert "  by topic: reminders 2,000, invoices 600, orders 75" in refused.errors
    assert "  by tag: trial 2,140, paid 535" in refused.errors
    assert "  due 20" in refused.errors
    assert "A cancelled message never comes back, but it can be undone in this way: copies with new" in refused.errors
    assert refused.errors.endswith("nothing was changed\n")
    assert not state.exists()


def test_dead_letters_of_several_groups_are_asked_about_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One answer stands for all groups: after a no, no group has changed."""
    with EmbeddedBroker(tmp_path / "store") as broker:
        fill(broker)
        for group in ("billing", "mails", "stock"):
            create_dead_letters(broker, group)
    (tmp_path / "config").mkdir()
    run = CommandLine(f"embedded:{tmp_path / 'store'}", tmp_path / "config", capsys)

    questions = answer(monkeypatch, "n")
    refused = run("dlq", "purge", "--all")
    kept = [len(run.json("dlq", "ls", group)) for group in ("billing", "mails", "stock")]
    answer(monkeypatch, "y")
    run.ok("dlq", "purge", "--all")

    assert questions == ["billing: Purge 3 dead letters; mails: Purge 3 dead letters; stock: Purge 3 dead letters?"]
    assert refused.errors.count("  by topic: orders 3") == 3
    assert refused.errors.endswith("nothing was changed\n")
    assert kept == [3, 3, 3]
    assert [len(run.json("dlq", "ls", group)) for group in ("billing", "mails", "stock")] == [0, 0, 0]


def test_without_a_terminal_a_change_of_many_needs_yes(backlog: CommandLine) -> None:
    refused = backlog("delayed", "cancel", "4466")
    shown = backlog.ok("delayed", "cancel", "4466", "--dry-run")

    assert refused.code == 2
    text = " ".join(refused.errors.split())
    assert "Cancel 107 pending messages of 3 topics? There is no terminal to ask on: add --yes, or --dry-run" in text
    assert "107 pending messages of 3 topics" in shown.errors
    assert pending(backlog) == _COUNT


def test_a_dry_run_shows_the_first_of_many(backlog: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delayed, "_MOST_SHOWN", 10)
    shown = backlog.ok("delayed", "cancel", "4466", "--dry-run")

    assert shown.output.count("4466") == 10
    assert "these are the first 10 of 107; see all with --json" in shown.errors


def test_many_messages_are_cancelled_and_come_back_as_copies(backlog: CommandLine, state: Path) -> None:
    done = backlog.ok("delayed", "cancel", "4466", "--yes")

    assert (done.output, pending(backlog)) == ("107 cancelled\n", 0)
    [started, succeeded] = [json.loads(line) for line in (state / "audit.jsonl").read_text("utf-8").splitlines()]
    assert (started["action"], started["name"], started["shown"]) == ("delayed.cancel", "4466", _COUNT)
    assert (succeeded["state"], succeeded["cancelled"]) == ("succeeded", _COUNT)
    assert started["broker"] == backlog.name_server
    assert len((state / started["old_file"]).read_text("utf-8").splitlines()) == _COUNT

    undone = backlog.ok("undo", change_id(done), "--yes")

    assert (undone.output, pending(backlog)) == ("sent 107 copies\n", _COUNT)
    again = backlog("undo", change_id(done), "--yes")
    assert again.code == 1
    assert f"cannot be undone: it was undone already, by change {change_id(undone)}" in again.errors


def test_one_message_that_is_named_is_changed_without_a_question(on_folder: CommandLine) -> None:
    done = on_folder.ok("delayed", "cancel", "due-1")

    assert done.output == "1 cancelled\n"
    assert "undo it with: mqtemplate undo " in done.errors


def test_a_message_is_sent_in_the_same_step_as_a_cancel(on_folder: CommandLine) -> None:
    then = ("--then", "mails:thanks", "invoice 1 is paid", "--then-delay", "1h", "--then-key", "invoice-1")

    done = on_folder.ok("delayed", "cancel", "due-1", *then)
    late = on_folder("delayed", "cancel", "due-1", *then)

    [pending] = on_folder.json("delayed", "ls", "--topic", "mails")
    assert (pending["tags"], pending["keys"]) == ("thanks", "invoice-1")
    assert done.output == f"1 cancelled\nsent {pending['msg_id']} to mails\n"
    assert late.code == 3
    assert "'due-1': no pending message was changed, its state is: cancelled" in late.errors


def test_of_many_cancelled_messages_the_preview_says_what_is_sent(backlog: CommandLine) -> None:
    then = ("--then", "mails", "all are cancelled")
    shown = backlog.ok("delayed", "cancel", "4466", *then, "--dry-run")
    done = backlog.json("delayed", "cancel", "4466", *then, "--yes")

    assert "What is sent is sent in the same step, and only if a message is cancelled." in shown.errors
    assert (done["count"], [each["topic"] for each in done["sent"]]) == (_COUNT, ["mails"])
    assert pending(backlog) == 0


def test_options_of_a_message_that_is_not_given_are_refused(on_folder: CommandLine) -> None:
    refused = on_folder("delayed", "cancel", "due-1", "--then-delay", "1h")

    assert refused.code == 2
    assert "it describes the message of --then; give that, too" in " ".join(refused.errors.split())


def test_a_reschedule_by_a_key_of_many_asks_too(backlog: CommandLine) -> None:
    refused = backlog("delayed", "reschedule", "4466", "--now")

    assert refused.code == 2
    assert "Deliver now 107 pending messages of 3 topics? There is no terminal" in " ".join(refused.errors.split())


# --- changes and undo ---------------------------------------------------------------------------


def test_offsets_are_reset_and_set_back(run: CommandLine) -> None:
    done = run.ok("offsets", "reset", "billing", "orders", "--to", "latest", "--yes")
    shown = run.ok("undo", change_id(done), "--dry-run")
    before = run.json("offsets", "show", "billing", "orders")
    undone = run.ok("undo", change_id(done), "--yes")

    assert [each["committed"] for each in before] == [5, 5]
    assert f"change {change_id(done)}: offsets.reset by " in shown.errors
    assert "0 messages are skipped, 4 are delivered again" in shown.errors
    assert undone.output.endswith("set 2 offsets of group 'billing'\n")
    assert [each["committed"] for each in run.json("offsets", "show", "billing", "orders")] == [3, 3]


def test_the_last_changes_are_listed_with_their_undo(on_folder: CommandLine) -> None:
    purged = on_folder.ok("dlq", "purge", "billing", "--all", "--yes")
    on_folder.ok("undo", change_id(purged), "--yes")
    sent = on_folder.ok("dlq", "resend", "billing", "--key", "order-1", "--yes")
    shown = on_folder.plain("changes", "--json", "--config", str(on_folder.config)).json

    assert [(each["action"], each["state"], each["messages"]) for each in shown] == [
        ("dead_letters.resend", "succeeded", 1),
        ("dead_letters.restore", "succeeded", 3),
        ("dead_letters.purge", "succeeded", 3),
    ]
    assert shown[0]["undo"] == "no: the messages were sent, and listeners may have handled them"
    assert shown[0]["target"] == "group=billing filter={'key': 'order-1'}"
    assert shown[2]["undo"].startswith("no: it was undone already, by change ")
    assert "undo it with" not in sent.errors


def test_a_change_that_is_not_in_the_log_and_one_of_another_broker(on_folder: CommandLine, tmp_path: Path) -> None:
    done = on_folder.ok("delayed", "cancel", "due-1")
    with EmbeddedBroker(tmp_path / "other"):
        pass
    unknown = on_folder("undo", "0123456789")
    elsewhere = CommandLine(f"embedded:{tmp_path / 'other'}", on_folder.config, on_folder._capsys)
    other = elsewhere("undo", change_id(done), "--yes")

    assert (unknown.code, "there is no change '0123456789' in " in unknown.errors) == (3, True)
    assert other.code == 3
    assert f"warning: it is a change of {on_folder.name_server}, and this is {elsewhere.name_server}" in other.errors
    assert "nothing is left to undo of change" in other.errors
    assert "1 of the messages cannot be restored: they are retries, or retention deleted them." in other.errors
