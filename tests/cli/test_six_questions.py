"""The questions of an operator on duty: each is answered by one or two commands."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.cli.commands.delayed import DueOptions
from mqtemplate.clock import SystemClock, VirtualClock
from mqtemplate.message import Message, Property
from mqtemplate.operations.bulk import DAY_MS, yesterday_of
from mqtemplate.pending import PendingQuery
from tests.cli.running import CommandLine
from tests.operations.brokers import HOUR_MS

pytestmark = pytest.mark.feature("14.5")


def test_why_a_message_is_late(on_folder: CommandLine) -> None:
    found = on_folder.json("why", "due-30")

    assert "still pending, due in 1d" in found["findings"][0]["text"]


def test_what_falls_due_tonight(thursday: int) -> None:
    query = DueOptions(after="tonight", before="tonight").query(thursday)

    def local(day: int, hour: int) -> int:
        return round(datetime(2026, 1, day, hour).astimezone().timestamp() * 1_000)

    assert query == PendingQuery(after_ms=local(29, 18), before_ms=local(30, 6))


def test_who_is_behind_is_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their times are sorted as times: 9s come after 10m."""
    clock = VirtualClock()
    with EmbeddedBroker(tmp_path / "store", clock=clock) as broker:
        for group in ("slow", "new"):
            broker.sends.send(Message(f"of-{group}", b"x"))
            for queue in broker.queues(f"of-{group}"):
                broker.groups.commit_offset(group, queue, 0)
            clock.set_ms(clock.now_ms() + 10 * 60_000)
    run = CommandLine(f"embedded:{tmp_path / 'store'}", tmp_path, capsys)

    found = run.json("groups", "--sort=-behind")

    assert [each["name"] for each in found] == ["slow", "new"]


def test_dead_letters_of_yesterday_are_sent_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of all groups, each with its preview; the others stay."""
    start_ms, end_ms = yesterday_of(SystemClock().now_ms())
    clock = VirtualClock(start_ms - DAY_MS)
    with EmbeddedBroker(tmp_path / "store", clock=clock) as broker:
        for name, time_ms in (("early", start_ms - HOUR_MS), ("in", start_ms + HOUR_MS), ("today", end_ms + 1)):
            clock.set_ms(time_ms)
            for group in ("billing", "mail"):
                origin = {Property.DLQ_ORIGIN_TOPIC: "orders", Property.ORIGIN_MESSAGE_ID: "x"}
                broker.sends.send(Message(f"%DLQ%{group}", b"x", {Property.KEYS: f"{group}-{name}", **origin}))
    run = CommandLine(f"embedded:{tmp_path / 'store'}", tmp_path, capsys)

    groups = run.json("dlq", "ls")
    refused = run("dlq", "resend", "--since", "yesterday", "--until", "yesterday")
    sent = run.ok("dlq", "resend", "--since", "yesterday", "--until", "yesterday", "--yes")

    assert [(each["group"], each["open"], each["yesterday"]) for each in groups] == [("billing", 3, 1), ("mail", 3, 1)]
    assert (refused.code, "group billing:" in refused.errors, "1 dead letter" in refused.errors) == (2, True, True)
    assert sent.output == "sent 1 messages to orders\n" * 2
    assert [each["keys"] for each in run.json("messages", "orders")] == ["billing-in", "mail-in"]
    assert [each["keys"] for each in run.json("dlq", "ls", "mail")] == ["mail-early", "mail-today"]


def test_all_of_a_tenant_are_cancelled(run: CommandLine) -> None:
    for key, tenant in (("t-1", "T"), ("u-1", "U"), ("t-2", "T")):
        run.ok("send", "reminders", "x", "--delay", "3h", "--key", key, "--property", f"tenant={tenant}")

    shown = run("delayed", "purge", "--property", "tenant=T", "--dry-run", "--json")
    done = run.json("delayed", "purge", "--property", "tenant=T", "--yes")

    assert [each["keys"] for each in shown.json] == ["t-1", "t-2"]
    assert done["counts"] == {"cancelled": 2}
    assert run.json("delayed", "ls", "--property", "tenant=T") == []
    assert [each["keys"] for each in run.json("delayed", "ls", "--property", "tenant=U")] == ["u-1"]
    assert run.json("delayed", "histogram", "--property", "tenant=U")["total"] == 1


@pytest.mark.parametrize("text", ["tenant", "=T", "tenant="])
def test_a_property_needs_its_value(on_folder: CommandLine, text: str) -> None:
    result = on_folder("delayed", "purge", f"--property={text}", "--yes")

    assert result.code == 2
    assert f"a property must be name=value, such as tenant=T, got '{text}'" in " ".join(result.errors.split())


def test_a_message_is_named_by_the_beginning_of_its_id(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Several are listed. A pending one is changed after a question, since a key may look like an id."""
    ids = {name: name + "0" * 24 for name in ("AAAA1111", "AAAA2222", "BBBB1111", "CCCC1111")}
    with EmbeddedBroker(tmp_path / "store") as broker:
        for name, msg_id in ids.items():
            delay = {} if name.startswith("A") else {Property.TIMER_DELAY_MS: str(30 * DAY_MS)}
            broker.sends.send(Message("orders", name.encode(), {Property.UNIQ_KEY: msg_id, **delay}))
    run = CommandLine(f"embedded:{tmp_path / 'store'}", tmp_path, capsys)

    assert run.json("messages", "--id", "aaaa11")["body"] == "AAAA1111"
    assert run.json("why", "BBBB11")["msg_id"] == ids["BBBB1111"]
    assert [each["body"] for each in run.json("delayed", "show", "CCCC1111")] == ["CCCC1111"]
    asks, too_short = run("delayed", "cancel", "BBBB1111"), run("why", "AAAA1")
    assert (asks.code, "Cancel 1 pending message?" in asks.errors) == (2, True)
    assert (too_short.code, "no message with the id, handle or key 'AAAA1'" in too_short.errors) == (3, True)


def test_several_ids_with_one_beginning_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = ["ABCDEF01" + "0" * 24, "ABCDEF02" + "0" * 24]
    with EmbeddedBroker(tmp_path / "store", clock=VirtualClock()) as broker:
        for msg_id in ids:
            broker.sends.send(Message("orders", b"x", {Property.UNIQ_KEY: msg_id}))
            broker.sends.send(Message("%DLQ%billing", b"x", {Property.UNIQ_KEY: msg_id}))
    run = CommandLine(f"embedded:{tmp_path / 'store'}", tmp_path, capsys)

    found = [run("messages", "--id", "ABCDEF0"), run("why", "ABCDEF0"), run("dlq", "show", "billing", "ABCDEF0")]

    text = f"2 ids begin with 'ABCDEF0': {ids[0]}, {ids[1]}; give more of one"
    assert [(each.code, text in each.errors) for each in found] == [(3, True)] * 3
    assert run.json("dlq", "show", "billing", "ABCDEF01")["msg_id"] == ids[0]
