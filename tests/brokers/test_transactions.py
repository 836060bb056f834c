"""Transactions of the embedded broker, beyond the contract: files, crashes, late answers, and giving up."""

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

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from structlog.testing import capture_logs

from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.brokers.embedded.transactions.progress import OpProgress
from mqtemplate.brokers.embedded.transactions.records import CHECK_MAX_TOPIC, TRANSACTION_GROUP
from mqtemplate.clock import SystemClock, VirtualClock
from mqtemplate.errors import DelayError, DestinationError, MessageError, MQTemplateError
from mqtemplate.message import Message, MessageExt, MessageQueue, Property
from mqtemplate.record.layout import SysFlag
from mqtemplate.results import HalfMessage, PullStatus, TransactionState
from mqtemplate.store import FolderStoreFiles
from mqtemplate.testing import Harness, messages_in
from mqtemplate.topics import HALF_TOPIC, OP_TOPIC
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


class Asked(list[MessageExt]):
    """A checker that notes what it is asked, and gives one answer."""

    def __init__(self, answer: TransactionState) -> None:
        super().__init__()
        self.answer = answer

    def __call__(self, message: MessageExt) -> TransactionState:
        self.append(message)
        return self.answer


class Died(BaseException):
    """What ends everything in the middle of an append; nothing catches it."""


def end_and_die(broker: EmbeddedBroker, half: HalfMessage, state: TransactionState, written: float) -> bool:
    """End a transaction in a process that is killed when this part of what is appended was written.

    Returns:
        Whether it died; it lives on if there was nothing to append.
    """
    log = broker.store._commit_log

    def write_some(data: bytes, *, through_map: bool) -> None:
        assert log._file is not None
        log._file.write(log._at, data[: round(len(data) * written)])
        raise Died

    log._write = write_some  # type: ignore[method-assign]
    try:
        broker.end_transaction(half, state)
    except Died:
        return True
    finally:
        del log._write  # type: ignore[attr-defined]
    return False


def send_half(broker: EmbeddedBroker, body: bytes = b"order", **properties: str) -> HalfMessage:
    return broker.send_half(Message("orders", body, properties), GROUP)


def bodies(broker: EmbeddedBroker, topic: str = "orders") -> list[bytes]:
    return sorted(message.body for message in messages_in(broker, topic))


def read_all(broker: EmbeddedBroker, topic: str) -> list[MessageExt]:
    """Also of topics that belong to the broker."""
    queue = MessageQueue(topic, broker.name, 0)
    return broker.pull(queue, broker.min_offset(queue), 1_000).messages


# --- what is written -------------------------------------------------------------------------------


def test_a_half_message_and_its_mark_have_rocketmqs_form(broker: EmbeddedBroker) -> None:
    """Source: ``TransactionalMessageBridge``: real topic and queue as properties, queue 0, no transaction flag."""
    half = send_half(broker, TAGS="paid")
    broker.end_transaction(half, COMMIT)

    [stored], [mark] = read_all(broker, HALF_TOPIC), read_all(broker, OP_TOPIC)
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
    assert (mark.tags, mark.body) == ("d", b"0,")


def test_a_committed_message_tells_of_its_transaction(broker: EmbeddedBroker) -> None:
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


def test_broker_properties_of_a_sender_change_nothing(broker: EmbeddedBroker) -> None:
    """Who copies the properties of a message it received must not send elsewhere."""
    half = send_half(broker, REAL_TOPIC="elsewhere", REAL_QID="9", TRANSACTION_CHECK_TIMES="15", colour="red")

    broker.end_transaction(half, COMMIT)

    [message] = messages_in(broker, "orders")
    assert message.properties["colour"] == "red"
    assert "TRANSACTION_CHECK_TIMES" not in message.properties


def test_the_topics_of_transactions_are_the_brokers_own(broker: EmbeddedBroker) -> None:
    for topic in (HALF_TOPIC, OP_TOPIC):
        with pytest.raises(DestinationError, match="belongs to the broker"):
            broker.queues(topic)
    with pytest.raises(DestinationError, match="belongs to the broker"):
        broker.send(Message(CHECK_MAX_TOPIC, b"x"))


# --- ends ------------------------------------------------------------------------------------------


def test_a_transaction_ends_once(broker: EmbeddedBroker, harness: Harness) -> None:
    half = send_half(broker)

    with capture_logs() as logs:
        for state in (COMMIT, COMMIT, ROLLBACK):
            broker.end_transaction(half, state)
    harness.advance("1h")

    assert bodies(broker) == [b"order"]
    assert [entry["event"] for entry in logs].count("transaction.has_ended") == 2


def test_an_end_after_the_question_was_asked_counts_and_ends_the_questions(
    broker: EmbeddedBroker, harness: Harness
) -> None:
    """A slow local transaction: it was asked for, and stored anew, twice before it ends by what it was told first."""
    asked = Asked(UNKNOWN)
    broker.check_transactions(GROUP, asked)
    half = send_half(broker)
    harness.advance("40s")

    broker.end_transaction(half, COMMIT)
    harness.advance("1h")

    assert len(asked) == 2
    assert bodies(broker) == [b"order"]
    assert read_all(broker, CHECK_MAX_TOPIC) == []


def test_another_groups_end_is_refused(broker: EmbeddedBroker) -> None:
    half = send_half(broker)

    with pytest.raises(MessageError, match="belongs to producer group 'shop', 'thieves' cannot end it"):
        broker.end_transaction(HalfMessage(half.message, "thieves", half.send_result), COMMIT)

    broker.end_transaction(half, COMMIT)
    assert bodies(broker) == [b"order"]


@pytest.mark.parametrize(
    ("half_offset", "physical_offset", "sentence"),
    [(7, 0, "there is no half message 7; this broker has 0..0"), (0, 12, "lies at physical offset 0, not at 12")],
)
def test_an_end_that_names_no_half_message_is_refused(
    broker: EmbeddedBroker, half_offset: int, physical_offset: int, sentence: str
) -> None:
    send_half(broker)

    with pytest.raises(MessageError, match=sentence):
        broker.transactions.end(half_offset, physical_offset, GROUP, COMMIT)


def test_a_delay_that_cannot_be_kept_is_refused_at_once(broker: EmbeddedBroker) -> None:
    with pytest.raises(DelayError, match="allowed are"):
        send_half(broker, TIMER_DELAY_MS=str(41 * 86_400_000))

    assert broker.transactions.open_count == 0


# --- questions -------------------------------------------------------------------------------------


def test_questions_come_after_6_s_and_then_each_30_s(broker: EmbeddedBroker, harness: Harness) -> None:
    began_ms, asked_ms = broker.clock.now_ms(), []

    def check(message: MessageExt) -> TransactionState:
        asked_ms.append(broker.clock.now_ms() - began_ms)
        return UNKNOWN

    broker.check_transactions(GROUP, check)
    send_half(broker)
    harness.advance("2m")

    assert asked_ms == [6_000, 36_000, 66_000, 96_000]


def test_a_message_may_name_its_own_time_of_the_first_question(broker: EmbeddedBroker, harness: Harness) -> None:
    """``CHECK_IMMUNITY_TIME_IN_SECONDS``, as Java clients send it."""
    asked = Asked(UNKNOWN)
    broker.check_transactions(GROUP, asked)
    send_half(broker, b"slow", CHECK_IMMUNITY_TIME_IN_SECONDS="60")
    send_half(broker, b"no number", CHECK_IMMUNITY_TIME_IN_SECONDS="soon")

    harness.advance("59s")
    before = [message.body for message in asked]
    harness.advance("1s")

    assert before == [b"no number", b"no number"]
    assert asked[-1].body == b"slow"


def test_after_15_questions_the_message_is_put_aside(broker: EmbeddedBroker, harness: Harness) -> None:
    asked = Asked(UNKNOWN)
    broker.check_transactions(GROUP, asked)
    half = send_half(broker, TAGS="paid")

    with capture_logs() as logs:
        harness.advance("1h")

    [aside] = messages_in(broker, CHECK_MAX_TOPIC)
    [event] = [entry for entry in logs if entry["event"] == "transaction.discarded"]
    assert [message.properties["TRANSACTION_CHECK_TIMES"] for message in asked] == [str(n) for n in range(1, 16)]
    assert (aside.body, aside.tags, aside.msg_id) == (b"order", "paid", half.send_result.msg_id)
    assert aside.properties["REAL_TOPIC"] == "orders"
    assert (event["topic"], event["reason"]) == ("orders", "15 questions stayed without an answer")
    assert bodies(broker) == []
    assert broker.transactions.open_count == 0


def test_questions_that_nobody_could_be_asked_do_not_count(broker: EmbeddedBroker, harness: Harness) -> None:
    """The application was down for a day, and is asked as soon as it is back."""
    send_half(broker)
    harness.advance("1d")
    asked = Asked(COMMIT)

    broker.check_transactions(GROUP, asked)
    harness.advance("1ms")

    assert asked[0].properties["TRANSACTION_CHECK_TIMES"] == "1"
    assert bodies(broker) == [b"order"]


def test_a_transaction_that_nobody_could_be_asked_about_ends_with_the_retention(
    broker: EmbeddedBroker, harness: Harness
) -> None:
    send_half(broker)

    harness.advance("73h")

    assert bodies(broker, CHECK_MAX_TOPIC) == [b"order"]


def test_a_checker_that_is_closed_is_asked_no_more(broker: EmbeddedBroker, harness: Harness) -> None:
    asked = Asked(UNKNOWN)
    registration = broker.check_transactions(GROUP, asked)
    send_half(broker)
    harness.advance("6s")

    registration.close()
    harness.advance("1h")

    assert len(asked) == 1
    assert broker.transactions.open_count == 1


def test_what_a_checker_answers_beside_a_state_is_logged(broker: EmbeddedBroker, harness: Harness) -> None:
    broker.check_transactions(GROUP, lambda message: "yes")  # type: ignore[arg-type,return-value]
    send_half(broker)

    with capture_logs() as logs:
        harness.advance("6s")

    assert [entry["answer"] for entry in logs if entry["event"] == "transaction.checker_failed"] == ["'yes'"]
    assert broker.transactions.open_count == 1


def test_on_a_real_clock_a_checker_runs_in_a_thread_of_its_own() -> None:
    """The broker goes on while a checker waits, and takes the answer when it comes."""
    quick = EmbeddedSettings(transaction_timeout_ms=1, transaction_check_interval_ms=60_000)
    names: SimpleQueue[str] = SimpleQueue()
    go_on = threading.Event()

    def check(message: MessageExt) -> TransactionState:
        names.put(threading.current_thread().name)
        assert go_on.wait(10)
        return COMMIT

    with EmbeddedBroker(None, quick, SystemClock()) as broker:
        arrived: SimpleQueue[None] = SimpleQueue()
        broker.store.watch("orders", lambda: arrived.put(None))
        broker.check_transactions(GROUP, check)
        send_half(broker)
        name = names.get(timeout=10)
        broker.send(Message("others", b"meanwhile"))
        go_on.set()
        arrived.get(timeout=10)
        found = bodies(broker)

    assert name.startswith("mqtemplate-check-shop")
    assert found == [b"order"]


def test_transactions_are_counted(broker: EmbeddedBroker, harness: Harness) -> None:
    broker.check_transactions(GROUP, Asked(UNKNOWN))
    broker.end_transaction(send_half(broker), COMMIT)
    broker.end_transaction(send_half(broker), ROLLBACK)
    send_half(broker)
    harness.advance("40s")
    halfway = broker.metrics.snapshot()
    harness.advance("1h")
    at_the_end = broker.metrics.snapshot()

    names = ["open", "committed", "rolled_back", "asked", "discarded"]
    assert [halfway[f"transaction.{name}"] for name in names] == [1, 1, 1, 2, 0]
    assert [at_the_end[f"transaction.{name}"] for name in names] == [0, 1, 1, 15, 1]


# --- restarts --------------------------------------------------------------------------------------


def test_progress_is_kept_as_rocketmq_keeps_it(broker: EmbeddedBroker, harness: Harness) -> None:
    """Group ``CID_RMQ_SYS_TRANS``: everything before the first open half message, and the marks about it, is done."""
    first, second, third = (send_half(broker, b"%d" % number) for number in range(3))

    broker.end_transaction(second, COMMIT)
    harness.advance("1s")
    with_one_open = [broker.offsets.offset(TRANSACTION_GROUP, topic, 0) for topic in (HALF_TOPIC, OP_TOPIC)]
    broker.end_transaction(first, ROLLBACK)
    broker.end_transaction(third, COMMIT)
    harness.advance("1s")
    with_none_open = [broker.offsets.offset(TRANSACTION_GROUP, topic, 0) for topic in (HALF_TOPIC, OP_TOPIC)]

    assert with_one_open == [0, 0]
    assert with_none_open == [3, 3]


def test_a_broker_without_transactions_writes_nothing_about_them(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path, SMALL, VirtualClock()) as broker:
        broker.send(Message("orders", b"plain"))
        broker.commit_offset("billing", MessageQueue("orders", broker.name, 0), 1)

    written = "".join(path.read_text() for path in (tmp_path / "config").glob("*.json"))
    assert "billing" in written
    assert "TRANS" not in written


def test_the_count_of_questions_lasts_over_restarts(tmp_path: Path) -> None:
    clock = VirtualClock()
    asked = Asked(UNKNOWN)
    for _ in range(3):
        with EmbeddedBroker(tmp_path, SMALL, clock) as broker:
            broker.check_transactions(GROUP, asked)
            if not asked:
                send_half(broker)
            Harness(broker).advance("31s")

    counts = [message.properties["TRANSACTION_CHECK_TIMES"] for message in asked]
    assert counts == [str(number) for number in range(1, len(asked) + 1)]
    assert len(asked) >= 3


def test_a_process_that_dies_over_a_commit_at_any_byte_delivers_once(tmp_path: Path) -> None:
    """It dies when 0, 3, 6 … percent of the commit, its mark and the message, are written."""
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
        assert end_and_die(broker, half, COMMIT, percent / 100)
        kill(broker.store)
        asked = Asked(COMMIT)

        for _ in range(2):  # and a second time, after whatever the first start wrote
            with EmbeddedBroker(folder, SMALL, clock) as again:
                again.check_transactions(GROUP, asked)
                Harness(again).advance("10s")
                delivered = bodies(again)

        assert delivered == [bytes(100), b"before"], f"{percent} percent were written"
        assert len(asked) == (1 if percent == 100 else 2)
        shutil.rmtree(folder)


@pytest.mark.parametrize("delay", [{}, {"DELAY": "3"}, {"TIMER_DELAY_MS": "60000"}], ids=str)
def test_a_commit_whose_mark_is_missing_is_not_repeated(tmp_path: Path, delay: dict[str, str]) -> None:
    """RocketMQ writes the mark up to three seconds after the message; a power failure may take it away as well."""
    clock = VirtualClock()
    broker = EmbeddedBroker(tmp_path, SMALL, clock)
    broker.start()
    half = send_half(broker, **delay)
    [stored] = read_all(broker, HALF_TOPIC)
    record = broker.store.read_at(stored.physical_offset)
    assert record is not None
    broker.store.put(broker.drafts.make_committed(record, clock.now_ms()))
    kill(broker.store)

    asked = Asked(COMMIT)
    with capture_logs() as logs, EmbeddedBroker(tmp_path, SMALL, clock) as again:
        again.check_transactions(GROUP, asked)
        Harness(again).advance("2m")
        again.end_transaction(half, COMMIT)
        delivered = bodies(again)

    assert delivered == [b"order"]
    assert asked == []
    assert [entry["event"] for entry in logs].count("transaction.mark_missing") == 1


def test_a_half_message_that_is_there_twice_is_one(tmp_path: Path) -> None:
    """A sender that tried again, or a mark that a power failure took away: the newer one stands for both."""
    clock = VirtualClock()
    broker = EmbeddedBroker(tmp_path, SMALL, clock)
    broker.start()
    first, _second = send_half(broker, UNIQ_KEY="0A"), send_half(broker, UNIQ_KEY="0A")
    kill(broker.store)

    with EmbeddedBroker(tmp_path, SMALL, clock) as again:
        open_now = again.transactions.open_count
        again.end_transaction(first, COMMIT)
        Harness(again).advance("1h")
        delivered = bodies(again)

    assert (open_now, delivered) == (1, [b"order"])


def test_open_transactions_are_told_at_the_start(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path, SMALL, VirtualClock()) as broker:
        send_half(broker)

    with capture_logs() as logs, EmbeddedBroker(tmp_path, SMALL, VirtualClock()):
        pass

    assert [entry["count"] for entry in logs if entry["event"] == "transaction.open"] == [1]


def test_a_transaction_that_stays_open_holds_little_memory() -> None:
    """A hundred thousand marks behind one open half message: the spans are few, and none is passed over."""
    progress = OpProgress()
    for number in range(100_000):
        progress.note(number, number + 1)

    assert len(progress._spans) <= 4_096
    assert progress.first_needed(0) == 0
    needed = progress.first_needed(50_000)
    assert needed <= 49_999
    assert 49_999 - needed < 100
    assert progress.first_needed(200_000) == 100_000


ENDS = {b"commit": COMMIT, b"commit, too": COMMIT, b"rollback": ROLLBACK, b"open": UNKNOWN}
AT_LAST = {**ENDS, b"open": COMMIT}


def send_and_end(broker: EmbeddedBroker, harness: Harness) -> None:
    """Four transactions; what the disk refuses is given up."""
    for body, state in ENDS.items():
        with suppress(MQTemplateError):
            broker.end_transaction(send_half(broker, body), state)
        with suppress(MQTemplateError):
            harness.advance("3s")


def test_a_disk_that_fails_once_at_any_call_loses_and_doubles_no_transaction(tmp_path: Path) -> None:
    """A full disk at each call that the four transactions make; then all is well, and still so after a restart."""
    for at in itertools.count():
        folder, clock = tmp_path / str(at), VirtualClock()
        disk = FaultyDisk()
        broker = EmbeddedBroker(settings=SMALL, clock=clock, store_files=FolderStoreFiles(folder, disk))
        broker.start()
        harness = Harness(broker)
        broker.check_transactions(GROUP, lambda message: AT_LAST[message.body])
        first = len(disk.calls)
        disk.judge = once(first + at, errno.ENOSPC)
        send_and_end(broker, harness)
        was_tried = len(disk.calls) > first + at
        disk.judge = never

        harness.advance("40s")
        now = bodies(broker)
        broker.close()
        with EmbeddedBroker(folder, SMALL, clock) as again:
            again.check_transactions(GROUP, lambda message: AT_LAST[message.body])
            Harness(again).advance("40s")
            later = bodies(again)

        assert set(now) <= {b"commit", b"commit, too", b"open"}, f"call {at}"
        assert len(now) == len(set(now)) >= 2, f"call {at}"  # the half message that was refused was never sent
        assert later == now, f"call {at}"
        shutil.rmtree(folder)
        if not was_tried:
            assert at > 5
            assert now == [b"commit", b"commit, too", b"open"]
            break


# --- any mix of it ---------------------------------------------------------------------------------

_FOLDERS = "/dev/shm" if Path("/dev/shm").is_dir() else None
places = st.integers(0, 1_000)
delays = st.sampled_from([{}, {"DELAY": "1"}, {"TIMER_DELAY_MS": "2500"}])


class Transactions(RuleBasedStateMachine):
    """Sends, ends, late and double ends, questions, time, restarts and kills, against a model in plain Python.

    The model: each message is open, committed, rolled back, or put aside; and when it is due, if it is committed.
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
        """In the end each transaction is decided, and each message is where it belongs, once."""
        try:
            self.decisions |= dict.fromkeys(self.open, COMMIT)
            self.harness.advance("10m")
            self.everything_is_in_its_place()
            assert self.broker.transactions.open_count == 0
            assert not self.open
        finally:
            self.broker.close()
            shutil.rmtree(self.folder)
            self.logs.__exit__(None, None, None)

    def check(self, message: MessageExt) -> TransactionState:
        body = message.body
        assert body in self.open, "asked for a transaction that has its end"
        state = self.decisions.get(body, UNKNOWN)
        if message.properties["TRANSACTION_CHECK_TIMES"] == "15" and state is UNKNOWN:
            state = ROLLBACK  # the model knows no putting aside
        self.note_end(body, state, message.properties)
        return state

    def note_end(self, body: bytes, state: TransactionState, properties: dict[str, str]) -> None:
        if state is UNKNOWN or body not in self.open:
            return
        self.open.discard(body)
        if state is COMMIT:
            delay_ms = 1_000 if "DELAY" in properties else int(properties.get("TIMER_DELAY_MS", "0"))
            self.due_ms[body] = self.clock.now_ms() + delay_ms

    def of(self, place: int) -> HalfMessage:
        return self.halves[place % len(self.halves)]

    @rule(delay=delays)
    def send(self, delay: dict[str, str]) -> None:
        body = b"%d" % next(self.count)
        self.halves.append(self.broker.send_half(Message("orders", body, dict(delay)), GROUP))
        self.open.add(body)

    @precondition(lambda self: self.halves)
    @rule(place=places, state=st.sampled_from(TransactionState))
    def end(self, place: int, state: TransactionState) -> None:
        half = self.of(place)
        self.broker.end_transaction(half, state)
        self.note_end(half.message.body, state, half.message.properties)

    @precondition(lambda self: self.halves)
    @rule(place=places, state=st.sampled_from([COMMIT, ROLLBACK]))
    def decide(self, place: int, state: TransactionState) -> None:
        """The next question gets this answer."""
        self.decisions.setdefault(self.of(place).message.body, state)

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
    @rule(place=places, state=st.sampled_from([COMMIT, ROLLBACK]), cut=st.floats(0, 1))
    def kill_over_an_end(self, place: int, state: TransactionState, cut: float) -> None:
        """The process dies while it appends the end; nobody was told that it is there."""
        half = self.of(place)
        if end_and_die(self.broker, half, state, cut):
            kill(self.broker.store)
            self.open_broker()
        self.confirm(half.message, state)

    def confirm(self, message: Message, state: TransactionState) -> None:
        """The model takes over whether the end was whole."""
        if message.body not in {self.body_of(offset) for offset in list(self.broker.transactions._open)}:
            self.note_end(message.body, state, message.properties)

    def body_of(self, half_offset: int) -> bytes:
        unit = self.broker.store.consume_queue(HALF_TOPIC, 0).unit(half_offset)
        return self.broker.store.read(unit.physical_offset, unit.size).body

    @invariant()
    def everything_is_in_its_place(self) -> None:
        now_ms = self.clock.now_ms()
        self.harness.run_until_idle()
        assert list(self.broker.transactions._open) == sorted(self.broker.transactions._open)  # progress is its first
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
