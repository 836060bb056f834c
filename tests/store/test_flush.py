"""Group commit: many threads share one flush."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from mqtemplate.clock import VirtualClock
from mqtemplate.errors import StoreError
from mqtemplate.store.flush import FlushService, GroupCommit
from mqtemplate.store.settings import FlushDiskType, StoreSettings
from tests.waiting import PATIENCE_S


class Disk:
    """A log that grows, and a flush that a test can block."""

    def __init__(self) -> None:
        self.end = 0
        self.flushes = 0
        self.is_flushing = threading.Event()
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.error: BaseException | None = None

    def flush(self) -> int:
        end = self.end
        self.flushes += 1
        self.is_flushing.set()
        assert self.may_go_on.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        return end


def disk_failure() -> StoreError:
    """Return the error of a mapped file when the disk fails."""
    error = StoreError("cannot flush 00000000000000000000")
    error.__cause__ = OSError(errno.EIO, "Input/output error")
    return error


class CountingLock:
    """A lock that sets an event after *count* releases: then as many threads wait for a flush."""

    def __init__(self, count: int) -> None:
        self.reached = threading.Event()
        self._lock = threading.Lock()
        self._left = count

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *exc_info: object) -> None:
        self._left -= 1
        is_last = self._left == 0
        self._lock.release()
        if is_last:
            self.reached.set()


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def commit(disk: Disk) -> GroupCommit:
    return GroupCommit(disk.flush)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(9) as pool:
        yield pool


def wait_in_threads(pool: ThreadPoolExecutor, disk: Disk, commit: GroupCommit, count: int) -> list[Future[bool]]:
    """Let one thread flush, and others wait for their bytes. The flush ends with ``disk.may_go_on``."""
    waiting = commit._mutex = CountingLock(count)  # type: ignore[assignment]
    disk.may_go_on.clear()
    disk.end = 1
    first = pool.submit(commit.wait, 1, 30_000)
    assert disk.is_flushing.wait(PATIENCE_S)
    disk.end = count
    others = [pool.submit(commit.wait, end, 30_000) for end in range(2, count + 1)]
    assert waiting.reached.wait(PATIENCE_S)
    return [first, *others]


def test_threads_that_arrive_during_a_flush_share_the_next_one(
    pool: ThreadPoolExecutor, disk: Disk, commit: GroupCommit
) -> None:
    waits = wait_in_threads(pool, disk, commit, 9)

    disk.may_go_on.set()

    assert all(each.result(30) for each in waits)
    assert (disk.flushes, commit.flushed) == (2, 9)


def test_a_flush_that_is_not_needed_or_returns_less_changes_nothing(disk: Disk, commit: GroupCommit) -> None:
    disk.end = 5
    commit.wait(5, 1_000)

    commit.wait(3, 1_000)
    assert disk.flushes == 1

    disk.end = 3
    commit.wait(9, 1_000)
    assert commit.flushed == 5


def test_a_follower_returns_false_after_its_timeout(pool: ThreadPoolExecutor, disk: Disk, commit: GroupCommit) -> None:
    [leader] = wait_in_threads(pool, disk, commit, 1)

    assert commit.wait(2, 1) is False

    disk.may_go_on.set()
    assert leader.result(30)


def test_a_failed_flush_is_reported_to_the_caller(disk: Disk, commit: GroupCommit) -> None:
    disk.end, disk.error = 1, disk_failure()

    with pytest.raises(StoreError, match="cannot flush the commit log: .*Input/output error.*send again"):
        commit.wait(1, 1_000)

    assert commit.flushed == 0
    disk.error = None
    assert commit.wait(1, 1_000)


def test_a_failed_flush_is_reported_to_all_waiting_threads(
    pool: ThreadPoolExecutor, disk: Disk, commit: GroupCommit
) -> None:
    """The waiting threads get the error as well as the leader; none of them keeps waiting."""
    disk.error = disk_failure()
    waits = wait_in_threads(pool, disk, commit, 5)

    disk.may_go_on.set()

    for each in waits:
        with pytest.raises(StoreError, match="Input/output error"):
            each.result(30)


def test_an_interrupted_leader_is_succeeded_by_another(
    pool: ThreadPoolExecutor, disk: Disk, commit: GroupCommit
) -> None:
    """Ctrl-C during a flush of the main thread must not leave later threads without a leader."""
    disk.error = KeyboardInterrupt()
    waits = wait_in_threads(pool, disk, commit, 2)

    disk.may_go_on.set()
    for each in waits:
        with pytest.raises(KeyboardInterrupt):
            each.result(30)
    disk.error = None

    assert commit.wait(2, 30_000)


def test_a_callback_is_called_once_its_bytes_are_durable(disk: Disk, commit: GroupCommit) -> None:
    called: list[tuple[str, object]] = []
    commit.call_when_flushed(5, lambda error: called.append(("five", error)))
    commit.call_when_flushed(9, lambda error: called.append(("nine", error)))

    disk.end = 5
    commit.wait(5, 1_000)

    assert called == [("five", None)]


def test_a_callback_gets_the_error_of_a_failed_flush(disk: Disk, commit: GroupCommit) -> None:
    errors: list[object] = []
    commit.call_when_flushed(1, errors.append)
    disk.end, disk.error = 1, disk_failure()

    with pytest.raises(StoreError):
        commit.wait(1, 1_000)

    assert "Input/output error" in str(errors[0])


def test_the_flush_service_tries_again_after_a_failed_flush(disk: Disk, commit: GroupCommit) -> None:
    clock = VirtualClock()
    service = FlushService(commit, lambda: disk.end, clock, StoreSettings(flush_disk_type=FlushDiskType.ASYNC_FLUSH))
    disk.end, disk.error = 1, disk_failure()
    service.changed()
    clock.move_ms(500)
    with pytest.raises(StoreError):
        service.step()
    disk.error = None

    clock.move_ms(500)
    service.step()

    assert commit.flushed == 1
