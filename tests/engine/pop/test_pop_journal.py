"""The progress of POP across restarts and crashes: what was acknowledged does not come again, and nothing is lost."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from mqtemplate.broker import ConsumerSpec
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import VirtualClock
from mqtemplate.engine.pop.journal import SNAPSHOT_FILE
from mqtemplate.engine.pop.pop import PoppedMessage, PopResult
from mqtemplate.engine.pop.progress import QueueKey
from mqtemplate.errors import DestinationError, SendError, StoreError, StoreFullError
from mqtemplate.message import Message, MessageQueue, Property
from mqtemplate.selectors.tags import TagSelector
from mqtemplate.store.files.folder_store_files import FolderStoreFiles
from mqtemplate.topics import POP_PROGRESS_TOPIC
from tests.engine.pop.consumer import GROUP, TOPIC, Shop, bodies, ignore
from tests.store.faulty_disk import FaultyDisk, never, once
from tests.store.small_store import kill, overwrite

SMALL: dict[str, Any] = {
    "mapped_file_size_commit_log": 1 << 16,
    "mapped_file_size_consume_queue": 2_000,
    "max_message_size": 1 << 12,
    "max_hash_slot_num": 50,
    "max_index_num": 200,
    "timer_roll_window_slot": 60,
}
NO_CHECKPOINT: dict[str, Any] = {"checkpoint_interval_ms": 10**12, "flush_consumer_offset_interval_ms": 10**12}


def opened(folder: Path, clock: VirtualClock | None = None, **settings: Any) -> Shop:
    return Shop(folder, clock, **{**SMALL, **settings})


def restarted(shop: Shop, *, killed: bool) -> Shop:
    """Stop a broker, or kill it, and start another one on its folder."""
    folder = shop.broker.path
    assert folder is not None
    if killed:
        kill(shop.broker.store)
    else:
        shop.broker.close()
    return opened(folder, shop.clock)


both_ends = pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])


@both_ends
def test_an_acknowledged_message_does_not_come_again_after_a_restart(tmp_path: Path, killed: bool) -> None:
    shop = opened(tmp_path)
    shop.send("a", "b", "c")
    _, b, _ = shop.pop()
    shop.ack(b)

    again = restarted(shop, killed=killed)

    again.harness.advance("30s")
    assert sorted(bodies(again.pop())) == ["a", "c"]
    again.broker.close()


@both_ends
def test_a_delivery_lasts_across_a_restart_with_its_handle_and_its_time(tmp_path: Path, killed: bool) -> None:
    shop = opened(tmp_path)
    shop.send("a", "b")
    a, _ = shop.pop()
    shop.harness.advance("10s")

    again = restarted(shop, killed=killed)

    assert again.pop() == []
    assert again.ack(a) == [True]
    again.harness.advance("19999ms")
    assert again.pop() == []
    again.harness.advance("1ms")
    assert [(*bodies([each]), each.attempt) for each in again.pop()] == [("b", 2)]
    again.broker.close()


@both_ends
def test_order_attempts_and_changes_last_across_a_restart(tmp_path: Path, killed: bool) -> None:
    shop = opened(tmp_path)
    for body in ("a1", "a2", "b1"):
        shop.send(body, **{Property.SHARDING_KEY: body[0]})
    (a1,) = shop.pop(is_ordered=True, max_count=1, attempt_id="one")
    shop.pop(is_ordered=True)
    shop.harness.advance("30s")
    (again_a1,) = shop.pop(is_ordered=True, max_count=1, attempt_id="two")
    assert shop.change(again_a1, 90_000) is not None

    again = restarted(shop, killed=killed)

    assert bodies(again.pop(is_ordered=True, attempt_id="two")) == ["a1"]
    assert [(*bodies([each]), each.attempt) for each in again.pop(is_ordered=True)] == [("b1", 2)]
    again.harness.advance("90s")
    assert [(*bodies([each]), each.attempt) for each in again.pop(is_ordered=True)] == [("a1", 3), ("a2", 1), ("b1", 3)]
    assert again.ack(a1) == [False]
    again.broker.close()


@both_ends
def test_a_session_of_before_a_restart_continues_if_its_client_comes_back(tmp_path: Path, killed: bool) -> None:
    shop = opened(tmp_path)
    shop.send("kept")
    shop.pop(session="one")
    shop.send("left")
    shop.pop(session="two")
    shop.harness.advance("3s")
    shop.send("later")  # the deliveries are older than the last record before a kill

    again = restarted(shop, killed=killed)
    again.pop_service.keep_session("one")

    again.ack(*again.pop())
    again.harness.advance("119s")
    assert again.pop() == []
    again.harness.advance("1s")
    assert bodies(again.pop()) == ["left"]
    again.harness.advance("2h")
    assert "kept" not in bodies(again.pop())
    again.broker.close()


UNSURE: dict[str, Any] = {"session": "one", "awaits_receipt": True}


@both_ends
@pytest.mark.parametrize("is_ordered", [False, True])
def test_a_session_does_not_renew_after_a_restart_what_its_client_may_not_have(
    tmp_path: Path, killed: bool, is_ordered: bool
) -> None:
    """Else a message whose response was lost would be invisible for three hours, though its client waits for it."""
    shop = opened(tmp_path)
    shop.send("received", **{Property.SHARDING_KEY: "a"})
    shop.send("unsure", **{Property.SHARDING_KEY: "b"})
    received, unsure = shop.pop(is_ordered=is_ordered, **UNSURE)
    shop.pop_service.received(GROUP, TOPIC, [received.handle])
    shop.harness.advance("10s")

    again = restarted(shop, killed=killed)
    again.pop_service.keep_session("one")
    again.harness.advance("19999ms")
    assert again.pop(is_ordered=is_ordered) == []
    again.harness.advance("1ms")

    found = again.pop(is_ordered=is_ordered)
    assert [(*bodies([each]), each.attempt) for each in found] == [("unsure", 2)]
    assert again.ack(unsure, *found) == [False, True]
    again.harness.advance("2h")
    assert again.pop(is_ordered=is_ordered) == []
    assert again.ack(received) == [True]
    again.broker.close()


def test_a_response_that_is_lost_once_more_does_not_delay_a_message_further(tmp_path: Path) -> None:
    """Each run is killed before the client has read its response; the later ones deliver from the retry topic."""
    shop = opened(tmp_path)
    shop.send("unsure")
    for attempt in range(1, 5):
        shop.pop_service.keep_session("one")
        assert [each.attempt for each in shop.pop(**UNSURE)] == [attempt]
        shop = restarted(restarted(shop, killed=True), killed=True)
        shop.harness.advance("30s")

    assert [(*bodies([each]), each.attempt) for each in shop.pop()] == [("unsure", 5)]
    shop.broker.close()


def test_what_a_killed_process_had_comes_again_when_the_next_one_joins_its_group(tmp_path: Path) -> None:
    """The members of an embedded broker end with its process, so nobody is there who could acknowledge it."""
    spec = ConsumerSpec(group=GROUP, subscriptions={TOPIC: TagSelector("*")})

    def received(shop: Shop) -> list[tuple[bytes, int]]:
        found = shop.broker.pop.receive(GROUP, TOPIC, 32, 30_000, 0, None, auto_renew=True)
        return [(each.message.body, each.attempt) for each in found]

    shop = opened(tmp_path)
    shop.broker.pop.join(spec)
    shop.send("a")
    assert received(shop) == [(b"a", 1)]
    shop.harness.advance("1h")

    again = restarted(shop, killed=True)
    again.broker.pop.join(spec)
    again.broker.pop.join(spec)
    again.harness.advance("1s")

    assert received(again) == [(b"a", 2)]
    again.broker.close()


@both_ends
def test_the_snapshot_knows_what_clients_have(tmp_path: Path, killed: bool) -> None:
    shop = opened(tmp_path)
    shop.send("received", "unsure")
    received, _ = shop.pop(**UNSURE)
    shop.pop_service.received(GROUP, TOPIC, [received.handle])
    shop.pop_service.journal.save()

    again = restarted(shop, killed=killed)
    again.pop_service.keep_session("one")
    again.harness.advance("1h")

    assert bodies(again.pop()) == ["unsure"]
    again.broker.close()


@both_ends
def test_a_forgotten_group_stays_forgotten(tmp_path: Path, killed: bool) -> None:
    shop = opened(tmp_path)
    shop.send("a")
    shop.ack(*shop.pop())
    shop.broker.admin().forget_group(GROUP)
    shop.harness.advance("10s")

    again = restarted(shop, killed=killed)

    assert bodies(again.pop()) == ["a"]
    again.broker.close()


def test_the_changes_of_one_step_are_one_record(tmp_path: Path) -> None:
    shop = opened(tmp_path, default_topic_queue_nums=4)
    shop.send(*map(str, range(32)))
    shop.pop()
    shop.harness.advance("0s")

    assert shop.broker.store.consume_queue(POP_PROGRESS_TOPIC, 0).max_offset == 1


def test_large_changes_are_divided_into_records_that_fit() -> None:
    shop = Shop(**SMALL | {"mapped_file_size_commit_log": 1 << 14})
    for number in range(150):
        shop.send(str(number), **{Property.SHARDING_KEY: f"{number}-{'x' * 400}"})
    held = [message for _ in range(10) for message in shop.pop(is_ordered=True)]
    shop.harness.advance("0s")

    assert len(held) == 150
    assert shop.broker.store.consume_queue(POP_PROGRESS_TOPIC, 0).max_offset > 1


def test_what_a_block_notes_is_one_record_and_wakes_no_service() -> None:
    shop = Shop(**SMALL)
    journal, wakes = shop.pop_service.journal, list[str]()
    journal.on_wake(lambda: wakes.append("woken"))

    with journal.writing():
        journal.note(QueueKey(GROUP, TOPIC, 0), ["M", 3])
        journal.note(QueueKey(GROUP, TOPIC, 1), ["M", 3])
    assert shop.broker.store.consume_queue(POP_PROGRESS_TOPIC, 0).max_offset == 1
    assert wakes == []

    journal.note(QueueKey(GROUP, TOPIC, 0), ["M", 4])
    assert wakes == ["woken"]


def test_what_a_block_notes_is_written_although_the_block_fails() -> None:
    shop = Shop(**SMALL)
    journal = shop.pop_service.journal

    with suppress(ValueError), journal.writing():
        journal.note(QueueKey(GROUP, TOPIC, 0), ["M", 3])
        raise ValueError("defect")

    assert shop.broker.store.consume_queue(POP_PROGRESS_TOPIC, 0).max_offset == 1


def test_what_a_block_cannot_write_is_left_to_the_service(tmp_path: Path) -> None:
    disk, clock = FaultyDisk(), VirtualClock()
    broker = EmbeddedBroker(
        settings=EmbeddedSettings(**SMALL), clock=clock, store_files=FolderStoreFiles(tmp_path, disk)
    )
    journal, wakes = Shop.of(broker, clock).pop_service.journal, list[str]()
    journal.on_wake(lambda: wakes.append("woken"))
    disk.judge = lambda number, kind: errno.ENOSPC if kind == "allocate" else 0

    with journal.writing():  # the first record of the journal needs a file for its queue
        journal.note(QueueKey(GROUP, TOPIC, 0), ["M", 3])
    assert wakes == ["woken"]
    assert "POP progress are not written" in (journal.error or "")

    disk.judge = never
    journal.step()
    assert broker.store.consume_queue(POP_PROGRESS_TOPIC, 0).max_offset == 1
    broker.close()


def test_no_client_can_write_to_the_journal(tmp_path: Path) -> None:
    shop = opened(tmp_path)

    with pytest.raises(DestinationError, match="belongs to the broker"):
        shop.broker.sends.send(Message(POP_PROGRESS_TOPIC, b"[]"))


# --- durability ------------------------------------------------------------------------------------


def test_an_acknowledgement_is_confirmed_only_when_it_is_on_the_disk(tmp_path: Path) -> None:
    disk = FaultyDisk()
    clock = VirtualClock()
    broker = EmbeddedBroker(
        settings=EmbeddedSettings(**SMALL), clock=clock, store_files=FolderStoreFiles(tmp_path, disk)
    )
    shop = Shop.of(broker, clock)
    shop.send("a")
    (message,) = shop.pop()
    results: list[Exception | None] = []
    flushed = [broker.store.group_commit.flushed]

    shop.pop_service.ack(GROUP, TOPIC, message.handle, results.append)
    assert results == [None]
    assert broker.store.group_commit.flushed == broker.store.end_offset > flushed[0]

    shop.send("b")
    (message,) = shop.pop()
    disk.judge = once(len(disk.calls), errno.EIO)
    with pytest.raises(StoreError):
        shop.pop_service.ack(GROUP, TOPIC, message.handle, results.append)
    disk.judge = never
    assert isinstance(results[-1], StoreError)
    broker.close()


def test_while_the_disk_is_full_deliveries_stop_and_no_acknowledgement_is_lost(tmp_path: Path) -> None:
    """The progress that waits in memory is bounded. It is written when there is space again."""
    disk, clock = FaultyDisk(), VirtualClock()
    settings = EmbeddedSettings(**SMALL, pop_unwritten_max_bytes=1 << 10, default_topic_queue_nums=1)
    broker = EmbeddedBroker(settings=settings, clock=clock, store_files=FolderStoreFiles(tmp_path, disk))
    shop, results = Shop.of(broker, clock), list[PopResult]()
    journal = shop.pop_service.journal
    shop.send("done")
    shop.ack(*shop.pop())
    shop.send(*map(str, range(20)))
    broker.sends.send(Message("others", b""))
    disk.judge = lambda number, kind: errno.ENOSPC if kind == "allocate" else 0
    for size in (4_000, 400, 0):
        with suppress(SendError):
            while True:
                broker.sends.send(Message("others", bytes(size)))

    popped: list[PoppedMessage] = []
    while (waiting := shop.number("pop.unwritten_bytes")) < 1 << 10:
        popped += shop.pop(max_count=1)
        with pytest.raises(StoreError):
            journal.write()
    with pytest.raises(StoreError) as refusal:
        shop.pop()
    errors: list[Exception | None] = []
    for message in popped[1:]:
        with pytest.raises(StoreError):
            shop.pop_service.ack(GROUP, TOPIC, message.handle, errors.append)
    with pytest.raises(StoreError):
        shop.change(popped[0], 60_000)
    with pytest.raises(StoreError):
        shop.hold(20_000, results)

    assert str(refusal.value).startswith(
        f"no message is delivered by POP: {waiting} bytes of progress wait for the store, allowed are 1024 "
        "(pop-unwritten-max-bytes). The store refuses them: "
    )
    assert "POP progress are not written" in (health_error(broker) or "")

    disk.judge = never
    shop.harness.advance("1s")
    assert (shop.number("pop.unwritten_bytes"), health_error(broker)) == (0, None)
    kill(broker.store)
    again = opened(tmp_path, clock)
    again.harness.advance("30s")
    assert sorted(bodies(again.pop()), key=int) == ["0", *map(str, range(len(popped), 20))]
    again.broker.close()


def test_pops_that_wait_for_the_journal_go_on_although_the_copy_of_a_message_wrote_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The copy takes with it what was not written. The service then had nothing to write, and nothing to report."""
    shop, results = Shop(pop_unwritten_max_bytes=1 << 10), list[PopResult]()
    store = shop.broker.store
    shop.broker.create_topic("others", 1)
    shop.send("popped")
    shop.pop()
    shop.hold(60_000, results, topic="others")
    with monkeypatch.context() as patch:
        patch.setattr(store, "put", partial(refuse_progress, store.put))
        while shop.number("pop.unwritten_bytes") < 1 << 10:
            shop.send("more")
            shop.pop()
        shop.broker.sends.send(Message("others", b"waits"))
        shop.pop_service.step()
    assert results == []

    shop.clock.move_ms(30_000)
    shop.pop_service._reviver.step()
    shop.harness.advance("0s")

    assert bodies(results[0].messages) == ["waits"]
    assert health_error(shop.broker) is None


def refuse_progress(put: Callable[..., Any], records: Any, **options: bool) -> Any:
    if getattr(records, "topic", None) == POP_PROGRESS_TOPIC:
        raise StoreFullError("no space for the progress")
    return put(records, **options)


def health_error(broker: EmbeddedBroker) -> str | None:
    health = broker.store_health()
    assert health is not None
    return health.error


# --- snapshots -------------------------------------------------------------------------------------


def snapshot(folder: Path) -> Any:
    return json.loads((folder / SNAPSHOT_FILE).read_text())


def test_a_snapshot_is_written_a_minute_after_a_change_and_only_newer_records_are_read(tmp_path: Path) -> None:
    shop = opened(tmp_path)
    shop.send("a", "b")
    a, b = shop.pop(invisible_ms=600_000)
    shop.ack(a)
    shop.harness.advance("61s")
    records = shop.broker.store.consume_queue(POP_PROGRESS_TOPIC, 0).max_offset
    assert snapshot(tmp_path)["journalOffset"] == records
    shop.ack(b)

    again = restarted(shop, killed=True)

    assert again.pop_service.in_flight(GROUP)[0][1:4] == (2, 2, 0)
    again.broker.close()


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b'{"queues": 3}', b'{"journalOffset":0,"queues":[["g"]]}']
)
def test_a_damaged_snapshot_is_replaced_by_the_whole_journal(tmp_path: Path, content: bytes) -> None:
    shop = opened(tmp_path)
    shop.send("a", "b")
    a, _ = shop.pop()
    shop.ack(a)
    shop.harness.advance("61s")
    found = shop.pop()
    shop.broker.close()
    (tmp_path / SNAPSHOT_FILE).write_bytes(content)

    again = opened(tmp_path, shop.clock)

    assert again.ack(*found) == [True]
    again.harness.advance("1h")
    assert again.pop() == []
    again.broker.close()


def test_a_damaged_record_of_the_journal_is_logged_and_the_others_are_read(tmp_path: Path) -> None:
    shop = opened(tmp_path)
    shop.send("a", "b")
    a, b = shop.pop()
    shop.ack(a)
    at = shop.broker.store.end_offset
    shop.harness.advance("0s")
    shop.ack(b)
    shop.broker.close()
    (tmp_path / SNAPSHOT_FILE).unlink()
    log = next((tmp_path / "commitlog").iterdir())
    overwrite(log, at - 40, b"?")

    with capture_logs() as logs:
        again = opened(tmp_path, shop.clock)

    assert [entry["event"] for entry in logs].count("pop.progress_lost") == 1
    again.broker.close()


def test_before_a_file_of_the_log_is_deleted_the_snapshot_replaces_its_records(tmp_path: Path) -> None:
    shop = opened(tmp_path, file_reserved_time=1, keep_unread_messages=False)
    shop.send("a", "b", "c")
    a, b, _ = shop.pop(invisible_ms=300 * 3_600_000)
    shop.ack(b)
    shop.harness.advance("61s")
    shop.ack(a)
    before = snapshot(tmp_path)
    for _ in range(60):
        shop.broker.sends.send(Message("others", bytes(4_000)))
    kept = shop.pop_service.journal.kept(shop.broker.engine.delayed.control)

    assert kept.copy_forward(0, 1 << 16)

    after = snapshot(tmp_path)
    assert after["journalOffset"] > before["journalOffset"]
    assert kept.pending_bytes(0, 1 << 16) == 0
    shop.harness.advance("2d")
    assert shop.broker.store.start_offset > 0
    assert shop.broker.store.consume_queue(POP_PROGRESS_TOPIC, 0).min_offset > 0
    again = restarted(shop, killed=True)
    assert again.pop_service.in_flight(GROUP, TOPIC)[0][1:4] == (2, 3, 1)
    again.broker.close()


def test_without_snapshot_and_start_of_the_journal_groups_continue_at_their_committed_offsets(tmp_path: Path) -> None:
    shop = opened(tmp_path, file_reserved_time=1)
    shop.send("a", "b", "c")
    a, b, c = shop.pop(invisible_ms=300 * 3_600_000)
    shop.harness.advance("0s")
    for _ in range(60):
        shop.broker.sends.send(Message("others", bytes(4_000)))
    shop.send("d")
    shop.ack(a, b, c)
    shop.harness.advance("2d")
    assert shop.broker.store.consume_queue(POP_PROGRESS_TOPIC, 0).min_offset > 0
    shop.broker.close()
    (tmp_path / SNAPSHOT_FILE).unlink()

    with capture_logs() as logs:
        again = opened(tmp_path, shop.clock)

    assert "pop.progress_lost" in [entry["event"] for entry in logs]
    assert bodies(again.pop()) == ["d"]
    again.broker.close()


# --- crashes at any record -------------------------------------------------------------------------


@dataclass
class Run:
    """Deliveries of a run, with the end of the log when each change was confirmed.

    Attributes:
        sent: Message -> end of the log.
        acked: Message -> end of the log.
        ends: The ends of all records.
    """

    sent: dict[str, int] = field(default_factory=dict)
    acked: dict[str, int] = field(default_factory=dict)
    ends: list[int] = field(default_factory=list)

    def send(self, shop: Shop, *names: str) -> None:
        for name in names:
            shop.send(name, **{Property.SHARDING_KEY: name[0]})
            self.sent[name] = shop.broker.store.end_offset

    def ack(self, shop: Shop, *messages: PoppedMessage) -> None:
        for message in messages:
            assert shop.ack(message) == [True]
            self.acked.setdefault(message.record.body.decode(), shop.broker.store.end_offset)


def run_unordered(shop: Shop) -> Run:
    run = Run()
    run.send(shop, "a1", "a2", "a3", "b1", "b2", "b3")
    found = shop.pop(max_count=4, invisible_ms=20_000)
    run.ack(shop, found[1], found[3])
    assert shop.change(found[0], 5_000) is not None
    shop.harness.advance("6s")
    again = shop.pop(max_count=2)
    run.ack(shop, again[-1])
    shop.harness.advance("20s")
    run.ack(shop, *shop.pop()[1:])
    run.send(shop, "c1")
    assert shop.pop_service.dead_letter(GROUP, TOPIC, shop.pop()[0].handle, ignore)
    run.acked["c1"] = shop.broker.store.end_offset
    return run


def run_ordered(shop: Shop) -> Run:
    run = Run()
    run.send(shop, "a1", "b1", "a2", "b2", "a3", "b3")
    (a1,) = shop.pop(is_ordered=True, max_count=1, invisible_ms=5_000)
    found = shop.pop(is_ordered=True, max_count=2, invisible_ms=20_000)
    run.ack(shop, found[0])
    shop.harness.advance("5s")
    (a1, a2) = shop.pop(is_ordered=True, max_count=2, attempt_id="one")
    run.ack(shop, a1)
    assert shop.change(a2, 1_000) is not None
    shop.harness.advance("21s")
    run.ack(shop, *shop.pop(is_ordered=True)[:3])
    return run


def record_ends(shop: Shop) -> list[int]:
    ends, at, store = [], 0, shop.broker.store
    while at < store.end_offset and (record := store.read_at(at)) is not None:
        at += record.total_size
        ends.append(at)
    return ends


def drain(shop: Shop, *, is_ordered: bool) -> list[str]:
    """Receive and acknowledge all messages of the next hours, and return them in the order of their deliveries."""
    found: list[str] = []
    for _ in range(8):
        while messages := shop.pop(is_ordered=is_ordered):
            found += bodies(messages)
            shop.ack(*messages)
        shop.harness.advance("30m")
    return found


def cut_copies(shop: Shop, run: Run, folder: Path) -> Iterator[tuple[int, Path]]:
    """Yield a copy of the store directory for each end of a record: the log ends there after a power failure."""
    source = shop.broker.path
    assert source is not None
    ends = [end for end in record_ends(shop) if end >= min(run.sent.values())]
    kill(shop.broker.store)
    for end in ends:
        shutil.copytree(source, folder)
        log = next((folder / "commitlog").iterdir())
        data = log.read_bytes()
        log.write_bytes(data[:end] + bytes(len(data) - end))
        yield end, folder
        shutil.rmtree(folder)


@pytest.mark.parametrize(("scenario", "is_ordered"), [(run_unordered, False), (run_ordered, True)])
def test_a_crash_after_any_record_loses_no_message_and_no_acknowledgement(
    tmp_path: Path, scenario: Any, is_ordered: bool
) -> None:
    """The log is cut after each record of a run. Two starts, since the second one reads what the first one wrote."""
    shop = opened(tmp_path / "source", **NO_CHECKPOINT)
    run = scenario(shop)
    count = 0
    for end, folder in cut_copies(shop, run, tmp_path / "copy"):
        first = opened(folder, VirtualClock(shop.clock.now_ms()))
        kill(first.broker.store)
        again = opened(folder, first.clock)

        found = drain(again, is_ordered=is_ordered)

        acked = {name for name, acked_end in run.acked.items() if acked_end <= end}
        expected = {name for name, sent_end in run.sent.items() if sent_end <= end and name not in run.acked}
        assert acked.isdisjoint(found), f"cut at {end}"
        assert expected <= set(found), f"cut at {end}"
        if is_ordered:
            for group in "ab":
                of_group = [name for name in found if name[0] == group]
                assert of_group == sorted(set(of_group)), f"cut at {end}"
        again.broker.close()
        count += 1
    assert count > 10


@pytest.mark.parametrize("is_ordered", [False, True])
def test_a_kill_right_after_a_delivery_does_not_lose_it(tmp_path: Path, is_ordered: bool) -> None:
    """The client that received the message handles it: it is neither repeated before its time nor counted less."""
    shop = opened(tmp_path)
    shop.send("a")
    [delivered] = shop.pop(is_ordered=is_ordered)
    kill(shop.broker.store)

    again = opened(tmp_path, shop.clock)
    assert again.pop(is_ordered=is_ordered) == []
    again.harness.advance("30s")

    [repeated] = again.pop(is_ordered=is_ordered)
    assert (delivered.attempt, repeated.attempt) == (1, 2)
    again.broker.close()


def test_a_kill_right_after_a_delivery_to_a_pop_that_waited_does_not_lose_it(tmp_path: Path) -> None:
    shop = opened(tmp_path)
    results: list[PopResult] = []
    shop.hold(10_000, results)
    shop.send("a")
    shop.pop_service.step()
    assert [bodies(each.messages) for each in results] == [["a"]]
    kill(shop.broker.store)

    again = opened(tmp_path, shop.clock)

    assert again.pop() == []
    again.broker.close()


def test_an_acknowledgement_of_a_delivery_that_a_crash_lost_is_taken(tmp_path: Path) -> None:
    shop = opened(tmp_path / "store")
    shop.send("a", "b")
    shutil.copytree(tmp_path / "store", tmp_path / "copy")  # a power failure loses what was written later
    _, b = shop.pop()
    kill(shop.broker.store)

    again = opened(tmp_path / "copy", shop.clock)

    assert again.ack(b) == [True]
    assert bodies(again.pop()) == ["a"]
    again.harness.advance("31s")
    assert again.ack(b._replace(handle=b.handle._replace(queue_offset=7))) == [False]
    again.broker.close()


@both_ends
def test_no_delivery_from_before_a_reset_or_a_deletion_counts_after_a_restart(tmp_path: Path, killed: bool) -> None:
    shop = opened(tmp_path)
    shop.send("a", "b")
    a, b = shop.pop()
    shop.broker.admin().set_offsets(GROUP, {MessageQueue(TOPIC, shop.broker.name, 0): 0})
    again = restarted(shop, killed=killed)
    assert again.ack(b) == [False]

    (a2,) = again.pop(max_count=1)
    again.broker.admin().delete_topic(TOPIC)
    again = restarted(again, killed=killed)
    again.broker.engine.routes.queues(TOPIC)

    assert again.ack(a, a2, b) == [False] * 3
    assert bodies(again.pop()) == ["a", "b"]
    again.broker.close()
