"""``doctor`` and ``simulate``: they read a store directory, and change nothing."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from mqtemplate.broker import ConsumerSpec
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import SystemClock, VirtualClock
from mqtemplate.message import Message, MessageQueue, Property
from mqtemplate.selectors.tags import TagSelector
from tests.cli.running import CommandLine, prepare

HOUR_MS = 3_600_000


def contents(folder: Path) -> dict[Path, tuple[int, bytes]]:
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    (tmp_path / "config").mkdir()
    return CommandLine("", tmp_path / "config", capsys)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with EmbeddedBroker(tmp_path / "store") as owner:
        prepare(owner)
    return tmp_path / "store"


def report_of(command_line: CommandLine, store: Path, code: int = 0) -> Any:
    before = contents(store)
    result = command_line.plain("doctor", str(store), "--json")
    assert result.code == code, result
    assert contents(store) == before
    return result.json


# --- doctor -------------------------------------------------------------------------------------


def test_a_closed_directory_is_reported(command_line: CommandLine, store: Path) -> None:
    report = report_of(command_line, store)

    assert (report["used_by"], report["was_closed"], report["is_damaged"]) == (None, True, False)
    assert report["topics"]["orders"] == 10
    assert report["groups"] == [{"name": "billing", "lag": 4}]
    assert {name: count for name, count in report["pending"].items() if count} == {
        "next hour": 1,
        "next day": 2,
        "next week": 1,
    }
    assert report["log"]["record_count"] >= 14
    assert {each["name"] for each in report["parts"]} >= {"commitlog", "consumequeue", "config", "index"}
    assert (report["start"], report["damages"]) == ([], [])
    text = command_line.plain("doctor", str(store)).output
    assert "no damage" in text
    assert "2 next day" in text


def test_a_directory_in_use_is_reported(command_line: CommandLine, tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path / "store") as owner:
        prepare(owner)
        report = command_line.plain("doctor", str(tmp_path / "store"), "--json").json

    assert report["used_by"] == str(os.getpid())
    assert (report["topics"]["orders"], report["start"], report["is_damaged"]) == (10, [], False)


def test_damage_is_reported_by_file_and_byte(command_line: CommandLine, store: Path) -> None:
    log = next((store / "commitlog").iterdir())
    at = log.read_bytes().index(b'{"number": 4}')
    with log.open("r+b") as file:
        file.seek(at)
        file.write(b"#")

    report = report_of(command_line, store, code=6)

    [damage] = report["damages"]
    assert damage["file"] == f"commitlog/{log.name}"
    assert damage["file_offset"] < at < damage["file_offset"] + damage["size"]
    assert not damage["is_tail"]
    assert report["start"] == [
        f"skip {damage['size']} damaged bytes of {damage['file']} from byte {damage['file_offset']} on"
    ]
    text = command_line.plain("doctor", str(store)).output
    assert f"DAMAGE: commitlog/{log.name} from byte {damage['file_offset']} on" in text


def test_an_incomplete_record_at_the_end_is_no_damage(command_line: CommandLine, store: Path) -> None:
    """A process that is killed while it writes leaves one. The abort file is there then."""
    log = next((store / "commitlog").iterdir())
    end = report_of(command_line, store)["log"]["end_offset"]
    (store / "abort").write_text("1 -")
    with log.open("r+b") as file:
        file.seek(end)
        file.write(b"\x00\x00\x01\x00\xda\xa3\x20\xa7 half of a record")

    report = report_of(command_line, store)

    assert [each["is_tail"] for each in report["damages"]] == [True]
    assert not report["was_closed"]
    assert report["start"][0].startswith("recover: the last owner did not close the directory; read ")
    assert report["start"][1] == f"cut off an incomplete record at the end of commitlog/{log.name}, byte {end}"


def test_a_directory_that_no_broker_can_open_is_damaged(command_line: CommandLine, store: Path) -> None:
    (store / "config" / "topics.json").write_text("no json")
    (store / "config" / "topics.json.bak").unlink(missing_ok=True)

    report = report_of(command_line, store, code=6)

    assert "config/topics.json is not JSON" in report["problem"]


def test_overdue_messages_are_announced(command_line: CommandLine, tmp_path: Path) -> None:
    clock = VirtualClock(SystemClock().now_ms() - 2 * HOUR_MS)
    with EmbeddedBroker(tmp_path / "store", clock=clock) as owner:
        owner.sends.send(Message("orders", b"late", {Property.TIMER_DELAY_MS: str(HOUR_MS)}))

    report = report_of(command_line, tmp_path / "store")

    assert report["pending"]["overdue"] == 1
    assert report["start"] == ["deliver 1 messages at once, which were due while no broker ran"]


def test_a_folder_that_is_no_store_is_an_error(command_line: CommandLine, tmp_path: Path) -> None:
    result = command_line.plain("doctor", str(tmp_path))

    assert result.code == 1
    assert "is not a store (it has no 'commitlog' or 'lock')" in result.errors


# --- repair -------------------------------------------------------------------------------------


def repaired(command_line: CommandLine, store: Path, *options: str) -> Any:
    copy = store.with_name("copy")
    return command_line.plain("doctor", str(store), "--repair", "--copy-to", str(copy), "--yes", *options)


def test_derived_files_are_rebuilt_and_a_copy_is_kept(command_line: CommandLine, store: Path) -> None:
    queue = next((store / "consumequeue" / "orders" / "0").iterdir())
    queue.write_bytes(bytes(100))  # it is cut, and its units are lost
    before = {path.relative_to(store): data for path, (_, data) in contents(store).items()}

    result = repaired(command_line, store, "--json")

    assert result.code == 0, result
    assert (result.json["topics"]["orders"], result.json["damages"]) == (10, [])
    assert sum(result.json["pending"].values()) == 4
    assert result.json["groups"] == [{"name": "billing", "lag": 4}]
    copied = {
        path.relative_to(store.with_name("copy")): data for path, (_, data) in contents(store.with_name("copy")).items()
    }
    assert copied == before


def test_a_damaged_table_is_replaced(command_line: CommandLine, store: Path) -> None:
    (store / "config" / "topics.json").write_text("no json")
    (store / "config" / "topics.json.bak").write_text("no json either")

    result = repaired(command_line, store, "--json")

    assert result.code == 0, result
    assert (
        "moved config/topics.json away, which is damaged; it has no valid backup, so it starts empty" in result.errors
    )
    assert "created topic orders with 2 queues, which was not in the table of topics" in result.errors
    assert result.json["topics"]["orders"] == 10
    assert (store / "config" / "topics.json.damaged").read_text() == "no json"


def test_a_damaged_record_stays_damaged(command_line: CommandLine, store: Path) -> None:
    log = next((store / "commitlog").iterdir())
    at = log.read_bytes().index(b'{"number": 4}')
    with log.open("r+b") as file:
        file.seek(at)
        file.write(b"#")

    result = repaired(command_line, store, "--json")

    assert (result.code, len(result.json["damages"])) == (6, 1)
    assert result.json["topics"]["orders"] == 10  # the damaged record keeps its queue offset


def test_a_repair_is_refused_while_a_process_has_the_directory_open(command_line: CommandLine, store: Path) -> None:
    with EmbeddedBroker(store):
        in_use = repaired(command_line, store)
    (store.with_name("copy")).mkdir()
    exists = repaired(command_line, store)
    unconfirmed = command_line.plain("doctor", str(store), "--repair")

    assert (in_use.code, exists.code, unconfirmed.code) == (5, 1, 2)
    assert "give a folder for the copy that does not exist yet" in exists.errors


# --- simulate -----------------------------------------------------------------------------------


def simulation(command_line: CommandLine, store: Path, *options: str) -> Any:
    before = contents(store)
    result = command_line.plain("simulate", str(store), *options, "--json")
    assert result.code == 0, result
    assert contents(store) == before
    return result.json


def test_pending_messages_are_delivered_in_virtual_time(command_line: CommandLine, store: Path) -> None:
    result = simulation(command_line, store)

    assert (result["delivered"], result["undelivered"]) == (3, 1)
    assert result["lateness_ms"] == {"p50": 0, "p99": 0, "p100": 0}
    assert sum(each["due"] for each in result["minutes"]) == 3
    assert sum(each["delivered"] for each in result["minutes"]) == 3
    assert simulation(command_line, store, "--for", "48h")["undelivered"] == 0
    assert "3 delivered, 1 due later" in command_line.plain("simulate", str(store)).output


def test_slow_consumers_make_messages_late(command_line: CommandLine, tmp_path: Path) -> None:
    """120 messages are due in one second; ten consumers would need less than a minute, this one needs two."""
    with EmbeddedBroker(tmp_path / "store") as owner:
        at_ms = SystemClock().now_ms() // 60_000 * 60_000 + HOUR_MS
        for number in range(120):
            owner.sends.send(Message("orders", b"%d" % number, {Property.TIMER_DELIVER_MS: str(at_ms + number)}))

    result = simulation(command_line, tmp_path / "store", "--consume-rate", "1")

    minutes = [each for each in result["minutes"] if each["delivered"] or each["consumed"]]
    assert [(each["delivered"], each["consumed"], each["backlog"]) for each in minutes] == [
        (120, 59, 61),
        (0, 60, 1),
        (0, 1, 0),
    ]
    assert result["lateness_ms"]["p100"] == 120_000 - 119
    assert result["minutes"][0]["start_ms"] == at_ms


def test_a_stopped_broker_makes_messages_late(command_line: CommandLine, store: Path) -> None:
    result = simulation(command_line, store, "--stopped", "90m")

    late = max(each["lateness_ms"] for each in result["minutes"])
    assert HOUR_MS // 2 - 60_000 < late <= HOUR_MS // 2 + 60_000
    assert result["delivered"] == 3


def test_settings_are_given_by_their_keys(command_line: CommandLine, store: Path) -> None:
    known = simulation(command_line, store, "--set", "mqtemplate.broker.flush-disk-type=ASYNC_FLUSH")
    unknown = command_line.plain("simulate", str(store), "--set", "mqtemplate.broker.flush=never")

    assert known["delivered"] == 3
    assert unknown.code == 1
    assert "mqtemplate.broker.flush: no such key" in unknown.errors


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        (["--consume-rate", "0"], 1, "the rate of consumers must be above 0 per second, got 0"),
        (["--for", "ever"], 2, "a duration with units"),
        (["--set", "x"], 2, "'x' is not name=value"),
    ],
)
def test_wrong_arguments(command_line: CommandLine, store: Path, options: list[str], code: int, text: str) -> None:
    result = command_line.plain("simulate", str(store), *options)

    assert result.code == code
    assert text in " ".join(result.errors.split())


def test_doctor_names_the_groups_that_keep_old_files(command_line: CommandLine, tmp_path: Path) -> None:
    """A start would delete the file before their first unread message only."""
    folder, clock = tmp_path / "old", VirtualClock(SystemClock().now_ms() - 10 * 86_400_000)
    settings = EmbeddedSettings(mapped_file_size_commit_log=65_536, default_topic_queue_nums=1)
    with EmbeddedBroker(folder, settings, clock) as broker:
        since_ms = clock.now_ms() + 72 * 3_600_000
        for _ in range(10):
            broker.sends.send(Message("orders", bytes(20_000)))
        broker.groups.commit_offset("billing", MessageQueue("orders", "broker-a", 0), 4)

    report = report_of(command_line, folder)
    text = command_line.plain("doctor", str(folder)).output

    assert report["retention_holds"] == [
        {"group": "billing", "topic": "orders", "message_count": 5, "since_ms": since_ms, "byte_count": 131_072}
    ]
    assert any(line.startswith("delete 1 commit log files at 04 o'clock") for line in report["start"])
    assert re.search(
        r"kept      128.* older than file-reserved-time since .*: group billing has 5 unread messages in orders", text
    )


# --- groups by POP ------------------------------------------------------------------------------


def test_a_group_by_pop_shows_which_message_is_in_flight_and_what_it_blocks(
    tmp_path: Path, command_line: CommandLine
) -> None:
    with EmbeddedBroker(tmp_path / "store", EmbeddedSettings(default_topic_queue_nums=1)) as owner:
        owner.pop.join(ConsumerSpec(group="shipping", subscriptions={"orders": TagSelector()}))
        for number in range(3):
            message = Message("orders", b"x", {Property.SHARDING_KEY: "a", Property.KEYS: f"order-{number}"})
            owner.sends.send(message)
        [received] = owner.pop.receive("shipping", "orders", 1, 600_000, 10_000, None, is_ordered=True)
        owner.pop.receive("shipping", "orders", 1, 600_000, 0, None, is_ordered=True)
    line = CommandLine(f"embedded:{tmp_path / 'store'}", command_line.config, command_line._capsys)

    shown, document = line.ok("groups", "shipping").output, line.json("groups", "shipping")

    assert re.search(r"1 in flight, the oldest for .*; 2 wait for their order; 0 receives wait for messages; ", shown)
    row = next(row for row in shown.splitlines() if received.message.msg_id in row).split()
    assert row[1:4] == ["orders", "order-0", "unknown"]
    assert row[-3:] == ["1", "a", "2"]
    [message] = document["deliveries"]["messages"]
    assert (message["msg_id"], message["blocked"], message["attempt"]) == (received.message.msg_id, 2, 1)
    assert message["until_ms"] - message["since_ms"] == 600_000
    assert document["deliveries"]["in_flight"] == 1
