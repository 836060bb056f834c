"""Each command of operators, and the dashboard, on Apache RocketMQ 5.5.0."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from mqtemplate.broker import ConsumerSpec
from mqtemplate.brokers import RemoteBroker, RemoteSettings
from mqtemplate.clock import SystemClock
from mqtemplate.console import Access, AuditLog, Dashboard, OpenSource
from mqtemplate.message import Message, Property
from mqtemplate.operations import BrokerAccess
from mqtemplate.selectors.tags import TagSelector
from tests.cli.running import CommandLine
from tests.conformance.servers import filled_rocketmq
from tests.console.pages import Answer, Shop
from tests.waiting import eventually

pytestmark = [pytest.mark.conformance, pytest.mark.thorough, pytest.mark.timeout(300)]


class Peer(NamedTuple):
    """A RocketMQ broker: the address of its name server, and its store directory."""

    address: str
    store: Path


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    """RocketMQ with the messages of the other tests of commands."""
    folder = tmp_path_factory.mktemp("rocketmq")
    with filled_rocketmq(folder) as address:
        yield Peer(address, folder / "store")


@pytest.fixture
def run(peer: Peer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(peer.address, tmp_path, capsys)


@pytest.mark.feature("14.2")
def test_the_dashboard_shows_and_changes_it(peer: Peer, tmp_path: Path) -> None:
    access, log = Access("token-0123456789abcde", allow_changes=True), AuditLog(None, SystemClock())
    settings = RemoteSettings(name_servers=(peer.address,), offset_path=tmp_path / "offsets")
    with RemoteBroker(settings) as client:
        source = OpenSource(BrokerAccess(client), "RocketMQ")
        pages = Dashboard(source, access=access, audit=log)
        shop = Shop(None, client, pages, tmp_path)  # type: ignore[arg-type]  # there is no application
        assert shop.get("/sign-in", token="token-0123456789abcde").status == 303
        due = {Property.TIMER_DELAY_MS: str(50 * 3_600_000), Property.KEYS: "of-the-dashboard"}
        sent = client.sends.send(Message("reminders", b"x", due))

        opened = {path: shop.page(path).status for path in ("/", "/topics", "/groups", "/levels", "/listeners")}
        group, topic = shop.page("/groups", name="billing"), shop.page("/topics", name="orders")
        messages = shop.page("/messages", topic="orders")
        letters = shop.page("/dead-letters", group="billing")
        eventually(lambda: "of-the-dashboard" in shop.page("/delayed/list").text, "the message is listed")
        message = eventually(lambda: _pending_page(shop, sent.msg_id), "the index has the message")
        preview = shop.post("/delayed/preview", message.form("/delayed/preview") | {"action": "cancel"})
        job = shop.change("/delayed/change", preview.form("/delayed/change"))
        job_id = job.html.partition('name="id" value="')[2].partition('"')[0]
        done = job if "succeeded" in job.text else eventually(lambda: _done(shop, job_id), "the change is done")
        pages.close()

    assert set(opened.values()) == {200}
    assert "4 lag" in group.text
    assert "10 messages" in topic.text
    assert "order-9" in messages.text
    assert "shop.CardRefusedError: card 4466 expired" in letters.text
    assert "1 cancelled" in done.text


def _pending_page(shop: Shop, msg_id: str) -> Answer | None:
    page = shop.get("/message", id=msg_id, topic="reminders")
    return page if page.status == 200 and "Pending: due" in page.text else None


def _done(shop: Shop, job_id: str) -> Answer | None:
    page = shop.page("/jobs", id=job_id)
    return page if "running" not in page.text else None


def test_topics_and_groups(run: CommandLine) -> None:
    topic = run.json("topics", "orders")
    groups = {each["name"]: each for each in run.json("groups")}

    assert topic["message_count"] == 10
    assert "billing" in topic["groups"]
    assert groups["billing"]["lag"] == 4
    assert "%DLQ%billing" in {each["name"] for each in run.json("topics", "--all")}
    assert run("topics", "order").code == 3
    assert run("groups", "biling").code == 3


def test_offsets_of_a_group_without_members(run: CommandLine) -> None:
    run.ok("offsets", "reset", "billing", "orders", "--to", "earliest", "--yes")
    first = [each["committed"] for each in run.json("offsets", "show", "billing", "orders")]
    run.ok("offsets", "reset", "billing", "orders", "--offset", "3", "--yes")

    assert first == [0, 0]
    assert [each["committed"] for each in run.json("offsets", "show", "billing", "orders")] == [3, 3]


def test_offsets_of_a_group_with_a_connected_member(run: CommandLine) -> None:
    with RemoteBroker(RemoteSettings(name_servers=(run.name_server,))) as client:
        member = client.groups.subscribe(ConsumerSpec(group="mailing", subscriptions={"orders": TagSelector()}))
        first: list[int] = []
        while len(first) < 10:
            first += [message.queue_offset for message in member.poll(32, 500)]
        for queue in client.queues("orders"):
            member.commit(queue, 5)
        members = eventually(lambda: run.json("groups", "mailing")["members"], "the member is listed")
        run.ok("offsets", "reset", "mailing", "orders", "--to", "earliest", "--yes")
        again: list[int] = []
        while len(again) < 10:
            again += [message.queue_offset for message in member.poll(32, 500)]
        member.close()

    assert len(members) == 1
    assert sorted(again) == sorted(first)


def test_messages_are_sent_tailed_and_found(run: CommandLine) -> None:
    [sent] = run.json("send", "letters:paid", "hello", "--key", "k-1", "--property", "region=eu")
    found = eventually(lambda: run.json("messages", "letters", "--key", "k-1"), "the message is in the index")
    shown = run.ok("tail", "letters", "--from", "earliest", "--no-follow", "--json").json_lines

    assert found[0]["msg_id"] == sent["msg_id"]
    assert [each["body"] for each in shown] == ["hello"]
    assert run.json("messages", "--id", sent["offset_msg_id"])["body"] == "hello"
    assert run.json("messages", "letters", "--from", "1h")[0]["tags"] == "paid"


def test_delayed_messages(run: CommandLine) -> None:
    listed = eventually(
        lambda: (found := run.json("delayed", "ls", "--topic", "reminders")) and len(found) == 4 and found,
        "RocketMQ has read its timers",
    )
    [shown] = run.json("delayed", "show", "due-2")
    histogram = run.json("delayed", "histogram", "--topic", "reminders")
    moved = run.json("delayed", "reschedule", "due-2", "--to", "5h")
    cancelled = run.json("delayed", "cancel", "due-1")
    by_level = run("delayed", "cancel", "due-level")

    assert {each["keys"] for each in listed} == {"due-1", "due-2", "due-30", "due-level"}
    assert shown["body"] == "in 2 hours"
    assert histogram["total"] == 4
    assert (moved["status"], cancelled["status"]) == ("rescheduled", "cancelled")
    assert by_level.code == 4, by_level  # RocketMQ cannot recall messages with a delay level
    purged = run.ok("delayed", "purge", "--topic", "reminders", "--yes")
    assert "2 cancelled, 1 that this broker cannot change" in purged.output


def test_dead_letters(run: CommandLine) -> None:
    first, second, third = run.json("dlq", "ls", "billing")

    [group] = run.json("dlq", "ls")
    assert {name: group[name] for name in ("group", "count", "open", "resent", "purged")} == {
        "group": "billing",
        "count": 3,
        "open": 3,
        "resent": 0,
        "purged": 0,
    }
    assert first["cause"] == "shop.CardRefusedError: card 4466 expired"
    assert run.json("dlq", "show", "billing", first["msg_id"])["body"] == '{"number": 0}'
    assert run.json("dlq", "diff", "billing", first["id"])["same_body"]
    run.ok("dlq", "resend", "billing", first["id"], "--only-group", "--yes")
    run.ok("dlq", "edit", "billing", second["id"], "--body", "changed", "--yes")
    run.ok("dlq", "purge", "billing", third["id"], "--yes")
    states = eventually(
        lambda: (
            (found := [each["state"] for each in run.json("dlq", "ls", "billing", "--all")])
            and "open" not in found
            and found
        ),
        "the marks are visible",
    )
    assert states == ["resent", "resent", "purged"]
    assert run.json("dlq", "ls", "billing") == []
    newest = run.ok("tail", "orders", "--last", "1", "--no-follow", "--json").json_lines
    assert newest[0]["body"] == "changed"


def test_capabilities_and_bench(run: CommandLine) -> None:
    capabilities = run.plain("capabilities", run.name_server, "--json").json
    measured = run.json("bench", "--count", "40", "--topic", "bench")

    assert "any delay or deliver time" in capabilities[run.name_server]
    assert measured["read_count"] == 40


def test_doctor_and_simulate_read_the_directory_of_a_running_broker(run: CommandLine, peer: Peer) -> None:
    report = run.plain("doctor", str(peer.store), "--json").json
    simulated = run.plain("simulate", str(peer.store), "--for", "48h", "--json")
    listed = run.plain("topics", "orders", "--name-server", f"embedded:{peer.store}", "--json").json

    assert (report["problem"], report["damages"], report["start"]) == (None, [], [])
    assert report["used_by"] is not None
    assert report["topics"]["orders"] >= 10
    assert listed["message_count"] == report["topics"]["orders"]
    assert simulated.code == 0, simulated
