"""The transaction checker of a group, with its threads."""

from __future__ import annotations

import threading
from queue import Queue, SimpleQueue
from typing import Any

import pytest
from structlog.testing import capture_logs

from mqtemplate.broker import group_checker
from mqtemplate.broker.group_checker import GroupChecker
from mqtemplate.message import HostAddress, MessageExt, Property
from mqtemplate.results import TransactionState
from tests.waiting import PATIENCE_S, eventually

HOST = HostAddress("127.0.0.1", 10911)
COMMIT, UNKNOWN = TransactionState.COMMIT, TransactionState.UNKNOWN


def message(body: bytes = b"order") -> MessageExt:
    return MessageExt(
        "orders", body, broker_name="b", queue_id=0, queue_offset=0, physical_offset=0, store_size=0, sys_flag=0,
        body_crc=0, born_timestamp=0, born_host=HOST, store_timestamp=0, store_host=HOST, reconsume_times=0,
        prepared_transaction_offset=0, properties={Property.UNIQ_KEY: body.decode()},
    )  # fmt: skip


def test_a_check_runs_in_a_thread_and_its_state_is_the_answer() -> None:
    answers: SimpleQueue[tuple[TransactionState, str | None, str]] = SimpleQueue()
    checker = GroupChecker("shop", lambda message: COMMIT, threads=1, max_waiting=1, on_close=lambda closed: None)

    checker.submit(message(), lambda state, remark: answers.put((state, remark, threading.current_thread().name)))

    assert answers.get(timeout=30) == (COMMIT, None, "mqtemplate-check-shop-1")
    checker.close()


def test_a_checker_without_threads_runs_in_the_submitting_thread() -> None:
    """On a virtual clock there are no threads."""
    names = []
    checker = GroupChecker("shop", lambda message: COMMIT, threads=0, max_waiting=1, on_close=lambda closed: None)

    checker.submit(message(), lambda state, remark: names.append(threading.current_thread().name))

    assert names == [threading.current_thread().name]


def test_an_error_of_a_checker_is_the_remark_of_an_unknown_state() -> None:
    def check(message: MessageExt) -> TransactionState:
        raise ValueError("no database")

    answers = []
    checker = GroupChecker("shop", check, threads=0, max_waiting=1, on_close=lambda closed: None)

    with capture_logs() as logs:
        checker.submit(message(), lambda state, remark: answers.append((state, remark)))

    assert answers == [(UNKNOWN, "checkLocalTransactionState raised ValueError: no database")]
    assert [entry["event"] for entry in logs] == ["transaction.checker_failed"]


def test_a_check_is_dropped_and_logged_if_too_many_wait() -> None:
    """One check runs and one waits; the broker repeats the third one later."""
    started, go_on, bodies = threading.Event(), threading.Event(), []

    def check(message: MessageExt) -> TransactionState:
        started.set()
        assert go_on.wait(PATIENCE_S)
        bodies.append(message.body)
        return COMMIT

    checker = GroupChecker("shop", check, threads=1, max_waiting=1, on_close=lambda closed: None)
    checker.submit(message(b"runs"), lambda state, remark: None)
    assert started.wait(PATIENCE_S)
    answered = threading.Event()
    checker.submit(message(b"waits"), lambda state, remark: answered.set())
    with capture_logs() as logs:
        checker.submit(message(b"dropped"), lambda state, remark: None)
    go_on.set()

    assert answered.wait(PATIENCE_S)
    checker.close()
    assert bodies == [b"runs", b"waits"]
    assert [entry["event"] for entry in logs] == ["transaction.check_dropped"]


def test_a_transaction_whose_check_waits_or_runs_is_not_checked_twice() -> None:
    """A broker repeats a check whose answer takes longer than its interval."""
    started, go_on, bodies = threading.Event(), threading.Event(), []

    def check(message: MessageExt) -> TransactionState:
        started.set()
        assert go_on.wait(PATIENCE_S)
        bodies.append(message.body)
        return COMMIT

    answers: SimpleQueue[bytes] = SimpleQueue()
    checker = GroupChecker("shop", check, threads=1, max_waiting=100, on_close=lambda closed: None)
    checker.submit(message(b"runs"), lambda state, remark: answers.put(b"runs"))
    assert started.wait(PATIENCE_S)
    checker.submit(message(b"waits"), lambda state, remark: answers.put(b"waits"))
    for body in (b"runs", b"waits", b"runs"):
        checker.submit(message(body), lambda state, remark: answers.put(b"repeated"))
    checker.submit(message(b"last"), lambda state, remark: answers.put(b"last"))
    go_on.set()

    assert [answers.get(timeout=PATIENCE_S) for _ in range(3)] == [b"runs", b"waits", b"last"]
    checker.close()
    assert bodies == [b"runs", b"waits", b"last"]


def test_a_transaction_is_checked_again_after_its_answer() -> None:
    """The answer may be that the state is not known yet, or it may have been lost."""
    answers: SimpleQueue[TransactionState] = SimpleQueue()
    states = [COMMIT, COMMIT, UNKNOWN]
    checker = GroupChecker("shop", lambda message: states.pop(), threads=1, max_waiting=1, on_close=lambda closed: None)

    found = []
    for body in (b"order", b"other", b"order"):  # the answer of the other one comes after the end of the first check
        checker.submit(message(body), lambda state, remark: answers.put(state))
        found.append(answers.get(timeout=PATIENCE_S))

    assert found == [UNKNOWN, COMMIT, COMMIT]
    checker.close()


def test_a_closed_checker_runs_no_check() -> None:
    closed: list[GroupChecker] = []
    checker = GroupChecker("shop", lambda message: COMMIT, threads=1, max_waiting=1, on_close=closed.append)
    answers: list[TransactionState] = []

    checker.close()
    checker.close()
    checker.submit(message(), lambda state, remark: answers.append(state))

    assert closed == [checker]
    assert answers == []


class LosingQueue(Queue[Any]):
    """A queue whose last job a thread takes just when the checker wants to drop it."""

    def get_nowait(self) -> Any:
        super().get_nowait()
        return super().get_nowait()


def test_a_checker_closes_while_a_thread_takes_its_last_check() -> None:
    """The broker was not closed, and kept its store directory."""
    checker = GroupChecker("shop", lambda message: COMMIT, threads=1, max_waiting=9, on_close=lambda closed: None)
    checker._jobs = LosingQueue()
    checker._jobs.put(None)

    checker.close()

    assert checker._jobs.qsize() == 1  # the end, for its threads


def test_a_checker_with_fewer_places_than_threads_closes_while_all_of_them_are_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It waited for a place until the application's checks had ended; they may wait for the broker."""
    monkeypatch.setattr(group_checker, "_JOIN_S", 0.0)
    started, go_on = threading.Semaphore(0), threading.Event()

    def check(message: MessageExt) -> TransactionState:
        started.release()
        go_on.wait(10 * PATIENCE_S)
        return COMMIT

    checker = GroupChecker("shop", check, threads=3, max_waiting=1, on_close=lambda closed: None)
    for number in range(3):
        checker.submit(message(b"%d" % number), lambda state, remark: None)
        assert started.acquire(timeout=PATIENCE_S)

    closing = threading.Thread(target=checker.close, daemon=True)
    closing.start()
    eventually(lambda: not closing.is_alive(), "the checker is closed")
    go_on.set()

    eventually(lambda: not any(thread.is_alive() for thread in checker._workers), "its threads have ended")
