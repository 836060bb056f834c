"""Transactions of the embedded broker, beyond the contract: files, crashes, late ends, and discarded messages."""

from __future__ import annotations

import errno
import itertools
import shutil
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from structlog.testing import capture_logs

from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import SystemClock, VirtualClock
from mqtemplate.engine.half_messages import OpProgress
from mqtemplate.errors import MQTemplateError
from mqtemplate.message import Message, MessageExt, MessageQueue
from mqtemplate.results import HalfMessage, PullStatus, TransactionState
from mqtemplate.store.files.folder_store_files import FolderStoreFiles
from mqtemplate.testing import Harness, messages_in
from mqtemplate.topics import HALF_TOPIC
from tests.store.faulty_disk import FaultyDisk, never, once
from tests.store.small_store import kill
from tests.waiting import PATIENCE_S

SMALL = EmbeddedSettings(
    mapped_file_size_commit_log=1 << 16, mapped_file_size_consume_queue=2_000, max_message_size=1 << 14
)
GROUP = "shop"
COMMIT, ROLLBACK, UNKNOWN = TransactionState.COMMIT, TransactionState.ROLLBACK, TransactionState.UNKNOWN


class Checker(list[MessageExt]):
    """A transaction checker that records the checked messages and returns one state."""

    def __init__(self, state: TransactionState) -> None:
        super().__init__()
        self.state = state

    def __call__(self, message: MessageExt) -> TransactionState:
        self.append(message)
        return self.state


class Killed(BaseException):
    """Stands for a kill in the middle of an append; no code catches it."""


class PartlyWritten:
    """A file whose process is killed when a part of a write is done."""

    def __init__(self, file: Any, written: float) -> None:
        self._file = file
        self._written = written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, at: int, data: bytes) -> None:
        self._file.write(at, data[: round(len(data) * self._written)])
        raise Killed

    write_mapped = write


def kill_during_end(broker: EmbeddedBroker, half: HalfMessage, state: TransactionState, written: float) -> bool:
    """End a transaction in a process that is killed after this part of the append.

    Returns:
        True if the process was killed; False if there was no append.
    """
    log = broker.store._commit_log
    file = log._file
    log._file = PartlyWritten(file, written)  # type: ignore[assignment]
    try:
        broker.transactions.end_transaction(half, state)
    except Killed:
        return True
    finally:
        log._file = file
    return False


def send_half(broker: EmbeddedBroker, body: bytes = b"order", **properties: str) -> HalfMessage:
    return broker.sends.send_half(Message("orders", body, properties), GROUP)


def bodies(broker: EmbeddedBroker, topic: str = "orders") -> list[bytes]:
    return sorted(message.body for message in messages_in(broker, topic))


def read_all(broker: EmbeddedBroker, topic: str) -> list[MessageExt]:
    """Return all messages of queue 0, also of a system topic."""
    queue = MessageQueue(topic, broker.name, 0)
    return broker.reader.pull(queue, broker.reader.min_offset(queue), 1_000).messages


# --- checks ----------------------------------------------------------------------------------------


def test_on_a_system_clock_a_checker_runs_in_its_own_thread() -> None:
    """The broker continues while a checker waits."""
    quick = EmbeddedSettings(transaction_timeout_ms=1, transaction_check_interval_ms=60_000)
    names: SimpleQueue[str] = SimpleQueue()
    go_on = threading.Event()

    def check(message: MessageExt) -> TransactionState:
        names.put(threading.current_thread().name)
        assert go_on.wait(PATIENCE_S)
        return COMMIT

    with EmbeddedBroker(None, quick, SystemClock()) as broker:
        delivered: SimpleQueue[None] = SimpleQueue()
        broker.store.watch("orders", lambda: delivered.put(None))
        broker.transactions.check_transactions(GROUP, check)
        send_half(broker)
        name = names.get(timeout=PATIENCE_S)
        broker.sends.send(Message("others", b"another"))
        go_on.set()
        delivered.get(timeout=PATIENCE_S)
        found = bodies(broker)

    assert name.startswith("mqtemplate-check-shop")
    assert found == [b"order"]


# --- restarts --------------------------------------------------------------------------------------


def test_a_kill_at_any_byte_of_a_commit_delivers_the_message_once(tmp_path: Path) -> None:
    """The process is killed when 0, 3, 6 … percent of the op message and the committed message are written."""
    clock = VirtualClock()
    source = tmp_path / "source"
    broker = EmbeddedBroker(source, SMALL, clock)
    broker.start()
    send_half(broker, b"before")
    half = send_half(broker, bytes(100))
    kill(broker.store)
    for percent in (*range(0, 99, 3), 99, 100):
        folder = tmp_path / "copy"
        shutil.copytree(source, folder)
        broker = EmbeddedBroker(folder, SMALL, clock)
        broker.start()
        assert kill_during_end(broker, half, COMMIT, percent / 100)
        kill(broker.store)
        checker = Checker(COMMIT)

        for _ in range(2):  # the second start reads what the first one wrote
            with EmbeddedBroker(folder, SMALL, clock) as again:
                again.transactions.check_transactions(GROUP, checker)
                Harness(again).advance("10s")
                delivered = bodies(again)

        assert delivered == [bytes(100), b"before"], f"{percent} percent were written"
        assert len(checker) == (1 if percent == 100 else 2)
        shutil.rmtree(folder)


@pytest.mark.parametrize("delay", [{}, {"DELAY": "3"}, {"TIMER_DELAY_MS": "60000"}], ids=str)
def test_a_commit_whose_op_message_is_missing_is_not_repeated(tmp_path: Path, delay: dict[str, str]) -> None:
    """RocketMQ writes the op message up to three seconds after the message; a power loss may remove it too."""
    clock = VirtualClock()
    broker = EmbeddedBroker(tmp_path, SMALL, clock)
    broker.start()
    half = send_half(broker, **delay)
    [stored] = read_all(broker, HALF_TOPIC)
    record = broker.store.read_at(stored.physical_offset)
    assert record is not None
    broker.store.put(broker.engine.drafts.make_committed(record, clock.now_ms()))
    kill(broker.store)

    checker = Checker(COMMIT)
    with capture_logs() as logs, EmbeddedBroker(tmp_path, SMALL, clock) as again:
        again.transactions.check_transactions(GROUP, checker)
        Harness(again).advance("2m")
        again.transactions.end_transaction(half, COMMIT)
        delivered = bodies(again)

    assert delivered == [b"order"]
    assert checker == []
    assert [entry["event"] for entry in logs].count("transaction.op_missing") == 1


def test_two_half_messages_of_one_message_are_one_transaction(tmp_path: Path) -> None:
    """A producer repeated the send, or a power loss removed an op message. The newer half message remains."""
    clock = VirtualClock()
    broker = EmbeddedBroker(tmp_path, SMALL, clock)
    broker.start()
    first, _second = send_half(broker, UNIQ_KEY="0A"), send_half(broker, UNIQ_KEY="0A")
    kill(broker.store)

    with EmbeddedBroker(tmp_path, SMALL, clock) as again:
        open_now = again.engine.transactions.open_count
        again.transactions.end_transaction(first, COMMIT)
        Harness(again).advance("1h")
        delivered = bodies(again)

    assert (open_now, delivered) == (1, [b"order"])


def test_a_transaction_that_stays_open_needs_little_memory() -> None:
    """A hundred thousand op messages after one open half message: there are few spans, and none is skipped."""
    progress = OpProgress()
    for number in range(100_000):
        progress.add(number, number + 1)

    assert len(progress._spans) <= 4_096
    assert progress.first_needed(0) == 0
    needed = progress.first_needed(50_000)
    assert needed <= 49_999
    assert 49_999 - needed < 100
    assert progress.first_needed(200_000) == 100_000


ENDS = {b"commit": COMMIT, b"commit, too": COMMIT, b"rollback": ROLLBACK, b"open": UNKNOWN}
FINAL_STATES = {**ENDS, b"open": COMMIT}


def send_and_end(broker: EmbeddedBroker, harness: Harness) -> None:
    """Send and end four transactions. Errors of the disk are ignored."""
    for body, state in ENDS.items():
        with suppress(MQTemplateError):
            broker.transactions.end_transaction(send_half(broker, body), state)
        with suppress(MQTemplateError):
            harness.advance("3s")


def test_a_disk_that_fails_once_at_any_call_neither_loses_nor_repeats_a_transaction(tmp_path: Path) -> None:
    """The disk is full at one call of the four transactions, at each in turn. Checked also after a restart."""
    for at in itertools.count():
        folder, clock = tmp_path / str(at), VirtualClock()
        disk = FaultyDisk()
        broker = EmbeddedBroker(settings=SMALL, clock=clock, store_files=FolderStoreFiles(folder, disk))
        broker.start()
        harness = Harness(broker)
        broker.transactions.check_transactions(GROUP, lambda message: FINAL_STATES[message.body])
        first = len(disk.calls)
        disk.judge = once(first + at, errno.ENOSPC)
        send_and_end(broker, harness)
        has_failed = len(disk.calls) > first + at
        disk.judge = never

        harness.advance("40s")
        now = bodies(broker)
        broker.close()
        with EmbeddedBroker(folder, SMALL, clock) as again:
            again.transactions.check_transactions(GROUP, lambda message: FINAL_STATES[message.body])
            Harness(again).advance("40s")
            later = bodies(again)

        assert set(now) <= {b"commit", b"commit, too", b"open"}, f"call {at}"
        assert len(now) == len(set(now)) >= 2, f"call {at}"  # one half message may have been refused
        assert later == now, f"call {at}"
        shutil.rmtree(folder)
        if not has_failed:
            assert at > 5
            assert now == [b"commit", b"commit, too", b"open"]
            break


# --- random sequences ------------------------------------------------------------------------------

_FOLDERS = "/dev/shm" if Path("/dev/shm").is_dir() else None
indices = st.integers(0, 1_000)
delays = st.sampled_from([{}, {"DELAY": "1"}, {"TIMER_DELAY_MS": "2500"}])


class Transactions(RuleBasedStateMachine):
    """Random sends, ends, late and repeated ends, checks, time, restarts and kills, compared with a model in Python.

    In the model a message is open, committed, rolled back or discarded; a committed message has a deliver time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.logs = capture_logs()
        self.logs.__enter__()
        self.folder = Path(tempfile.mkdtemp(dir=_FOLDERS))
        self.clock = VirtualClock()
        self.count = itertools.count()
        self.halves: list[HalfMessage] = []
        self.open: set[bytes] = set()
        self.due_ms: dict[bytes, int] = {}
        self.decisions: dict[bytes, TransactionState] = {}
        self.open_broker()

    def open_broker(self) -> None:
        self.broker = EmbeddedBroker(self.folder / "store", SMALL, self.clock)
        self.broker.start()
        self.harness = Harness(self.broker)
        self.broker.transactions.check_transactions(GROUP, self.check)

    def teardown(self) -> None:
        """End all transactions, and check that each committed message is delivered once."""
        try:
            self.decisions |= dict.fromkeys(self.open, COMMIT)
            self.harness.advance("10m")
            self.check_delivered_messages()
            assert self.broker.engine.transactions.open_count == 0
            assert not self.open
        finally:
            self.broker.close()
            shutil.rmtree(self.folder)
            self.logs.__exit__(None, None, None)

    def check(self, message: MessageExt) -> TransactionState:
        body = message.body
        assert body in self.open, "checked a transaction that has ended"
        state = self.decisions.get(body, UNKNOWN)
        if message.properties["TRANSACTION_CHECK_TIMES"] == "15" and state is UNKNOWN:
            state = ROLLBACK  # the model has no discarded messages
        self.record_end(body, state, message.properties)
        return state

    def record_end(self, body: bytes, state: TransactionState, properties: dict[str, str]) -> None:
        if state is UNKNOWN or body not in self.open:
            return
        self.open.discard(body)
        if state is COMMIT:
            delay_ms = 1_000 if "DELAY" in properties else int(properties.get("TIMER_DELAY_MS", "0"))
            self.due_ms[body] = self.clock.now_ms() + delay_ms

    def half(self, index: int) -> HalfMessage:
        return self.halves[index % len(self.halves)]

    @rule(delay=delays)
    def send(self, delay: dict[str, str]) -> None:
        body = b"%d" % next(self.count)
        self.halves.append(self.broker.sends.send_half(Message("orders", body, dict(delay)), GROUP))
        self.open.add(body)

    @precondition(lambda self: self.halves)
    @rule(index=indices, state=st.sampled_from(TransactionState))
    def end(self, index: int, state: TransactionState) -> None:
        half = self.half(index)
        self.broker.transactions.end_transaction(half, state)
        self.record_end(half.message.body, state, half.message.properties)

    @precondition(lambda self: self.halves)
    @rule(index=indices, state=st.sampled_from([COMMIT, ROLLBACK]))
    def decide(self, index: int, state: TransactionState) -> None:
        """Set the state that the next check returns."""
        self.decisions.setdefault(self.half(index).message.body, state)

    @rule(seconds=st.sampled_from([1, 7, 31, 100]))
    def wait(self, seconds: int) -> None:
        self.harness.advance(f"{seconds}s")

    @rule()
    def restart(self) -> None:
        self.broker.close()
        self.open_broker()

    @rule()
    def kill(self) -> None:
        kill(self.broker.store)
        self.open_broker()

    @precondition(lambda self: self.halves)
    @rule(index=indices, state=st.sampled_from([COMMIT, ROLLBACK]), cut=st.floats(0, 1))
    def kill_during_an_end(self, index: int, state: TransactionState, cut: float) -> None:
        """Kill the process during the append of an end, which was not acknowledged."""
        half = self.half(index)
        if kill_during_end(self.broker, half, state, cut):
            kill(self.broker.store)
            self.open_broker()
        self.confirm(half.message, state)

    def confirm(self, message: Message, state: TransactionState) -> None:
        """Record the end in the model if the append was complete."""
        if message.body not in {self.body_of(offset) for offset in list(self.broker.engine.transactions._open)}:
            self.record_end(message.body, state, message.properties)

    def body_of(self, half_offset: int) -> bytes:
        unit = self.broker.store.consume_queue(HALF_TOPIC, 0).unit(half_offset)
        return self.broker.store.read(unit.physical_offset, unit.size).body

    @invariant()
    def check_delivered_messages(self) -> None:
        now_ms = self.clock.now_ms()
        self.harness.run_until_idle()
        open_offsets = list(self.broker.engine.transactions._open)
        assert open_offsets == sorted(open_offsets)  # the progress is the first one
        expected = sorted(body for body, due_ms in self.due_ms.items() if due_ms <= now_ms)
        found = []
        for queue in self.broker.queues("orders"):
            at = 0
            while (page := self.broker.reader.pull(queue, at)).pull_status is not PullStatus.NO_NEW_MSG:
                found += [message.body for message in page.messages]
                at = page.next_begin_offset
        assert sorted(found) == expected


TestTransactions = Transactions.TestCase
TestTransactions.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
