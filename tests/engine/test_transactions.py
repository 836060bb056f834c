"""Transactions of the embedded broker, beyond the contract: files, crashes, late ends, and discarded messages."""

from __future__ import annotations

import errno
import itertools
import shutil
import tempfile
import threading
from collections.abc import Iterator
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
from mqtemplate.engine.half_messages import TRANSACTION_GROUP
from mqtemplate.engine.open_transactions import OpProgress
from mqtemplate.errors import DelayError, DestinationError, MessageError, MQTemplateError
from mqtemplate.message import Message, MessageExt, MessageQueue, Property
from mqtemplate.record.layout import SysFlag
from mqtemplate.results import HalfMessage, PullStatus, TransactionState
from mqtemplate.store.files.folder_store_files import FolderStoreFiles
from mqtemplate.testing import Harness, messages_in
from mqtemplate.topics import HALF_TOPIC, OP_TOPIC, TRANS_CHECK_MAX_TIME_TOPIC
from tests.store.faulty_disk import FaultyDisk, never, once
from tests.store.small_store import kill

SMALL = EmbeddedSettings(
    mapped_file_size_commit_log=1 << 16, mapped_file_size_consume_queue=2_000, max_message_size=1 << 14
)
GROUP = "shop"
COMMIT, ROLLBACK, UNKNOWN = TransactionState.COMMIT, TransactionState.ROLLBACK, TransactionState.UNKNOWN


@pytest.fixture
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(None, SMALL, VirtualClock()) as broker:
        yield broker


@pytest.fixture
def harness(broker: EmbeddedBroker) -> Harness:
    return Harness(broker)


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
        broker.end_transaction(half, state)
    except Killed:
        return True
    finally:
        log._file = file
    return False


def send_half(broker: EmbeddedBroker, body: bytes = b"order", **properties: str) -> HalfMessage:
    return broker.send_half(Message("orders", body, properties), GROUP)


def bodies(broker: EmbeddedBroker, topic: str = "orders") -> list[bytes]:
    return sorted(message.body for message in messages_in(broker, topic))


def read_all(broker: EmbeddedBroker, topic: str) -> list[MessageExt]:
    """Return all messages of queue 0, also of a system topic."""
    queue = MessageQueue(topic, broker.name, 0)
    return broker.pull(queue, broker.min_offset(queue), 1_000).messages


# --- records ---------------------------------------------------------------------------------------


def test_a_half_message_and_its_op_message_have_the_form_of_rocketmq(broker: EmbeddedBroker) -> None:
    """Source: ``TransactionalMessageBridge``: real topic and queue as properties, queue 0, no transaction flag."""
    half = send_half(broker, TAGS="paid")
    broker.end_transaction(half, COMMIT)

    [stored], [op] = read_all(broker, HALF_TOPIC), read_all(broker, OP_TOPIC)
    target = half.send_result.message_queue
    assert stored.properties == {
        "TAGS": "paid",
        "UNIQ_KEY": half.send_result.msg_id,
        "TRAN_MSG": "true",
        "PGROUP": GROUP,
        "__transactionId__": half.send_result.msg_id,
        "REAL_TOPIC": "orders",
        "REAL_QID": str(target.queue_id),
    }
    assert stored.sys_flag & SysFlag.TRANSACTION_MASK == 0
    assert (half.send_result.queue_offset, half.send_result.offset_msg_id) == (0, stored.offset_msg_id)
    assert (op.tags, op.body) == ("d", b"0,")


def test_a_committed_message_refers_to_its_transaction(broker: EmbeddedBroker) -> None:
    half = send_half(broker)

    broker.end_transaction(half, COMMIT)

    [message] = messages_in(broker, "orders")
    [stored] = read_all(broker, HALF_TOPIC)
    assert message.sys_flag & SysFlag.TRANSACTION_MASK == SysFlag.TRANSACTION_COMMIT
    assert message.prepared_transaction_offset == stored.physical_offset
    assert message.transaction_id == half.send_result.transaction_id
    assert Property.REAL_TOPIC not in message.properties
    assert message.user_properties == {}


def test_a_message_without_a_transaction_has_no_transaction_id(broker: EmbeddedBroker) -> None:
    broker.send(Message("orders", b"plain"))

    assert messages_in(broker, "orders")[0].transaction_id is None


def test_broker_properties_of_a_producer_have_no_effect(broker: EmbeddedBroker) -> None:
    """A producer that copies the properties of a received message must not change the destination."""
    half = send_half(broker, REAL_TOPIC="elsewhere", REAL_QID="9", TRANSACTION_CHECK_TIMES="15", colour="red")

    broker.end_transaction(half, COMMIT)

    [message] = messages_in(broker, "orders")
    assert message.properties["colour"] == "red"
    assert "TRANSACTION_CHECK_TIMES" not in message.properties


def test_a_send_to_the_topics_of_transactions_is_refused(broker: EmbeddedBroker) -> None:
    for topic in (HALF_TOPIC, OP_TOPIC):
        with pytest.raises(DestinationError, match="belongs to the broker"):
            broker.queues(topic)
    with pytest.raises(DestinationError, match="belongs to the broker"):
        broker.send(Message(TRANS_CHECK_MAX_TIME_TOPIC, b"x"))


# --- ends ------------------------------------------------------------------------------------------


def test_a_transaction_has_one_end(broker: EmbeddedBroker, harness: Harness) -> None:
    half = send_half(broker)

    with capture_logs() as logs:
        for state in (COMMIT, COMMIT, ROLLBACK):
            broker.end_transaction(half, state)
    harness.advance("1h")

    assert bodies(broker) == [b"order"]
    assert [entry["event"] for entry in logs].count("transaction.already_ended") == 2


def test_a_producer_may_end_a_transaction_after_checks_with_the_first_offset(
    broker: EmbeddedBroker, harness: Harness
) -> None:
    """A slow local transaction: two checks stored the half message again, and the producer knows the first offset."""
    checker = Checker(UNKNOWN)
    broker.check_transactions(GROUP, checker)
    half = send_half(broker)
    harness.advance("40s")

    broker.end_transaction(half, COMMIT)
    harness.advance("1h")

    assert len(checker) == 2
    assert bodies(broker) == [b"order"]
    assert read_all(broker, TRANS_CHECK_MAX_TIME_TOPIC) == []


def test_an_end_by_another_group_is_refused(broker: EmbeddedBroker) -> None:
    half = send_half(broker)

    with pytest.raises(MessageError, match="belongs to producer group 'shop', 'others' cannot end it"):
        broker.end_transaction(HalfMessage(half.message, "others", half.send_result), COMMIT)

    broker.end_transaction(half, COMMIT)
    assert bodies(broker) == [b"order"]


@pytest.mark.parametrize(
    ("half_offset", "physical_offset", "sentence"),
    [(7, 0, "there is no half message 7; this broker has 0..0"), (0, 12, "is at physical offset 0, not at 12")],
)
def test_an_end_of_an_unknown_half_message_is_refused(
    broker: EmbeddedBroker, half_offset: int, physical_offset: int, sentence: str
) -> None:
    send_half(broker)

    with pytest.raises(MessageError, match=sentence):
        broker.engine.transactions.end(half_offset, physical_offset, GROUP, COMMIT)


def test_a_delay_that_is_not_supported_is_refused_by_the_send(broker: EmbeddedBroker) -> None:
    with pytest.raises(DelayError, match="allowed are"):
        send_half(broker, TIMER_DELAY_MS=str(41 * 86_400_000))

    assert broker.engine.transactions.open_count == 0


# --- checks ----------------------------------------------------------------------------------------


def test_checks_are_sent_after_6_s_and_then_each_30_s(broker: EmbeddedBroker, harness: Harness) -> None:
    start_ms, checked_ms = broker.clock.now_ms(), []

    def check(message: MessageExt) -> TransactionState:
        checked_ms.append(broker.clock.now_ms() - start_ms)
        return UNKNOWN

    broker.check_transactions(GROUP, check)
    send_half(broker)
    harness.advance("2m")

    assert checked_ms == [6_000, 36_000, 66_000, 96_000]


def test_a_message_may_set_the_time_of_its_first_check(broker: EmbeddedBroker, harness: Harness) -> None:
    """By the property ``CHECK_IMMUNITY_TIME_IN_SECONDS``, which Java clients set."""
    checker = Checker(UNKNOWN)
    broker.check_transactions(GROUP, checker)
    send_half(broker, b"slow", CHECK_IMMUNITY_TIME_IN_SECONDS="60")
    send_half(broker, b"no number", CHECK_IMMUNITY_TIME_IN_SECONDS="soon")

    harness.advance("59s")
    before = [message.body for message in checker]
    harness.advance("1s")

    assert before == [b"no number", b"no number"]
    assert checker[-1].body == b"slow"


def test_after_15_checks_the_message_is_discarded(broker: EmbeddedBroker, harness: Harness) -> None:
    checker = Checker(UNKNOWN)
    broker.check_transactions(GROUP, checker)
    half = send_half(broker, TAGS="paid")

    with capture_logs() as logs:
        harness.advance("1h")

    [discarded] = messages_in(broker, TRANS_CHECK_MAX_TIME_TOPIC)
    [event] = [entry for entry in logs if entry["event"] == "transaction.discarded"]
    assert [message.properties["TRANSACTION_CHECK_TIMES"] for message in checker] == [str(n) for n in range(1, 16)]
    assert (discarded.body, discarded.tags, discarded.msg_id) == (b"order", "paid", half.send_result.msg_id)
    assert discarded.properties["REAL_TOPIC"] == "orders"
    assert (event["topic"], event["reason"]) == ("orders", "no answer to 15 transaction checks")
    assert bodies(broker) == []
    assert broker.engine.transactions.open_count == 0


def test_a_check_without_a_connected_producer_does_not_count(broker: EmbeddedBroker, harness: Harness) -> None:
    """After a day without a producer the transaction is checked as soon as one connects."""
    send_half(broker)
    harness.advance("1d")
    checker = Checker(COMMIT)

    broker.check_transactions(GROUP, checker)
    harness.advance("1ms")

    assert checker[0].properties["TRANSACTION_CHECK_TIMES"] == "1"
    assert bodies(broker) == [b"order"]


def test_a_transaction_without_a_producer_is_discarded_after_the_retention_time(
    broker: EmbeddedBroker, harness: Harness
) -> None:
    send_half(broker)

    harness.advance("73h")

    assert bodies(broker, TRANS_CHECK_MAX_TIME_TOPIC) == [b"order"]


def test_a_closed_checker_gets_no_check(broker: EmbeddedBroker, harness: Harness) -> None:
    checker = Checker(UNKNOWN)
    registration = broker.check_transactions(GROUP, checker)
    send_half(broker)
    harness.advance("6s")

    registration.close()
    harness.advance("1h")

    assert len(checker) == 1
    assert broker.engine.transactions.open_count == 1


def test_a_checker_that_returns_no_state_is_logged(broker: EmbeddedBroker, harness: Harness) -> None:
    broker.check_transactions(GROUP, lambda message: "yes")  # type: ignore[arg-type,return-value]
    send_half(broker)

    with capture_logs() as logs:
        harness.advance("6s")

    assert [entry["result"] for entry in logs if entry["event"] == "transaction.checker_failed"] == ["'yes'"]
    assert broker.engine.transactions.open_count == 1


def test_on_a_system_clock_a_checker_runs_in_its_own_thread() -> None:
    """The broker continues while a checker waits."""
    quick = EmbeddedSettings(transaction_timeout_ms=1, transaction_check_interval_ms=60_000)
    names: SimpleQueue[str] = SimpleQueue()
    go_on = threading.Event()

    def check(message: MessageExt) -> TransactionState:
        names.put(threading.current_thread().name)
        assert go_on.wait(10)
        return COMMIT

    with EmbeddedBroker(None, quick, SystemClock()) as broker:
        delivered: SimpleQueue[None] = SimpleQueue()
        broker.store.watch("orders", lambda: delivered.put(None))
        broker.check_transactions(GROUP, check)
        send_half(broker)
        name = names.get(timeout=10)
        broker.send(Message("others", b"another"))
        go_on.set()
        delivered.get(timeout=10)
        found = bodies(broker)

    assert name.startswith("mqtemplate-check-shop")
    assert found == [b"order"]


def test_the_metrics_count_transactions(broker: EmbeddedBroker, harness: Harness) -> None:
    broker.check_transactions(GROUP, Checker(UNKNOWN))
    broker.end_transaction(send_half(broker), COMMIT)
    broker.end_transaction(send_half(broker), ROLLBACK)
    send_half(broker)
    harness.advance("40s")
    halfway = broker.metrics.snapshot()
    harness.advance("1h")
    at_end = broker.metrics.snapshot()

    names = ["open", "committed", "rolled_back", "checked", "discarded"]
    assert [halfway[f"transaction.{name}"] for name in names] == [1, 1, 1, 2, 0]
    assert [at_end[f"transaction.{name}"] for name in names] == [0, 1, 1, 15, 1]


# --- restarts --------------------------------------------------------------------------------------


def test_the_progress_is_stored_as_by_rocketmq(broker: EmbeddedBroker, harness: Harness) -> None:
    """Committed offsets of the group ``CID_RMQ_SYS_TRANS``: the first open half message, and the first op message that
    is needed for it."""
    first, second, third = (send_half(broker, b"%d" % number) for number in range(3))

    broker.end_transaction(second, COMMIT)
    harness.advance("1s")
    with_one_open = [broker.engine.offsets.offset(TRANSACTION_GROUP, topic, 0) for topic in (HALF_TOPIC, OP_TOPIC)]
    broker.end_transaction(first, ROLLBACK)
    broker.end_transaction(third, COMMIT)
    harness.advance("1s")
    with_none_open = [broker.engine.offsets.offset(TRANSACTION_GROUP, topic, 0) for topic in (HALF_TOPIC, OP_TOPIC)]

    assert with_one_open == [0, 0]
    assert with_none_open == [3, 3]


def test_a_broker_without_transactions_stores_no_progress_of_them(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path, SMALL, VirtualClock()) as broker:
        broker.send(Message("orders", b"plain"))
        broker.commit_offset("billing", MessageQueue("orders", broker.name, 0), 1)

    written = "".join(path.read_text() for path in (tmp_path / "config").glob("*.json"))
    assert "billing" in written
    assert "TRANS" not in written


def test_the_number_of_checks_survives_restarts(tmp_path: Path) -> None:
    clock = VirtualClock()
    checker = Checker(UNKNOWN)
    for _ in range(3):
        with EmbeddedBroker(tmp_path, SMALL, clock) as broker:
            broker.check_transactions(GROUP, checker)
            if not checker:
                send_half(broker)
            Harness(broker).advance("31s")

    counts = [message.properties["TRANSACTION_CHECK_TIMES"] for message in checker]
    assert counts == [str(number) for number in range(1, len(checker) + 1)]
    assert len(checker) >= 3


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
                again.check_transactions(GROUP, checker)
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
        again.check_transactions(GROUP, checker)
        Harness(again).advance("2m")
        again.end_transaction(half, COMMIT)
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
        again.end_transaction(first, COMMIT)
        Harness(again).advance("1h")
        delivered = bodies(again)

    assert (open_now, delivered) == (1, [b"order"])


def test_the_start_logs_the_number_of_open_transactions(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path, SMALL, VirtualClock()) as broker:
        send_half(broker)

    with capture_logs() as logs, EmbeddedBroker(tmp_path, SMALL, VirtualClock()):
        pass

    assert [entry["count"] for entry in logs if entry["event"] == "transaction.restored"] == [1]


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
            broker.end_transaction(send_half(broker, body), state)
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
        broker.check_transactions(GROUP, lambda message: FINAL_STATES[message.body])
        first = len(disk.calls)
        disk.judge = once(first + at, errno.ENOSPC)
        send_and_end(broker, harness)
        has_failed = len(disk.calls) > first + at
        disk.judge = never

        harness.advance("40s")
        now = bodies(broker)
        broker.close()
        with EmbeddedBroker(folder, SMALL, clock) as again:
            again.check_transactions(GROUP, lambda message: FINAL_STATES[message.body])
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
        self.broker.check_transactions(GROUP, self.check)

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
        self.halves.append(self.broker.send_half(Message("orders", body, dict(delay)), GROUP))
        self.open.add(body)

    @precondition(lambda self: self.halves)
    @rule(index=indices, state=st.sampled_from(TransactionState))
    def end(self, index: int, state: TransactionState) -> None:
        half = self.half(index)
        self.broker.end_transaction(half, state)
        self.record_end(half.message.body, state, half.message.properties)

    @precondition(lambda self: self.halves)
    @rule(index=indices, state=st.sampled_from([COMMIT, ROLLBACK]))
    def decide(self, index: int, state: TransactionState) -> None:
        """Set the state that the next check returns."""
        self.decisions.setdefault(self.half(index).message.body, state)

    @rule(seconds=st.sampled_from([1, 7, 31, 100]))
    def wait(self, seconds: int) -> None:
        self.harness.advance(seconds * 1_000)

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
            while (page := self.broker.pull(queue, at)).pull_status is not PullStatus.NO_NEW_MSG:
                found += [message.body for message in page.messages]
                at = page.next_begin_offset
        assert sorted(found) == expected


TestTransactions = Transactions.TestCase
TestTransactions.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
