"""The continuous copy: a service that reads the files of an open store, and the embedded broker that has it."""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from mqtemplate.broker import CopyFollower, CopyHealth
from mqtemplate.brokers.embedded.broker import EmbeddedBroker
from mqtemplate.clock import Clock
from mqtemplate.converters.readable import time_text
from mqtemplate.copy.catalogue import (
    ALIVE_MS,
    FORMAT,
    HISTORY_TABLE,
    ROOT_OBJECT,
    Alive,
    Catalogue,
    ChangedTables,
    Epoch,
    Moment,
    Segment,
    SegmentName,
    SnapshotName,
    alive_object,
    encode,
    read_json,
    to_json,
    zstd,
)
from mqtemplate.copy.lease import SIGN_OF_LIFE_MS, Lease, read_followers
from mqtemplate.copy.objects import ObjectStore, open_objects
from mqtemplate.engine.settings import CopyOptions, EmbeddedSettings
from mqtemplate.errors import ConfigurationError, CopyError
from mqtemplate.event_log import get_logger
from mqtemplate.metrics import MetricKind, MetricSample
from mqtemplate.processes import OPEN_FLAGS
from mqtemplate.services import Service, ServiceThread, wall_time
from mqtemplate.store.files.disk import pread
from mqtemplate.store.files.layout import file_name
from mqtemplate.store.message_store import MessageStore
from mqtemplate.store.tables import read_table, write_table

_log = get_logger("mqtemplate.copy")

_PIECE = 8 << 20
_FIRST_RETRY_MS, _LAST_RETRY_MS = 1_000, 60_000
_MERGED_COUNT = 60  # at an interval of a second, objects of a minute
_END_S = 5.0


def _contents(segment: Segment) -> Iterator[bytes | None]:
    return (data for moment in segment.moments for data in moment.tables.values())


class _RefusedError(CopyError):
    """Copying ends: no retry helps before an operator acts."""


class Copier:
    """Copies the commit log and the tables of an open store. A `Service`.

    - Only flushed bytes are copied: after a power failure the store never has less than its copy.
    - Tables are read before the end of the log. So they are never ahead of the copied log.
    - It reads files, and holds no lock of the store. Sends do not wait for it, whatever the place of the copy does.
    - While the place does not answer, it tries again, at last once a minute. That is logged once.
    - It ends for good (*refusal*) if the place has the copy of another history, or if a newer process copies there.
    - With a lease the store accepts nothing while the place does not answer, and never again after such an end.

    Args:
        store: The store. It is loaded when the first step is taken.
        folder: The store directory.

    Attributes:
        lease: None without ``mqtemplate.copy.lease``.
    """

    name = "broker.copy"

    def __init__(self, store: MessageStore, folder: Path, options: CopyOptions) -> None:
        zstd()
        self._store = store
        self._folder = folder
        self._options = options
        self._clock = store.clock
        self._to = options.to or ""
        self._objects: ObjectStore = open_objects(self._to, options.options)
        self.lease = None if options.lease is None else Lease(store.clock, options.lease, self._to)
        self._sign_ms = min(SIGN_OF_LIFE_MS, (options.lease or 3 * SIGN_OF_LIFE_MS) // 3)
        self._is_fenced = False
        self._tables = ChangedTables(folder)
        self._lock = threading.Lock()  # held during a step: at the end of the process, another one may hang
        self._epoch: Epoch | None = None
        self._end = 0
        self._log_start = 0
        self._due_ms = self._started_ms = self._clock.steady_ms()
        self._sign_due_ms = 0
        self._snapshot_due_ms = self._started_ms
        self._copied_ms: int | None = None
        self._snapshot_ms: int | None = None
        self._followers: list[CopyFollower] = []
        self._small: list[tuple[SegmentName, Segment]] = []
        self._retry_ms = 0
        self._is_ending = False
        self.error: str | None = None
        self.refusal: str | None = None
        self._copied_bytes = store.metrics.counter("copy.copied_bytes")
        self._failures = store.metrics.counter("copy.failures")
        self._gaps = store.metrics.counter("copy.gaps")
        store.metrics.add_collector(self._samples)

    # --- the service ---------------------------------------------------------------------------

    def on_wake(self, wake: Callable[[], None]) -> None:
        """Ignore *wake*: the service works at its interval."""

    def step(self) -> int | None:
        if self._is_due():
            self._due_ms = self._clock.steady_ms() + self._longest_pause(self._options.interval)
            self._tried(self._copy)
            self._report_fence()
        return wall_time(self._clock, None if self._is_refused() else self._due_ms)

    def _longest_pause(self, pause_ms: int) -> int:
        return pause_ms if self.lease is None else min(pause_ms, self._sign_ms)

    def _report_fence(self) -> None:
        reason = None if self.lease is None else self.lease.refusal()
        if (reason is not None) == self._is_fenced:
            return
        self._is_fenced = reason is not None
        if reason is None:
            _log.info("copy.lease_renewed", to=self._to)
        else:
            _log.error("copy.lease_is_over", to=self._to, reason=reason)

    def _is_refused(self) -> bool:
        return self.refusal is not None

    def _is_due(self) -> bool:
        return not self._is_refused() and self._due_ms <= self._clock.steady_ms()

    def _tried(self, action: Callable[[], object]) -> None:
        with self._lock:
            try:
                action()
            except (CopyError, OSError) as exc:
                self._fail(exc)
            else:
                self._succeed()

    def _fail(self, exc: CopyError | OSError) -> None:
        self._failures.add()
        if isinstance(exc, _RefusedError):
            self.refusal = self.error = str(exc)
            if self.lease is not None:
                self.lease.lose(self.refusal)
            _log.error("copy.refused", to=self._to, reason=self.refusal)
            return
        self._retry_ms = min(max(2 * self._retry_ms, _FIRST_RETRY_MS), _LAST_RETRY_MS)
        self._due_ms = self._clock.steady_ms() + self._longest_pause(self._retry_ms)
        if self.error is None:
            hint = "messages are stored as before; it is tried again, at last once a minute"
            if self.lease is not None:
                hint = "messages are stored until the lease is over; it is tried again until then, and after it"
            _log.warning("copy.failed", to=self._to, reason=str(exc), hint=hint)
        self.error = str(exc)

    def _succeed(self) -> None:
        if self.error is not None:
            _log.info("copy.works_again", to=self._to, lag_bytes=self.health().lag_bytes)
        self.error, self._retry_ms = None, 0

    def health(self) -> CopyHealth:
        """Return how far the copy is behind the store."""
        # Before the first snapshot is written, nothing can be restored.
        known = self._end if self._snapshot_ms is not None else self._store.start_offset
        lag_bytes = max(self._store.end_offset - known, 0)
        now_ms = self._clock.now_ms()
        since_ms = self._copied_ms if self._copied_ms is not None else now_ms - self._running_ms()
        is_current = lag_bytes == 0 and self.error is None and self._snapshot_ms is not None
        return CopyHealth(
            to=self._to,
            lag_bytes=lag_bytes,
            lag_ms=0 if is_current else max(now_ms - since_ms, 0),
            copied_ms=self._copied_ms,
            error=self.error,
            max_lag_ms=self._options.max_lag,
            is_refused=self.refusal is not None,
            epoch=None if self._epoch is None else self._epoch.number,
            owner=f"process {os.getpid()} on {socket.gethostname()}, {self._folder}",
            snapshot_ms=self._snapshot_ms,
            lease_ms=self._options.lease,
            followers=tuple(self._followers),
        )

    def _samples(self) -> Iterator[MetricSample]:
        """Yield the gauges of the copy; ``copy.snapshot_age_ms`` once it has a snapshot."""
        health, now_ms = self.health(), self._clock.now_ms()
        gauges: dict[str, int | None] = {
            "copy.lag_bytes": health.lag_bytes,
            "copy.lag_ms": health.lag_ms,
            "copy.max_lag_ms": health.max_lag_ms,
            "copy.failing": int(health.error is not None and not health.is_refused),
            "copy.refused": int(health.is_refused),
            "copy.fenced": int(self.lease is not None and self.lease.refusal() is not None),
            "copy.snapshot_age_ms": None if health.snapshot_ms is None else now_ms - health.snapshot_ms,
            "copy.snapshot_overdue_ms": max(self._clock.steady_ms() - self._snapshot_due_ms, 0),
            "copy.follower_silent_ms": max((now_ms - each.seen_ms for each in health.followers), default=None),
        }
        for name, value in gauges.items():
            if value is not None:
                yield MetricSample(name, MetricKind.GAUGE, value, {})

    def _running_ms(self) -> int:
        return self._clock.steady_ms() - self._started_ms

    def why_kept(self, physical_end: int) -> str | None:
        """Return why the part of the log before this offset must not be deleted; None if it may be."""
        if not self._options.keep_uncopied or self.refusal is not None:
            return None
        if self._epoch is not None and self._end >= physical_end:
            return None
        return (
            f"it is not copied to {self._to} yet ({self.error or 'the copy goes on'}); it stays until it is, "
            "or the disk is full; to delete it nevertheless, set mqtemplate.copy.keep-uncopied to false"
        )

    def end(self) -> None:
        """Let a step that copies much return after its current piece."""
        self._is_ending = True

    def begin(self) -> None:
        """Begin the copy now, unless it has begun or cannot."""
        if self._epoch is None and self.error is None:
            self._tried(lambda: self._show_that_it_lives(self._begin()))

    def finish(self) -> None:
        """After the store was closed: copy the rest, and write that this process has ended."""
        self._is_ending = False
        if self._epoch is not None and self.error is None:
            self._tried(self._copy_rest)

    def _copy_rest(self) -> None:
        self._copy(is_last=True)
        self._show_alive(is_closed=True)

    def check_owner(self) -> None:
        """With a lease, before the store is opened: check that no other process owns its history.

        Raises:
            CopyError: Another one is alive, or the place does not answer.
        """
        if self.lease is None or ROOT_OBJECT not in self._objects.list(""):
            return
        catalogue = Catalogue.read(self._objects)
        if catalogue.epochs:
            self._check_ended(catalogue, catalogue.epochs[-1])

    # --- one step ------------------------------------------------------------------------------

    def _copy(self, *, is_last: bool = False) -> None:
        epoch = self._epoch or self._begin()
        if self._sign_due_ms <= self._clock.steady_ms():
            self._show_that_it_lives(epoch)
        tables = self._tables.changed()
        end = self._store.group_commit.flushed
        time_ms = max(self._clock.now_ms(), (self._copied_ms or 0) + 1)
        if not is_last:
            self._log_start = self._store.start_offset
            if self._log_start > self._end:
                self._restart_after_gap(self._log_start)
                return
        if not self._copy_log(epoch, end, Moment(time_ms, end, tables)):
            return
        self._tables.copied()
        self._copied_ms = time_ms
        is_due = self._snapshot_due_ms <= self._clock.steady_ms() and not is_last
        if is_due or self._snapshot_ms is None:
            self._take_snapshot(epoch, time_ms)

    def _copy_log(self, epoch: Epoch, end: int, moment: Moment) -> bool:
        """Copy the log up to *end*; the last piece has the tables. Return False if the process ends meanwhile."""
        if self._end == end:
            if moment.tables:
                self._put_small(epoch, Segment(end, b"", [moment]))
            return True
        while self._end < end:
            data = self._read(self._end, min(_PIECE, end - self._end))
            is_last = self._end + len(data) == end
            here = moment if is_last else Moment(moment.time_ms, self._end + len(data), {})
            self._put_small(epoch, Segment(self._end, data, [here]), int(is_last))
            self._end += len(data)
            if self._is_ending and not is_last:
                return False
        return True

    def _put(self, epoch: Epoch, segment: Segment, is_complete: int) -> SegmentName:
        name = segment.name_in(epoch.number, is_complete)
        data = encode(segment)
        self._objects.put(name.object, data)
        self._copied_bytes.add(len(data))
        return name

    def _put_small(self, epoch: Epoch, segment: Segment, is_complete: int = 1) -> None:
        """Write a segment. Write the last ones again as one when they are many: a restore reads few objects."""
        self._small.append((self._put(epoch, segment, is_complete), segment))
        size = sum(len(each.log) + sum(map(len, filter(None, _contents(each)))) for _, each in self._small)
        if len(self._small) < _MERGED_COUNT and size < _PIECE:
            return
        small, self._small = self._small, []
        if len(small) > 1:
            log = b"".join(each.log for _, each in small)
            moments = [moment for _, each in small for moment in each.moments]
            self._put(epoch, Segment(small[0][1].start, log, moments), small[-1][0].is_complete)
            self._objects.delete([name.object for name, _ in small])

    def _read(self, physical_offset: int, size: int) -> bytes:
        """Return bytes of one file of the log.

        The files are read, not the maps of the store: reading bytes of a map that are not in memory would stop all
        threads.
        """
        file_size = self._store.sizes.commit_log
        start = physical_offset - physical_offset % file_size
        fd = os.open(self._folder / "commitlog" / file_name(start), os.O_RDONLY | OPEN_FLAGS)
        try:
            data = pread(fd, min(size, start + file_size - physical_offset), physical_offset - start)
        finally:
            os.close(fd)
        if not data:
            raise CopyError(f"commitlog/{file_name(start)} has no byte {physical_offset - start}")
        return data

    def _take_snapshot(self, epoch: Epoch, time_ms: int) -> None:
        """Write all tables as they were copied, then delete what no moment needs that is kept."""
        name = SnapshotName(epoch.number, time_ms, self._log_start, self._end)
        moment = Moment(time_ms, self._end, self._tables.all())
        self._objects.put(name.object, encode(Segment(self._end, b"", [moment])))
        self._snapshot_ms = time_ms
        self._snapshot_due_ms = self._clock.steady_ms() + self._options.snapshot_interval
        _log.debug("copy.snapshot_written", to=self._to, tables=len(moment.tables), end_offset=self._end)
        self._delete_old(self._clock.now_ms() - self._options.keep)

    def _delete_old(self, before_ms: int) -> None:
        """Delete the segments and snapshots that no moment from *before_ms* on needs."""
        catalogue = Catalogue.read(self._objects)
        old = [each for each in catalogue.snapshots if each.time_ms <= before_ms]
        if len(old) < 2:
            return
        base = max(old, key=lambda each: each.time_ms)
        gone = [each.object for each in old if each != base]
        kept_epochs = {base.epoch}
        for segment in catalogue.segments:
            is_older = segment.last_ms <= base.time_ms
            if is_older and (segment.end <= base.log_start or segment.start == segment.end):
                gone.append(segment.object)
            else:
                kept_epochs.add(segment.epoch)
        for epoch in catalogue.epochs:
            if epoch.number < min(kept_epochs):
                gone += [epoch.object, alive_object(epoch.number)]
        self._objects.delete(gone)
        _log.debug("copy.old_deleted", to=self._to, objects=len(gone), first_moment=time_text(base.time_ms))

    # --- epochs --------------------------------------------------------------------------------

    def _begin(self) -> Epoch:
        """Create an epoch that continues the copy where store and copy agree."""
        history = self._history()
        root = to_json({"format": FORMAT, "history": history})
        if not self._objects.create(ROOT_OBJECT, root):
            found = read_json(self._objects, ROOT_OBJECT).get("history")
            if found != history:
                raise _RefusedError(
                    f"{self._to} has the copy of another store directory (history {found}, and this one is "
                    f"{history}); give mqtemplate.copy.to a place of its own"
                )
        catalogue = Catalogue.read(self._objects)
        self._snapshot_ms = max((each.time_ms for each in catalogue.snapshots), default=None)
        previous = catalogue.epochs[-1] if catalogue.epochs else None
        if previous is not None:
            self._check_ended(catalogue, previous)
        start = self._start_after(catalogue, previous)
        if previous is not None and self.lease is not None and not self._is_own(previous):
            self._check_current(catalogue, previous, start)
        return self._create_epoch(previous.number + 1 if previous else 1, start, previous.time_ms if previous else 0)

    def _create_epoch(self, number: int, start: int, after_ms: int) -> Epoch:
        time_ms = max(self._clock.now_ms(), after_ms + 1)
        file_size = self._store.sizes.commit_log
        epoch = Epoch(number, start, time_ms, file_size, socket.gethostname(), os.getpid(), str(self._folder))
        if not self._objects.create(epoch.object, to_json(epoch)):
            raise CopyError(f"another process begins to copy to {self._to} at this moment")
        self._epoch, self._end, self._log_start = epoch, start, self._store.start_offset
        self._tables, self._small = ChangedTables(self._folder), []
        self._snapshot_due_ms = self._sign_due_ms = self._clock.steady_ms()
        _log.info("copy.started", to=self._to, epoch=number, start_offset=start)
        return epoch

    def _history(self) -> str:
        files = self._store.store_files
        found = read_table(files, HISTORY_TABLE).get("history")
        if isinstance(found, str):
            return found
        history = secrets.token_hex(16)
        write_table(files, HISTORY_TABLE, {"history": history})
        return history

    def _check_ended(self, catalogue: Catalogue, previous: Epoch) -> None:
        """Check that the process of an epoch has ended. One on this host had this directory, which is ours now."""
        if self._is_own(previous):
            return
        alive = catalogue.alive(previous)
        if not alive.is_closed and self._clock.now_ms() - alive.seen_ms < ALIVE_MS:
            raise CopyError(
                f"process {previous.pid} on {previous.host} copies {previous.folder} to {self._to}, and was "
                f"alive at {time_text(alive.seen_ms)}; this process goes on with the copy when that one has been "
                f"silent for {ALIVE_MS // 1_000} s. Two brokers must not have one history: stop one, or restore "
                "with --fork and give it a place of its own"
            )

    def _is_own(self, epoch: Epoch) -> bool:
        return (epoch.host, epoch.folder) == (socket.gethostname(), str(self._folder))

    def _check_current(self, catalogue: Catalogue, previous: Epoch, start: int) -> None:
        """Check that no other process has continued the history from an earlier record than the last one here."""
        end = max([previous.start, *(each.end for each in catalogue.pieces(previous))])
        if start < end or start < self._store.group_commit.flushed:
            raise _RefusedError(
                f"process {previous.pid} on {previous.host} has gone on with the history of this store directory, in "
                f"{previous.folder}, from physical offset {previous.start} on; this directory is not the newest any "
                f"more. Move it away, and write a new one with: mqtemplate broker --follow {self._to}"
            )

    def _start_after(self, catalogue: Catalogue, previous: Epoch | None) -> int:
        """Return the physical offset up to which the copy has what the store has."""
        start, end = self._store.start_offset, self._store.group_commit.flushed
        pieces = catalogue.pieces(previous) if previous is not None else []
        for piece in reversed(pieces):
            if piece.name.start == piece.name.end or piece.end > end:
                continue
            if piece.end <= start:
                self._report_gap(start - piece.end)
                return start
            log = catalogue.segment(piece.name).log
            first = max(piece.name.start, start)
            if self._has(first, log[first - piece.name.start : piece.end - piece.name.start]):
                return piece.end
        return start

    def _has(self, physical_offset: int, data: bytes) -> bool:
        while data:
            found = self._read(physical_offset, len(data))
            if data[: len(found)] != found:
                return False
            physical_offset, data = physical_offset + len(found), data[len(found) :]
        return True

    def _restart_after_gap(self, start: int) -> None:
        """Continue after files that were deleted before they were copied."""
        assert self._epoch is not None, "the copy has begun"
        self._report_gap(start - self._end)
        self._create_epoch(self._epoch.number + 1, start, self._epoch.time_ms)
        self._due_ms = self._clock.steady_ms()

    def _report_gap(self, missing_bytes: int) -> None:
        self._gaps.add()
        _log.error(
            "copy.gap",
            to=self._to,
            missing_bytes=missing_bytes,
            reason="files of the commit log were deleted before they were copied",
            hint="the copy has no moment in between; it goes on with what the store has now",
        )

    def _show_that_it_lives(self, epoch: Epoch) -> None:
        # The sign first: a follower that saw none of it has created its epoch before, which is found then.
        since_ms = 0 if self.lease is None else self.lease.now_ms()
        self._show_alive()
        self._check_newest(epoch)
        if self.lease is not None:
            self.lease.renew(since_ms)
        self._followers = read_followers(self._objects, self._clock.now_ms())

    def _check_newest(self, epoch: Epoch) -> None:
        """Check that no newer process copies there."""
        numbers = [int(name[7:15]) for name in self._objects.list("epochs/") if name[7:15].isdecimal()]
        if max(numbers, default=0) > epoch.number:
            newer = read_json(self._objects, f"epochs/{max(numbers):08d}.json")
            raise _RefusedError(
                f"process {newer.get('pid')} on {newer.get('host')} has taken over the copy at {self._to} with "
                f"{newer.get('folder')}; two brokers have one history now: stop one of them"
            )

    def _show_alive(self, *, is_closed: bool = False) -> None:
        assert self._epoch is not None, "the copy has begun"
        sign = Alive(self._clock.now_ms(), self._copied_ms or 0, is_closed, self._options.lease or 0)
        self._objects.put(alive_object(self._epoch.number), to_json(sign))
        self._sign_due_ms = self._clock.steady_ms() + self._sign_ms


class CopiedBroker(EmbeddedBroker):
    """An embedded broker whose store directory is copied all the time.

    Args:
        path: The store directory.
        copy: Where the copy is, and how often.

    Raises:
        ConfigurationError: The place has an unknown scheme, or a package for it is missing.
    """

    def __init__(
        self, path: Path, settings: EmbeddedSettings | None, clock: Clock | None, *, copy: CopyOptions
    ) -> None:
        super().__init__(path, settings, clock)
        assert self.path is not None, "a copy needs a directory"
        if (copy.to or "").startswith(f"{self.path.as_uri()}/"):
            raise ConfigurationError(
                f"mqtemplate.copy.to is {copy.to!r}, in the store directory itself: it would be lost with it; name a "
                "folder of another disk, or an object store"
            )
        self._copier = Copier(self.store, self.path, copy)
        self._thread: ServiceThread | None = None

    def start(self) -> None:
        """Open the files, recover, and start copying. Without a lease the place of the copy need not answer for that.

        Raises:
            CopyError: With a lease: the place does not answer, or another process owns the history.
        """
        is_first = not self.engine.lifecycle.is_open
        if is_first:
            self._copier.check_owner()
        super().start()
        if not is_first:
            return
        self.store.cleaning.holds.append(self._copier.why_kept)
        if self._copier.lease is not None:
            self._bounded(self._copier.begin)
            self.store.fence = self.store.fence or self._copier.lease.refusal
        if not self.clock.is_virtual:
            self._thread = ServiceThread("mqtemplate-copy", [self._copier], self.clock, self.store.report)
            self._thread.start()

    def services(self) -> Sequence[Service]:
        return [*super().services(), self._copier]

    def copy_health(self) -> CopyHealth:
        return self._copier.health()

    def close(self) -> None:
        """Close the files, then copy the rest of them. A place that hangs takes fifteen seconds at most."""
        lifecycle = self.engine.lifecycle
        if not lifecycle.is_open or not lifecycle.owner.is_current:
            return
        self._copier.end()
        if self._thread is not None:
            self._thread.stop(_END_S)
        has_begun = False
        try:
            has_begun = self._bounded(self._copier.begin)  # a program may end before the first step
        finally:
            super().close()
        if not (has_begun and self._bounded(self._copier.finish)) or self._copier.error is not None:
            health = self._copier.health()
            _log.warning("copy.incomplete", to=health.to, lag_bytes=health.lag_bytes, lag_ms=health.lag_ms)

    def _bounded(self, action: Callable[[], None]) -> bool:
        """Run an action; on a system clock return False if it takes too long: a place that hangs keeps no process."""
        if self.clock.is_virtual:
            action()
            return True
        thread = threading.Thread(target=action, name="mqtemplate-copy", daemon=True)
        thread.start()
        thread.join(_END_S)
        return not thread.is_alive()
