"""One pending message by key, and changes together with sends: decisions, kills, and a model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mqtemplate import (
    EmbeddedBroker,
    EmbeddedSettings,
    RocketMQTemplate,
    Send,
    SendResult,
    VirtualClock,
    transaction_listener,
)
from mqtemplate.errors import MessageError, PendingKeyError
from mqtemplate.message import Message, Property
from mqtemplate.pending import PendingDecision, PendingQuery, ScheduleChangeStatus
from mqtemplate.record.properties import decode_properties
from mqtemplate.results import TransactionState
from mqtemplate.store import index_file
from mqtemplate.testing import Harness, messages_in
from tests.delay.killed_engine import Killed
from tests.store.small_store import kill

KEY = "cart-17"
SMALL = EmbeddedSettings(mapped_file_size_commit_log=1 << 18, topics=("reminders",))


@pytest.fixture
def template() -> Iterator[RocketMQTemplate]:
    with EmbeddedBroker(clock=VirtualClock()) as broker, RocketMQTemplate(broker, producer_group="shop") as template:
        template.add_transaction_listener(Commits())
        yield template


def advance(template: RocketMQTemplate, seconds: float) -> None:
    Harness(template.broker).advance(timedelta(seconds=seconds))


def send(
    template: RocketMQTemplate, body: str, on_pending: str = "replace", delay: str = "15m", **more: Any
) -> SendResult:
    return template.sync_send("reminders", body, delay=delay, pending_key=KEY, on_pending=on_pending, **more)


def delivered(broker: Any) -> list[str]:
    return sorted(message.body.decode() for message in messages_in(broker, "reminders"))


def due_in_s(template: RocketMQTemplate) -> list[float]:
    now_ms = template.broker.clock.now_ms()
    return [(message.deliver_ms - now_ms) / 1_000 for message in template.pending("reminders").messages]


# --- decisions --------------------------------------------------------------------------------------


def test_no_later_than_counts_from_the_first_send(template: RocketMQTemplate) -> None:
    """A mail 15 minutes after the last edit, but at most 30 minutes after the first one."""
    first = send(template, "first", "postpone", no_later_than="30m")
    for _ in range(2):
        advance(template, 600)
        send(template, "later", "postpone", no_later_than="30m")
    assert due_in_s(template) == [600]

    advance(template, 600)

    [message] = messages_in(template.broker, "reminders")
    assert (message.body, message.msg_id) == (b"first", first.msg_id)


def test_the_first_send_is_not_later_than_its_limit(template: RocketMQTemplate) -> None:
    send(template, "first", "postpone", delay="2h", no_later_than="30m")

    assert due_in_s(template) == [1_800]


def test_a_delay_of_zero_replaces_what_is_pending_and_is_delivered_now(template: RocketMQTemplate) -> None:
    send(template, "old")

    result = send(template, "new", delay="0s")

    assert result.pending is not None
    assert result.pending.decision is PendingDecision.REPLACED
    advance(template, 3_600)
    assert delivered(template.broker) == ["new"]


def test_one_key_in_two_topics_names_two_messages(template: RocketMQTemplate) -> None:
    send(template, "mail")

    other = template.sync_send("invoices", "bill", delay="15m", pending_key=KEY)

    assert other.pending is not None
    assert other.pending.decision is PendingDecision.STORED


def test_a_topic_and_a_key_with_one_joined_text_are_two_keys(template: RocketMQTemplate) -> None:
    template.sync_send("mails", "a", delay="15m", pending_key="to-7")

    results = [template.sync_send("mail", "b", delay="15m", pending_key="sto-7") for _ in range(2)]

    assert [len(result.replaced) for result in results] == [0, 1]
    assert template.count_pending("mails").total == 1


@pytest.mark.parametrize("where", ["in memory", "left out of memory", "indexed"])
def test_the_newest_message_of_a_key_is_found_before_and_after_it_is_indexed(
    template: RocketMQTemplate, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "left out of memory":
        monkeypatch.setattr(index_file, "_MAX_BYTES", 0)
    index = template.broker.store.index  # type: ignore[attr-defined]

    for number in range(6):
        result = send(template, str(number))
        if where == "indexed":
            index.catch_up()
        assert len(result.replaced) == (number > 0)

    template.cancel(result.handle)
    assert send(template, "after a cancel").replaced == ()
    advance(template, 3_600)
    outcome = send(template, "after a delivery").pending
    assert outcome is not None
    assert outcome.already_delivered


def test_memory_keeps_few_keys_that_are_indexed(template: RocketMQTemplate, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest ones. A key that is not in memory any more is found in the index, and its message is replaced."""
    monkeypatch.setattr(index_file, "_MOST_KEYED", 2)
    broker: Any = template.broker

    def send_all(body: str) -> list[int]:
        results = []
        for number in range(5):
            results.append(template.sync_send("reminders", body, delay="15m", pending_key=f"cart-{number}"))
            broker.store.index.catch_up()
        return [len(result.replaced) for result in results]

    assert send_all("old") == [0] * 5
    assert [key for _, key in broker.store.index.recent_keys._keyed] == ["cart-3", "cart-4"]
    assert send_all("new") == [1] * 5
    assert template.count_pending("reminders").total == 5


def test_a_business_key_is_no_pending_key(template: RocketMQTemplate) -> None:
    template.sync_send("reminders", "has it as keys", delay="15m", keys=KEY)

    assert send(template, "new").replaced == ()


def test_a_strict_send_is_decided_here_in_one_step(template: RocketMQTemplate) -> None:
    old = send(template, "old", on_pending_strict=True)

    assert send(template, "new", on_pending_strict=True).replaced == (old.handle,)
    advance(template, 3_600)
    [message] = messages_in(template.broker, "reminders")
    assert Property.ON_PENDING_STRICT not in message.properties


def test_items_of_a_batch_with_one_key_replace_each_other(template: RocketMQTemplate) -> None:
    old = send(template, "old")

    result = template.sync_send("reminders", ["a", "b"], delay="15m", pending_key=KEY)

    assert result.pending is not None
    assert [each and each.decision for each in result.pending.each] == [PendingDecision.REPLACED] * 2
    assert result.replaced == (old.handle, str(result.handle).split(",", maxsplit=1)[0])
    advance(template, 3_600)
    assert delivered(template.broker) == ["b"]


def test_an_asynchronous_and_a_one_way_send_decide_as_well(template: RocketMQTemplate) -> None:
    send(template, "old")

    future = template.async_send("reminders", "refused", delay="1m", pending_key=KEY, on_pending="refuse")
    template.send_one_way("reminders", "new", delay="1m", pending_key=KEY)

    assert isinstance(future.exception(), PendingKeyError)
    advance(template, 3_600)
    assert delivered(template.broker) == ["new"]


def test_a_key_stays_known_after_moves_and_a_restart(tmp_path: Path) -> None:
    clock = VirtualClock()
    with EmbeddedBroker(tmp_path, clock=clock) as broker:
        template = RocketMQTemplate(broker)
        template.reschedule(send(template, "old", delay_level=0).handle, delay="2h")
    with EmbeddedBroker(tmp_path, clock=clock) as broker:
        template = RocketMQTemplate(broker)

        assert len(send(template, "new").replaced) == 1
        advance(template, 3 * 3_600)
        assert delivered(broker) == ["new"]


def test_the_option_names_what_is_missing_or_wrong(template: RocketMQTemplate) -> None:
    for options, text in (
        ({"on_pending": "keep"}, "on_pending='keep' needs pending_key="),
        ({"on_pending_strict": True}, "on_pending_strict=True needs pending_key="),
        (
            {"pending_key": "a", "delay": "1m", "on_pending_strict": "yes"},
            "on_pending_strict must be True or False, got 'yes'",
        ),
        ({"pending_key": "a"}, "pending_key='a' needs a delay: only a delayed message is pending"),
        (
            {"pending_key": "a", "delay": "1m", "on_pending": "drop"},
            "'replace', 'keep', 'postpone', 'refuse', got 'drop'",
        ),
        ({"pending_key": "a", "delay": "1m", "no_later_than": "2m"}, "needs on_pending='postpone', got 'replace'"),
        ({"pending_key": "", "delay": "1m"}, "pending_key is empty"),
    ):
        with pytest.raises(MessageError) as caught:
            template.sync_send("reminders", "x", **options)
        assert text in str(caught.value)


def test_a_message_of_then_has_no_pending_key(template: RocketMQTemplate) -> None:
    with pytest.raises(MessageError, match="has no pending_key; remove it"):
        template.cancel(send(template, "old").handle, then=[Send("reminders", "x", delay="1m", pending_key="a")])


# --- kills ------------------------------------------------------------------------------------------


class _PartlyWritten:
    """A file whose process is killed after this number of bytes of a write."""

    def __init__(self, file: Any, written: int) -> None:
        self._file, self._written = file, written
        self.size_of_write = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, at: int, data: bytes) -> None:
        self.size_of_write = len(data)
        self._file.write(at, data[: self._written])
        raise Killed

    write_mapped = write


@contextmanager
def killed_after(broker: EmbeddedBroker, written: int) -> Iterator[_PartlyWritten]:
    log = broker.store._commit_log
    file, log._file = log._file, _PartlyWritten(log._file, written)  # type: ignore[assignment]
    try:
        with pytest.raises(Killed):
            yield log._file  # type: ignore[misc]
    finally:
        log._file = file


COMMITS: dict[str, Callable[[SendResult], dict[str, str]]] = {
    # properties of the half message
    "with a pending key": lambda old: {Property.TIMER_DELAY_MS: "60000", Property.PENDING_KEY: KEY},
    "with a cancel": lambda old: {Property.CANCELS: str(old.handle)},
}


def _commit(template: RocketMQTemplate, properties: dict[str, str]) -> object:
    half = template.broker.sends.send_half(Message("reminders", b"new", properties), "shop")
    return lambda: template.broker.transactions.end_transaction(half, TransactionState.COMMIT)


@transaction_listener()
class Commits:
    def execute_local_transaction(self, message: Message, state: object) -> TransactionState:
        assert isinstance(state, TransactionState)
        return state

    def check_local_transaction(self, message: Message) -> TransactionState:
        return TransactionState.ROLLBACK


def cancel_in_transaction(
    template: RocketMQTemplate, old: SendResult, state: TransactionState, **options: Any
) -> SendResult:
    return template.send_in_transaction("reminders", "new", state, cancels=old.handle, **options)


@pytest.mark.parametrize(
    ("state", "expected"),
    [(TransactionState.COMMIT, ["new"]), (TransactionState.ROLLBACK, ["old"]), (TransactionState.UNKNOWN, ["old"])],
)
def test_a_commit_cancels_a_message_and_delivers_its_own(
    template: RocketMQTemplate, state: TransactionState, expected: list[str]
) -> None:
    """Until the commit the other message stays pending. An unknown state is checked, and rolled back here."""
    cancel_in_transaction(template, send(template, "old"), state, delay="1m")

    advance(template, 3_600)

    assert delivered(template.broker) == expected
    [message] = messages_in(template.broker, "reminders")
    assert Property.CANCELS not in message.properties


def test_a_commit_after_the_release_delivers_no_message(template: RocketMQTemplate) -> None:
    """The message of the transaction belongs to the cancel, which came too late."""
    old = send(template, "old", delay="1s")
    advance(template, 1)

    cancel_in_transaction(template, old, TransactionState.COMMIT)

    advance(template, 3_600)
    assert delivered(template.broker) == ["old"]
    assert template.broker.engine.transactions.open_count == 0  # type: ignore[attr-defined]


def test_a_transaction_with_a_wrong_handle_or_two_rules_is_refused(template: RocketMQTemplate) -> None:
    old, commit = send(template, "old"), TransactionState.COMMIT
    with pytest.raises(MessageError, match="cancels= and the pending key 'cart-17', and only one of them"):
        cancel_in_transaction(template, old, commit, delay="1m", pending_key=KEY)
    with pytest.raises(MessageError, match="'no handle' is not a handle of a pending message"):
        cancel_in_transaction(template, replace(old, handle="no handle"), commit)
    assert template.broker.engine.transactions.open_count == 0  # type: ignore[attr-defined]


CHANGES: dict[str, tuple[Callable[[RocketMQTemplate, SendResult], object], list[str]]] = {
    # name -> the change, and what is delivered after it
    "replace": (lambda template, old: send(template, "new"), ["new"]),
    "replace by a level": (
        lambda template, old: template.sync_send("reminders", "new", delay_level=2, pending_key=KEY),
        ["new"],
    ),
    "postpone": (lambda template, old: send(template, "new", "postpone", "20m"), ["old"]),
    "cancel and send": (
        lambda template, old: template.cancel(old.handle, then=[Send("reminders", "a"), Send("reminders", "b")]),
        ["a", "b"],
    ),
    "reschedule and send": (
        lambda template, old: template.reschedule(old.handle, delay="1h", then=[Send("reminders", "a", delay="1m")]),
        ["a", "old"],
    ),
    "send if pending": (
        lambda template, old: template.send_if([Send("reminders", "a"), Send("reminders", "b")], pending=old.handle),
        ["a", "b", "old"],
    ),
}


SOME = 131
"""Bytes between two kills. Each record of a change has more, so some kills are within each of them."""


@pytest.mark.parametrize("first", ["15m", "on the wheel", "level"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_kill_within_each_record_leaves_all_of_a_change_or_nothing(name: str, first: str, tmp_path: Path) -> None:
    check_kills_of_a_change(name, first, tmp_path, SOME)


@pytest.mark.thorough
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize(
    ("name", "first"), [*((name, "15m") for name in CHANGES), ("replace", "on the wheel"), ("replace", "level")]
)
def test_a_kill_at_any_byte_leaves_all_of_a_change_or_nothing(name: str, first: str, tmp_path: Path) -> None:
    check_kills_of_a_change(name, first, tmp_path, 1)


def check_kills_of_a_change(name: str, first: str, folder: Path, step: int) -> None:
    """Kill the process after each *step* bytes of a change, and check what is delivered later."""
    change, after = CHANGES[name]
    outcomes = []
    for written in itertools.count(0, step):
        path, clock = folder / str(written), VirtualClock()
        broker = EmbeddedBroker(path, SMALL, clock)
        broker.start()
        template = RocketMQTemplate(broker)
        options: Any = {"delay_level": 5} if first == "level" else {"delay": "15m"}
        old = template.sync_send("reminders", "old", pending_key=KEY, **options)
        if first == "on the wheel":
            Harness(broker).advance("1ms")
        with killed_after(broker, written) as file:
            change(template, old)
        kill(broker.store)
        broker.delayed.timers.close()  # type: ignore[attr-defined]
        with EmbeddedBroker(path, SMALL, clock) as reopened:
            Harness(reopened).advance("3h")
            outcomes.append(delivered(reopened))
        rmtree(path)
        if written >= file.size_of_write:
            break

    assert outcomes == [["old"]] * (len(outcomes) - 1) + [after]


@pytest.mark.parametrize("name", COMMITS)
def test_a_kill_within_each_record_of_a_commit_leaves_the_transaction_open_or_decided(
    name: str, tmp_path: Path
) -> None:
    check_kills_of_a_commit(name, tmp_path, SOME)


@pytest.mark.thorough
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("name", COMMITS)
def test_a_kill_at_any_byte_of_a_commit_leaves_the_transaction_open_or_decided(name: str, tmp_path: Path) -> None:
    check_kills_of_a_commit(name, tmp_path, 1)


def check_kills_of_a_commit(name: str, folder: Path, step: int) -> None:
    for written in itertools.count(0, step):
        path, clock = folder / str(written), VirtualClock()
        broker = EmbeddedBroker(path, SMALL, clock)
        broker.start()
        template = RocketMQTemplate(broker)
        commit: Any = _commit(template, COMMITS[name](send(template, "old")))
        with killed_after(broker, written) as file:
            commit()
        kill(broker.store)
        broker.delayed.timers.close()  # type: ignore[attr-defined]
        is_whole = written >= file.size_of_write
        with EmbeddedBroker(path, SMALL, clock) as reopened:
            assert reopened.engine.transactions.open_count == (not is_whole)
            Harness(reopened).advance("30m")
            assert delivered(reopened) == (["new"] if is_whole else ["old"])
        rmtree(path)
        if is_whole:
            break


# --- timers that are replaced while their properties are in memory ------------------------------------


def is_on_wheel(template: RocketMQTemplate) -> None:
    advance(template, 0.001)


def is_not_read_yet(template: RocketMQTemplate) -> None:
    """Leave the messages of the timer topic where they are."""


def reopened(broker: EmbeddedBroker, clock: VirtualClock, *, checkpoint: bool) -> EmbeddedBroker:
    """Kill a broker, perhaps after a checkpoint, and start it again."""
    if checkpoint:
        broker.store.take_checkpoint()
    kill(broker.store)
    broker.delayed.timers.close()  # type: ignore[attr-defined]
    broker = EmbeddedBroker(broker.store.store_files.root, SMALL, clock)  # type: ignore[attr-defined]
    broker.start()
    return broker


@pytest.mark.parametrize("checkpoint", [False, True], ids=["no checkpoint", "checkpoint"])
@pytest.mark.parametrize("read", [is_on_wheel, is_not_read_yet])
def test_a_replaced_timer_stays_replaced_after_kills(
    tmp_path: Path, read: Callable[[RocketMQTemplate], None], checkpoint: bool
) -> None:
    """Whether the wheel had read it or not. The second kill follows a start that has read the first one's files."""
    clock = VirtualClock()
    broker = EmbeddedBroker(tmp_path, SMALL, clock)
    broker.start()
    template = RocketMQTemplate(broker)
    template.sync_send("reminders", "other", delay="20m")
    is_on_wheel(template)
    send(template, "old", delay="10m")
    read(template)

    for number in range(3):
        result = send(template, str(number), delay="15m")
        assert len(result.replaced) == 1
        assert template.cancel(result.replaced[0]).status is ScheduleChangeStatus.CANCELLED  # it is already
    broker = reopened(broker, clock, checkpoint=checkpoint)
    assert broker.delayed.count_pending(PendingQuery()).total == 2
    broker = reopened(broker, clock, checkpoint=checkpoint)

    Harness(broker).advance("1h")
    assert delivered(broker) == ["2", "other"]
    broker.close()


@pytest.mark.parametrize("read", [is_on_wheel, is_not_read_yet])
def test_the_numbers_of_pending_messages_are_right_after_replacements(
    template: RocketMQTemplate, read: Callable[[RocketMQTemplate], None]
) -> None:
    broker: Any = template.broker
    template.sync_send("reminders", "other", delay="20m")
    is_on_wheel(template)
    for _ in range(3):
        send(template, "x")
        read(template)
        assert broker.delayed.waiting_count() == 2

    broker.store.take_checkpoint()

    assert broker.delayed.waiting_count() == 2
    assert dict(broker.delayed.timers._metrics.counts()) == {"reminders": 2}


def test_a_cancel_ends_what_memory_knows_of_a_key(template: RocketMQTemplate) -> None:
    template.sync_send("reminders", "other", delay="20m")
    is_on_wheel(template)
    old = send(template, "old", keys="4466")
    template.cancel(key="4466")

    new = send(template, "new")
    assert new.replaced == ()
    moved = template.reschedule(new.handle, delay="1h")
    assert len(moved.handles) == 1
    assert len(send(template, "newest").replaced) == 1
    advance(template, 7_200)
    assert delivered(template.broker) == ["newest", "other"]
    assert old.handle != new.handle


def test_a_timer_from_a_clock_that_was_ahead_is_replaced_once(template: RocketMQTemplate) -> None:
    """The wheel reads it after the clock was set back: it is parked then, in a slot that its properties do not name."""
    clock: Any = template.broker.clock
    template.sync_send("reminders", "other", delay="20m")
    is_on_wheel(template)
    now_ms = clock.now_ms()
    clock.set_ms(now_ms + 30 * 86_400_000)
    send(template, "old")
    clock.set_ms(now_ms)
    is_on_wheel(template)

    assert len(send(template, "new", delay="31d").replaced) == 1

    advance(template, 40 * 86_400)
    assert delivered(template.broker) == ["new", "other"]


def test_a_delete_marker_is_the_same_however_the_pending_message_was_found(template: RocketMQTemplate) -> None:
    """RocketMQ reads it. One replaces a message whose properties are in memory, the other one reads its record."""
    broker: Any = template.broker
    template.sync_send("reminders", "other", delay="20m")
    is_on_wheel(template)
    markers = []
    for in_memory in (True, False):
        send(template, "old", keys="4466 4467")
        if not in_memory:
            broker.store.index.catch_up()
            broker.store.index.recent_keys._keyed.clear()
        send(template, "new", delay="30m")
        units = broker.store.consume_queue("rmq_sys_wheel_timer", 0).unit_tuples(0, 100)
        record = broker.store.read(*units[-1][:2])
        markers.append((decode_properties(record.properties_bytes), record.topic, record.body, record.queue_id))
        template.cancel(key="4466")
        template.cancel(send(template, "last").handle)

    changing = ("UNIQ_KEY", "TIMER_DEL_UNIQKEY", "REAL_QID")
    first, other = ({name: each for name, each in marker[0].items() if name not in changing} for marker in markers)
    assert first == other
    assert markers[0][1:] == markers[1][1:]
    assert all(marker[0]["UNIQ_KEY"] == marker[0]["TIMER_DEL_UNIQKEY"] for marker in markers)


# --- a model ----------------------------------------------------------------------------------------

actions = st.lists(
    st.tuples(
        st.sampled_from(["replace", "keep", "postpone", "refuse", "cancel", "advance", "restart", "kill"]),
        st.sampled_from(["1s", "5s", "2h"]),
    ),
    max_size=25,
)


@given(actions)
@settings(max_examples=25, deadline=None)
def test_a_key_has_the_message_that_a_model_has(plan: list[tuple[str, str]]) -> None:
    """Of one key: at most one message is pending, each one has one outcome, and restarts change nothing."""
    seconds = {"1s": 1, "5s": 5, "2h": 7_200}
    clock = VirtualClock()
    pending: tuple[str, int, SendResult] | None = None
    expected: list[str] = []
    with TemporaryDirectory() as folder:
        broker = EmbeddedBroker(folder, SMALL, clock)
        broker.start()
        for number, (action, delay) in enumerate(plan):
            template, body = RocketMQTemplate(broker), f"{number:03d}"
            due_ms = clock.now_ms() + seconds[delay] * 1_000
            if action == "advance":
                Harness(broker).advance(delay)
                if pending is not None and pending[1] <= clock.now_ms():
                    expected.append(pending[0])
                    pending = None
            elif action in ("restart", "kill"):
                if action == "restart":
                    broker.close()
                else:
                    kill(broker.store)
                    broker.delayed.timers.close()  # type: ignore[attr-defined]
                broker = EmbeddedBroker(folder, SMALL, clock)
                broker.start()
            elif action == "cancel":
                if pending is not None:
                    change = template.cancel(pending[2].handle, then=[Send("reminders", body)])
                    assert change.status is ScheduleChangeStatus.CANCELLED
                    expected.append(body)
                    pending = None
            elif action == "refuse" and pending is not None:
                with pytest.raises(PendingKeyError):
                    send(template, body, action, delay)
            else:
                result = send(template, body, action, delay)
                if pending is None or action == "replace":
                    pending = (body, due_ms, result)
                elif action == "postpone":
                    pending = (pending[0], due_ms, result)
            if number % 3 == 0:  # a listing puts all on the wheel; without it the next action finds them in the topic
                listed = [each.deliver_ms for each in RocketMQTemplate(broker).pending("reminders").messages]
                assert listed == ([] if pending is None else [pending[1]])
        Harness(broker).advance("3h")
        assert delivered(broker) == sorted(expected + ([] if pending is None else [pending[0]]))
        broker.close()


def test_threads_that_race_for_one_key_and_its_releases_leave_one_outcome_each(template: RocketMQTemplate) -> None:
    """Each message is delivered once or replaced once, in whatever order the threads run."""

    def race(thread: int) -> list[SendResult]:
        return [send(template, f"{thread}-{number}", delay="30ms") for number in range(60)]

    def release() -> None:
        for _ in range(60):
            advance(template, 0.010)

    with ThreadPoolExecutor(5) as pool:
        releases = pool.submit(release)
        results = [result for part in pool.map(race, range(4)) for result in part]
        releases.result()
    assert len(due_in_s(template)) <= 1
    advance(template, 1)

    replaced = [handle for result in results for handle in result.replaced]
    assert len(set(replaced)) == len(replaced)
    names = {result.handle: f"{thread}-{number}" for result, (thread, number) in zip(results, _names(), strict=True)}
    assert delivered(template.broker) == sorted(name for handle, name in names.items() if handle not in replaced)


def _names() -> Iterator[tuple[int, int]]:
    return itertools.product(range(4), range(60))
