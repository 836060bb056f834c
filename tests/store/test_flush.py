"""Group commit: many threads share one flush."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from mqtemplate.clock import VirtualClock
from mqtemplate.errors import StoreError
from mqtemplate.store.flush import FlushService, GroupCommit
from mqtemplate.store.settings import FlushDiskType, StoreSettings


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
        assert self.may_go_on.wait(30)
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
def open_pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(9) as pool:
        yield pool


def test_threads_that_arrive_during_a_flush_share_the_next_one() -> None:
    disk = Disk()
    commit = GroupCommit(disk.flush)
    waiting = commit._mutex = CountingLock(1 + 8)  # type: ignore[assignment]
    with ThreadPoolExecutor(9) as pool:
        disk.may_go_on.clear()
        disk.end = 1
        first = pool.submit(commit.wait, 1, 30_000)
        assert disk.is_flushing.wait(30)
        disk.end = 9
        others = [pool.submit(commit.wait, end, 30_000) for end in range(2, 10)]
        assert waiting.reached.wait(30)

        disk.may_go_on.set()

        assert first.result(30)
        assert all(other.result(30) for other in others)
    assert disk.flushes == 2
    assert commit.flushed == 9


def test_flushed_bytes_need_no_other_flush() -> None:
    disk = Disk()
    commit = GroupCommit(disk.flush)
    disk.end = 5
    commit.wait(5, 1_000)

    commit.wait(3, 1_000)

    assert disk.flushes == 1


def test_a_follower_returns_false_after_its_timeout() -> None:
    disk = Disk()
    commit = GroupCommit(disk.flush)
    with ThreadPoolExecutor(1) as pool:
        disk.may_go_on.clear()
        disk.end = 1
        leader = pool.submit(commit.wait, 1, 30_000)
        assert disk.is_flushing.wait(30)

        assert commit.wait(2, 1) is False

        disk.may_go_on.set()
        assert leader.result(30)


def test_a_failed_flush_is_reported_to_the_caller() -> None:
    disk = Disk()
    commit = GroupCommit(disk.flush)
    disk.end, disk.error = 1, disk_failure()

    with pytest.raises(StoreError, match="cannot flush the commit log: .*Input/output error.*send again"):
        commit.wait(1, 1_000)

    assert commit.flushed == 0
    disk.error = None
    assert commit.wait(1, 1_000)


def test_a_failed_flush_is_reported_to_all_waiting_threads(open_pool: ThreadPoolExecutor) -> None:
    """The waiting threads get the error as well as the leader; none of them keeps waiting."""
    disk = Disk()
    commit = GroupCommit(disk.flush)
    waiting = commit._mutex = CountingLock(1 + 4)  # type: ignore[assignment]
    disk.may_go_on.clear()
    disk.end, disk.error = 5, disk_failure()
    first = open_pool.submit(commit.wait, 1, 30_000)
    assert disk.is_flushing.wait(30)
    others = [open_pool.submit(commit.wait, end, 30_000) for end in range(2, 6)]
    assert waiting.reached.wait(30)

    disk.may_go_on.set()

    for each in (first, *others):
        with pytest.raises(StoreError, match="Input/output error"):
            each.result(30)


def test_an_interrupted_leader_is_succeeded_by_another(open_pool: ThreadPoolExecutor) -> None:
    """Ctrl-C during a flush of the main thread must not leave later threads without a leader."""
    disk = Disk()
    commit = GroupCommit(disk.flush)
    waiting = commit._mutex = CountingLock(1 + 1)  # type: ignore[assignment]
    disk.may_go_on.clear()
    disk.end, disk.error = 2, KeyboardInterrupt()
    first = open_pool.submit(commit.wait, 1, 30_000)
    assert disk.is_flushing.wait(30)
    second = open_pool.submit(commit.wait, 2, 30_000)
    assert waiting.reached.wait(30)
    disk.is_flushing.clear()

    disk.may_go_on.set()
    with pytest.raises(KeyboardInterrupt):
        first.result(30)
    with pytest.raises(KeyboardInterrupt):
        second.result(30)
    disk.error = None

    assert commit.wait(2, 30_000)


def test_flushed_bytes_stay_flushed_when_a_flush_returns_less() -> None:
    disk = Disk()
    commit = GroupCommit(disk.flush)
    disk.end = 5
    commit.wait(5, 1_000)
    disk.end = 3

    commit.wait(9, 1_000)

    assert commit.flushed == 5


def test_a_callback_is_called_once_its_bytes_are_durable() -> None:
    disk = Disk()
    commit = GroupCommit(disk.flush)
    called: list[tuple[str, object]] = []
    commit.call_when_flushed(5, lambda error: called.append(("five", error)))
    commit.call_when_flushed(9, lambda error: called.append(("nine", error)))

    disk.end = 5
    commit.wait(5, 1_000)

    assert called == [("five", None)]


def test_a_callback_gets_the_error_of_a_failed_flush() -> None:
    disk = Disk()
    commit = GroupCommit(disk.flush)
    errors: list[object] = []
    commit.call_when_flushed(1, errors.append)
    disk.end, disk.error = 1, disk_failure()

    with pytest.raises(StoreError):
        commit.wait(1, 1_000)

    assert "Input/output error" in str(errors[0])


def test_the_flush_service_tries_again_after_a_failed_flush() -> None:
    disk, clock = Disk(), VirtualClock()
    commit = GroupCommit(disk.flush)
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
