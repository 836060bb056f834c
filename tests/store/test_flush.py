"""Group commit: many senders, one flush."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from mqtemplate.clock import VirtualClock
from mqtemplate.errors import StoreError
from mqtemplate.store import FlushDiskType, StoreSettings
from mqtemplate.store.flush import FlushService, GroupCommit


class Disk:
    """A log that grows, and a flush that a test can hold up."""

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


def refusal() -> StoreError:
    """What a mapped file says when the disk fails."""
    error = StoreError("the disk refused to flush 00000000000000000000")
    error.__cause__ = OSError(errno.EIO, "Input/output error")
    return error


class CountingLock:
    """A lock that says when it was let go *count* times: so many senders have got in line."""

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


def test_who_comes_during_a_flush_shares_the_next_one() -> None:
    disk = Disk()
    commit = GroupCommit(disk.flush)
    in_line = commit._mutex = CountingLock(1 + 8)  # type: ignore[assignment]
    with ThreadPoolExecutor(9) as pool:
        disk.may_go_on.clear()
        disk.end = 1
        first = pool.submit(commit.wait, 1, 30_000)
        assert disk.is_flushing.wait(30)
        disk.end = 9
        others = [pool.submit(commit.wait, end, 30_000) for end in range(2, 10)]
        assert in_line.reached.wait(30)

        disk.may_go_on.set()

        assert first.result(30)
        assert all(other.result(30) for other in others)
    assert disk.flushes == 2
    assert commit.flushed == 9


def test_what_is_flushed_already_needs_no_flush() -> None:
    disk = Disk()
    commit = GroupCommit(disk.flush)
    disk.end = 5
    commit.wait(5, 1_000)

    commit.wait(3, 1_000)

    assert disk.flushes == 1


def test_a_follower_that_waited_too_long_is_told_so() -> None:
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


def test_a_disk_that_refuses_is_reported_to_the_sender() -> None:
    disk = Disk()
    commit = GroupCommit(disk.flush)
    disk.end, disk.error = 1, refusal()

    with pytest.raises(StoreError, match="the disk refused to flush the commit log: .*Input/output error.*send again"):
        commit.wait(1, 1_000)

    assert commit.flushed == 0
    disk.error = None
    assert commit.wait(1, 1_000)


def test_a_refusal_reaches_everybody_who_waits(open_pool: ThreadPoolExecutor) -> None:
    """Those in line behind the leader too, and none of them waits on."""
    disk = Disk()
    commit = GroupCommit(disk.flush)
    in_line = commit._mutex = CountingLock(1 + 4)  # type: ignore[assignment]
    disk.may_go_on.clear()
    disk.end, disk.error = 5, refusal()
    first = open_pool.submit(commit.wait, 1, 30_000)
    assert disk.is_flushing.wait(30)
    others = [open_pool.submit(commit.wait, end, 30_000) for end in range(2, 6)]
    assert in_line.reached.wait(30)

    disk.may_go_on.set()

    for each in (first, *others):
        with pytest.raises(StoreError, match="Input/output error"):
            each.result(30)


def test_a_leader_that_is_interrupted_hands_the_lead_on(open_pool: ThreadPoolExecutor) -> None:
    """Ctrl-C in the main thread's flush must not leave all later senders without a leader."""
    disk = Disk()
    commit = GroupCommit(disk.flush)
    in_line = commit._mutex = CountingLock(1 + 1)  # type: ignore[assignment]
    disk.may_go_on.clear()
    disk.end, disk.error = 2, KeyboardInterrupt()
    first = open_pool.submit(commit.wait, 1, 30_000)
    assert disk.is_flushing.wait(30)
    second = open_pool.submit(commit.wait, 2, 30_000)
    assert in_line.reached.wait(30)
    disk.is_flushing.clear()

    disk.may_go_on.set()
    with pytest.raises(KeyboardInterrupt):
        first.result(30)
    with pytest.raises(KeyboardInterrupt):
        second.result(30)
    disk.error = None

    assert commit.wait(2, 30_000)


def test_a_flush_that_reports_less_takes_nothing_back() -> None:
    disk = Disk()
    commit = GroupCommit(disk.flush)
    disk.end = 5
    commit.wait(5, 1_000)
    disk.end = 3

    commit.wait(9, 1_000)

    assert commit.flushed == 5


def test_a_callback_comes_once_its_bytes_are_safe() -> None:
    disk = Disk()
    commit = GroupCommit(disk.flush)
    called: list[tuple[str, object]] = []
    commit.call_when_flushed(5, lambda error: called.append(("five", error)))
    commit.call_when_flushed(9, lambda error: called.append(("nine", error)))

    disk.end = 5
    commit.wait(5, 1_000)

    assert called == [("five", None)]


def test_a_callback_is_told_when_the_disk_refuses() -> None:
    disk = Disk()
    commit = GroupCommit(disk.flush)
    errors: list[object] = []
    commit.call_when_flushed(1, errors.append)
    disk.end, disk.error = 1, refusal()

    with pytest.raises(StoreError):
        commit.wait(1, 1_000)

    assert "Input/output error" in str(errors[0])


def test_the_service_flushes_again_what_the_disk_refused() -> None:
    disk, clock = Disk(), VirtualClock()
    commit = GroupCommit(disk.flush)
    service = FlushService(commit, lambda: disk.end, clock, StoreSettings(flush_disk_type=FlushDiskType.ASYNC_FLUSH))
    disk.end, disk.error = 1, refusal()
    service.changed()
    clock.move_ms(500)
    with pytest.raises(StoreError):
        service.step()
    disk.error = None

    clock.move_ms(500)
    service.step()

    assert commit.flushed == 1
