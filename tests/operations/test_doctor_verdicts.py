"""``doctor`` says what a start does: it starts, repairs, loses messages or refuses, for each damage of each file."""

from __future__ import annotations

import logging
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from stat import S_ISREG

import pytest

from mqtemplate.broker import ConsumerSpec
from mqtemplate.brokers.embedded.broker import EmbeddedBroker
from mqtemplate.clock import SystemClock, VirtualClock
from mqtemplate.engine.settings import EmbeddedSettings
from mqtemplate.errors import MQTemplateError
from mqtemplate.message import Message, MessageQueue, SendSequence
from mqtemplate.operations.doctor import FolderReport, Verdict, examine
from mqtemplate.pending import PendingQuery
from mqtemplate.record.layout import CHECK_SIZE
from mqtemplate.results import TransactionState
from mqtemplate.selectors.tags import TagSelector
from mqtemplate.server.broker_server import BrokerServer
from tests.operations.test_doctor import copied
from tests.thirds import NINTHS

QUEUE = MessageQueue("orders", "broker-a", 0)
SETTINGS = EmbeddedSettings(
    mapped_file_size_commit_log=20_000,
    mapped_file_size_consume_queue=400,
    mapped_file_size_timer_log=5_200,
    max_hash_slot_num=50,
    max_index_num=200,
)
FIRST = "0" * 20


def fill(broker: EmbeddedBroker, server: BrokerServer[EmbeddedBroker]) -> None:
    """Store something of each kind: all files of a store exist then, most of them more than once."""
    for number in range(60):
        broker.sends.send(Message("orders", b"%d" % number * 200, {"KEYS": f"k{number}", "TAGS": "paid"}), QUEUE)
    for number in range(4):
        broker.sends.send(Message("orders", b"level", {"DELAY": str(9 + number)}))
        broker.sends.send(Message("orders", b"timer", {"TIMER_DELAY_MS": str(60_000 * (number + 1))}))
    broker.delayed.cancel(broker.sends.send(Message("orders", b"timer", {"TIMER_DELAY_MS": "60000"})).handle)
    half = broker.sends.send_half(Message("orders", b"half"), "billing")
    broker.transactions.end_transaction(half, TransactionState.COMMIT)
    broker.sends.send_half(Message("orders", b"open"), "billing")
    broker.sends.send_sequenced([(Message("orders", b"x"), QUEUE)], SendSequence("app", 1, 0))
    broker.groups.commit_offset("billing", QUEUE, 3)
    server.groups.ensure("billing")
    server.name_server.entries.put("ORDER_TOPIC_CONFIG", "orders", "broker-a:4")
    pop_orders(broker)
    for _ in range(3):
        for service in broker.services():
            service.step()


def pop_orders(broker: EmbeddedBroker) -> None:
    """Receive and acknowledge messages by POP, before and after a snapshot of the progress."""
    broker.pop.join(ConsumerSpec(group="shipping", subscriptions={"orders": TagSelector()}))
    for is_ordered in (False, True, False):
        received = broker.pop.receive("shipping", "orders", 8, 60_000, 0, None, is_ordered=is_ordered)
        for each in received[::2]:
            broker.pop.ack("shipping", "orders", each.receipt)
        broker.engine.pop.journal.save()
    broker.pop.ack("shipping", "orders", received[1].receipt)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A store whose owner has closed it, and the files that a kill of the owner would have left."""
    closed, killed = (tmp_path_factory.mktemp(name) / "store" for name in ("closed", "killed"))
    with EmbeddedBroker(closed, SETTINGS, VirtualClock(SystemClock().now_ms())) as broker:
        server = BrokerServer(broker)
        server.load()
        fill(broker, server)
        broker.engine.groups.committed.persist()
        copied(closed, killed)
    return {"closed": closed, "killed": killed}


class _Events(logging.Handler):
    """Levels and texts of the events of the library from the level WARNING on."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.levels: list[int] = []
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.levels.append(record.levelno)
        self.texts.append(record.getMessage())


def start(folder: Path) -> tuple[Verdict, list[str]]:
    """Start a server on a directory, let it read its timers, and close it. Return what it did.

    Another error than one of this library fails the test.
    """
    broker = EmbeddedBroker(folder, SETTINGS, VirtualClock(SystemClock().now_ms()))
    events = _Events()
    logging.getLogger("mqtemplate").addHandler(events)
    try:
        BrokerServer(broker).load()
        broker.delayed.count_pending(PendingQuery())
    except MQTemplateError as exc:
        return Verdict.REFUSES, [str(exc)]
    finally:
        broker.close()
        logging.getLogger("mqtemplate").removeHandler(events)
    worst = max(events.levels, default=logging.INFO)
    if worst >= logging.ERROR:
        return Verdict.LOSES, events.texts
    return Verdict.REPAIRS if worst >= logging.WARNING else Verdict.STARTS, events.texts


def state(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Return times and contents of all files and folders; of a large one, which a wheel is, the time alone."""
    found = {}
    for path in sorted(folder.rglob("*")):
        stat = path.lstat()
        data = path.read_bytes() if S_ISREG(stat.st_mode) and stat.st_size < 1 << 20 else b""
        found[str(path.relative_to(folder))] = stat.st_mtime_ns, stat.st_size, data
    return found


def compared(folder: Path, *, is_strange: bool = False) -> FolderReport:
    """Examine a directory, then start a server on it, and compare what both say. Return the report.

    Args:
        is_strange: Files are of another kind. An error of opening one to read has another text than one of opening it
            to write, so only the verdicts are compared.
    """
    before = state(folder)
    report = examine(folder, SETTINGS)
    assert state(folder) == before, "the doctor changed the directory"
    verdict, texts = start(folder)
    if is_strange:
        assert report.verdict is verdict, (report.problem, texts)
    elif verdict is Verdict.REFUSES:
        assert (report.verdict, report.problem) == (verdict, texts[0])
    else:
        # The doctor reads all records, and a start only those after the checkpoint: it may know of more damage.
        old = [each for each in report.warnings if each.startswith("store.blank_damaged ") and each not in texts]
        assert (report.problem, old + list(dict.fromkeys(texts))) == (None, report.warnings)
        is_old = old if report.verdict is Verdict.REPAIRS else _has_old_damage(report)
        assert report.verdict is verdict or (report.verdict in (Verdict.REPAIRS, Verdict.LOSES) and is_old)
    assert report.is_damaged == (report.verdict in (Verdict.LOSES, Verdict.REFUSES))
    return report


def _has_old_damage(report: FolderReport) -> bool:
    return report.log is not None and any(not each.is_tail for each in report.log.damages)


# --- damages ------------------------------------------------------------------------------------


def flipped(data: bytes, bit: int) -> bytes:
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "one byte": lambda data: data[:1],
    "half": lambda data: data[: len(data) // 2],
    "whole units": lambda data: data[: len(data) // 40 * 20],
    "without its last byte": lambda data: data[:-1],
    "longer": lambda data: data + b"x" * 20,
    "zeros": lambda data: bytes(len(data)),
    "zeros at its start": lambda data: bytes(min(40, len(data))) + data[40:],
    "ones at its start": lambda data: b"\xff" * min(8, len(data)) + data[8:],
    "ones in the middle": lambda data: data[: len(data) // 2] + b"\xff" * 8 + data[len(data) // 2 + 8 :],
}
IN_TABLES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "no json": lambda data: b"no json",
    "list": lambda data: b"[]",
    "number": lambda data: b"1e999",
    "null": lambda data: b"null",
    "lists in it": lambda data: data.replace(b":{", b":[1,{").replace(b"},", b"}],", 1),
    "text for a number": lambda data: data.replace(b":1", b':"x"'),
    "name of a folder": lambda data: data.replace(b'"orders', b'"../orders').replace(b'"billing', b'"../billing'),
}
FILES = [
    "abort",
    "checkpoint",
    "lock",
    "commitlog/first",
    "commitlog/second",
    "commitlog/last",
    "consumequeue/orders/0/first",
    "consumequeue/orders/0/second",
    "consumequeue/orders/0/last",
    "consumequeue/rmq_sys_wheel_timer/0/first",
    "consumequeue/SCHEDULE_TOPIC_XXXX/8/first",
    "consumequeue/rmq_sys_POP_PROGRESS/0/first",
    "index/first",
    "timerwheel",
    "timerlog/first",
    "config/timercheck",
    "config/timermetrics",
    "config/topics.json",
    "config/consumerOffset.json",
    "config/delayOffset.json",
    "config/subscriptionGroup.json",
    "config/kvConfig.json",
    "config/sendSequences.json",
    "config/groupActivity.json",
    "config/popProgress.json",
]


def file_of(folder: Path, name: str) -> Path | None:
    """Return the file of a name above; None if the store has none."""
    path = folder / name
    if path.name in ("first", "second", "last"):
        files = sorted(path.parent.iterdir()) if path.parent.is_dir() else []
        at = {"first": 0, "second": 1, "last": len(files) - 1}[path.name]
        return files[at] if at < len(files) else None
    return path if path.exists() else None


CASES = [(how, name) for how in ("closed", "killed") for name in FILES if how == "closed" or name[-5:] != ".json"]
"""The tables of a store that was killed are those of one that was closed."""


@pytest.fixture
def place(originals: dict[str, Path], tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Function that copies a store, always to the same place."""
    folder = tmp_path / "store"

    def copy(how: str) -> Path:
        shutil.rmtree(folder, ignore_errors=True)
        return copied(originals[how], folder)

    yield copy
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("how", ["closed", "killed"])
def test_a_whole_store_starts(place: Callable[[str], Path], how: str) -> None:
    report = compared(place(how))

    assert (report.verdict, report.was_closed) == (Verdict.STARTS, how == "closed")


def test_the_store_has_each_file_that_is_damaged_here(originals: dict[str, Path]) -> None:
    missing = [name for name in FILES if not any(file_of(each, name) for each in originals.values())]

    assert missing == []


@pytest.mark.parametrize("ninth", NINTHS)
@pytest.mark.parametrize(("how", "name"), CASES)
def test_the_doctor_says_of_each_damage_of_a_file_what_a_start_does(
    place: Callable[[str], Path], how: str, name: str, ninth: int
) -> None:
    damages = list((IN_TABLES if name.endswith(".json") else DAMAGES).values())
    # In the files that follow each other here, other damages are tested.
    for damage in [*damages, None][(ninth + FILES.index(name)) % 9 :: 9]:
        folder = place(how)
        path = file_of(folder, name)
        if path is None:
            return
        if damage is None:
            path.unlink()
        else:
            path.write_bytes(damage(path.read_bytes()))

        compared(folder)


@pytest.mark.parametrize("ninth", NINTHS)
@pytest.mark.parametrize(("how", "name"), CASES)
def test_the_doctor_says_of_flipped_bits_what_a_start_does(
    place: Callable[[str], Path], how: str, name: str, ninth: int
) -> None:
    chance = random.Random(f"{name} {ninth}")
    for count in (1, 8):
        folder = place(how)
        path = file_of(folder, name)
        if path is None or not (data := path.read_bytes()):
            return
        written = len(data.rstrip(b"\0")) or 1
        for _ in range(count):
            data = flipped(data, chance.randrange(written * 8))
        path.write_bytes(data)

        compared(folder)


FOLDERS = ["commitlog", "consumequeue", "consumequeue/orders", "consumequeue/orders/0", "index", "config", "timerlog"]
STRANGE: dict[str, Callable[[Path], None]] = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to nothing": lambda path: path.symlink_to(path.parent / "missing"),
}


@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("name", FILES)
def test_the_doctor_says_of_something_in_place_of_a_file_what_a_start_does(
    place: Callable[[str], Path], name: str, kind: str
) -> None:
    folder = place("closed")
    path = file_of(folder, name)
    if path is not None:
        path.unlink()
        STRANGE[kind](path)

        compared(folder, is_strange=True)


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("kind", ["a file", "a link", "nothing", "a file more"])
def test_the_doctor_says_of_something_in_place_of_a_folder_what_a_start_does(
    place: Callable[[str], Path], tmp_path: Path, name: str, kind: str
) -> None:
    path = place("closed") / name
    if kind == "a file more":
        (path / "core.1234").write_bytes(b"x")
    else:
        path.rename(tmp_path / "moved")
    if kind == "a file":
        path.write_bytes(b"x")
    elif kind == "a link":
        path.symlink_to(tmp_path / "moved")

    compared(tmp_path / "store", is_strange=True)


# --- texts --------------------------------------------------------------------------------------


def test_a_cut_queue_at_which_a_server_refuses_to_start_is_damage(place: Callable[[str], Path]) -> None:
    folder = place("closed")
    path = folder / "consumequeue/orders/0" / FIRST
    os.truncate(path, 100)

    report = compared(folder)

    assert (report.problem or "").startswith(f"{path} has 100 bytes, but the settings or the other files say 400")
    assert report.is_damaged


def test_a_lost_log_is_damage_although_a_start_succeeds(place: Callable[[str], Path]) -> None:
    """All files of the log are empty: nothing in it is damaged, and all messages are gone."""
    folder = place("closed")
    for path in (folder / "commitlog").iterdir():
        path.write_bytes(b"")

    report = compared(folder)

    assert report.verdict is Verdict.LOSES
    assert [each.split()[0] for each in report.losses] == ["store.records_lost"]


@pytest.mark.parametrize("name", ["subscriptionGroup", "kvConfig"])
def test_a_table_that_only_a_server_reads_is_damage(place: Callable[[str], Path], name: str) -> None:
    folder = place("closed")
    (folder / "config" / f"{name}.json").write_text('{"subscriptionGroupTable": 1, "configTable": 1}', "utf-8")

    report = compared(folder)

    assert f"config/{name}.json has unexpected content" in (report.problem or "")


def test_a_damaged_record_that_a_start_does_not_read_is_damage(place: Callable[[str], Path]) -> None:
    folder = place("closed")
    path = folder / "commitlog" / FIRST
    data = bytearray(path.read_bytes())
    data[200 + CHECK_SIZE] ^= 1
    path.write_bytes(bytes(data))

    report = compared(folder)

    assert report.verdict is Verdict.LOSES
    assert [each.is_tail for each in report.log.damages] == [False] if report.log else False


def test_a_directory_in_use_is_examined_and_stays_as_it_is(place: Callable[[str], Path]) -> None:
    folder = place("closed")
    with EmbeddedBroker(folder, SETTINGS, VirtualClock(SystemClock().now_ms())) as broker:
        before = state(folder)
        report = examine(folder, SETTINGS)
        after = state(folder)
        assert broker.sends.send(Message("orders", b"still its owner"), QUEUE).queue_offset > 0

    assert after == before
    assert (report.used_by, report.verdict) == (str(os.getpid()), Verdict.STARTS)
