"""A follower: a store directory that is kept current from the copy of another one, and takes over from its owner.

The bytes of the log and the tables are written as they are copied, and the consume queues, the index and the timers are
built from them again and again, so that little is left to do when it takes over. Nothing is delivered, released or
appended before that. `STANDBY_FILE` says how far the directory is; as long as it exists no broker owns the directory.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mqtemplate.broker import CopyFollower
from mqtemplate.brokers.embedded.broker import EmbeddedBroker
from mqtemplate.clock import Clock, SystemClock, VirtualClock
from mqtemplate.converters.readable import span_text, time_text
from mqtemplate.copy.backup import StoreSummary, create_missing_topics, summary_of, sync_file, write_log, write_table
from mqtemplate.copy.catalogue import (
    Catalogue,
    Epoch,
    Moment,
    Piece,
    SnapshotName,
    is_copied_table,
    to_json,
    zstd,
)
from mqtemplate.copy.lease import SIGN_OF_LIFE_MS, OwnerWatch, follower_object
from mqtemplate.copy.objects import open_objects
from mqtemplate.copy.restore import check_local_owner
from mqtemplate.engine.settings import EmbeddedSettings
from mqtemplate.errors import CopyError, MQTemplateError, StoreError
from mqtemplate.event_log import get_logger
from mqtemplate.processes import absolute_path
from mqtemplate.store.files.disk import Disk, disk_errors
from mqtemplate.store.files.folder_lock import FolderLock
from mqtemplate.store.files.folder_store_files import FolderStoreFiles
from mqtemplate.store.files.layout import file_name
from mqtemplate.store.files.store_files import ABORT_FILE, STANDBY_FILE

_log = get_logger("mqtemplate.copy")

_FOLDER = "standby"
_REQUEST_FILE = "standby/promote.json"
_ANSWER_FILE = "standby/refused.json"
_WARM_BYTES = 64 << 20
_WARM_MS = 60_000
_LOOK_MS = 500
_AGAIN = "follow it in an empty folder after its next snapshot"

Waiting = Callable[[int], None]
"""Function that is called with the milliseconds that a follower will wait for the lease of the owner at least."""


@dataclass(slots=True)
class StandbyState:
    """State of a directory that follows a copy.

    Attributes:
        url: URL of the copy.
        history: Id of the history.
        epoch: Number of the epoch that the directory continues.
        file_size: Size of the files of the commit log.
        log_start: Physical offset of the first byte.
        end: Physical offset after the last byte.
        moment_ms: Time of the last moment whose log and tables the directory has.
        tables_end: Physical offset up to which the log must be for its first tables.
        is_warm: Queues, index and timers have all records.
    """

    url: str
    history: str
    epoch: int
    file_size: int
    log_start: int
    end: int
    tables_end: int
    moment_ms: int
    is_warm: bool = False


@dataclass(frozen=True, slots=True)
class Promotion:
    """Result of `Follower.promote`.

    Attributes:
        moment_ms: Everything that was copied until then is in the directory (epoch ms).
        store: Contents of the directory.
    """

    moment_ms: int
    store: StoreSummary


class Follower:
    """Keeps a directory current from a copy, until it takes over.

    Use it as a context manager: it holds a lock of the directory.

    Args:
        url: URL of the copy; None to go on with that of the directory.
        path: The directory: missing, empty, or one that follows the same copy.

    Raises:
        StoreError: The directory is not empty and follows no copy, or another process keeps it current.
        CopyError: It follows another copy.
        ConfigurationError: The URL is wrong, or a package is missing.
    """

    def __init__(
        self,
        url: str | None,
        path: Path,
        options: Mapping[str, str] | None = None,
        settings: EmbeddedSettings | None = None,
        clock: Clock | None = None,
    ) -> None:
        zstd()
        self.path = absolute_path(path)
        self._clock = clock or SystemClock()
        settings = settings or EmbeddedSettings()
        self._settings = dataclasses.replace(settings, topics=(), mapped_file_size_commit_log=None)
        self.state = read_state(self.path)
        if self.state is None:
            _check_empty(self.path, url)
        elif url is not None and url != self.state.url:
            raise CopyError(
                f"{self.path} follows {self.state.url}, not {url}; give it that one, or another folder to {url}"
            )
        self.url = url or (self.state.url if self.state is not None else "")
        self._objects = open_objects(self.url, options)
        self._files = FolderStoreFiles(self.path, is_standby=True)
        self._lock = FolderLock(self.path / _FOLDER, Disk())
        self._epochs: Sequence[Epoch] = ()
        self._owner = OwnerWatch()
        self._warm_end = self.state.end if self.state is not None and self.state.is_warm else 0
        self._warm_due_ms = self._clock.steady_ms() + _WARM_MS
        self._sign_due_ms = 0
        self._is_seen, self._is_reached = True, False
        self._lock.acquire()
        if self.state is not None and (self.path / ABORT_FILE).exists():
            self._delete_built()  # it was killed while it built them

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *_: object) -> None:
        if self.state is not None and self._lock.process_id >= 0:
            self._hide()
            _log.debug("copy.follower_stopped", path=str(self.path), moment=time_text(self.state.moment_ms))
        self._lock.release()  # the directory stays as it is, and can be continued

    # --- following -----------------------------------------------------------------------------

    def catch_up(self) -> int:
        """Write what is new in the copy, and build what is due. Return the number of bytes of the log.

        Raises:
            CopyError: The place does not answer, an object is damaged, or the copy has no snapshot yet.
            StoreError: The disk failed.
        """
        self._is_reached = False
        catalogue = self._read()
        epoch = catalogue.epochs[-1]
        state = self._state_for(catalogue, epoch)
        before = state.end
        for piece in catalogue.pieces(epoch):
            if piece.end > state.end or piece.name.last_ms > state.moment_ms:
                self._write_piece(catalogue, state, piece)
        if state.end < state.tables_end:
            raise catalogue.missing(state.end, _AGAIN)
        if state.epoch != epoch.number:
            state.epoch = epoch.number
            self._save()
        self._delete_old(catalogue, epoch, state)
        if self._is_warm_due(state):
            self.warm()
        self._is_reached = True
        self._show(state)
        return state.end - before

    def _show(self, state: StandbyState) -> None:
        """Write how far the directory is, for the operators of the owner. Without the right to write it follows on."""
        if self._clock.steady_ms() < self._sign_due_ms:
            return
        self._sign_due_ms = self._clock.steady_ms() + SIGN_OF_LIFE_MS
        host, folder = socket.gethostname(), str(self.path)
        is_warm = self._warm_end == state.end
        sign = CopyFollower(host, os.getpid(), folder, self._clock.now_ms(), state.moment_ms, is_warm)
        try:
            self._objects.put(follower_object(host, folder), to_json(sign))
        except CopyError as exc:
            if self._is_seen:
                _log.warning("copy.follower_unseen", url=self.url, reason=str(exc))
            self._is_seen = False

    def _hide(self) -> None:
        """Delete what `_show` has written: this process follows no more. A place that is gone is not waited for."""
        if not self._is_reached:
            return
        try:
            self._objects.delete([follower_object(socket.gethostname(), str(self.path))])
        except CopyError as exc:
            _log.debug("copy.follower_unseen", url=self.url, reason=str(exc))

    def _read(self) -> Catalogue:
        catalogue = Catalogue.read(self._objects, self._epochs)
        self._epochs = catalogue.epochs
        if not catalogue.epochs or not catalogue.snapshots:
            raise CopyError(f"{self.url} has no snapshot of the tables yet; its owner writes one within seconds")
        self._owner.note(catalogue.alive(catalogue.epochs[-1]), self._clock.steady_ms())
        return catalogue

    def _state_for(self, catalogue: Catalogue, epoch: Epoch) -> StandbyState:
        """Return the state of the directory. It begins again if it has bytes that are no longer in the history."""
        state = self.state
        if state is not None and state.history != catalogue.history:
            raise CopyError(f"{self.url} has another history than {self.path}; give the follower another folder")
        starts = [each.start for each in catalogue.epochs if state is not None and each.number > state.epoch]
        if state is not None and state.end <= min([*starts, state.end]) and epoch.file_size == state.file_size:
            return state
        snapshot = catalogue.snapshot_at(epoch, None)
        if snapshot is None:
            raise CopyError(f"{self.url} has no snapshot of epoch {epoch.number} yet; its owner writes one soon")
        return self._begin(catalogue, epoch, snapshot)

    def _begin(self, catalogue: Catalogue, epoch: Epoch, snapshot: SnapshotName) -> StandbyState:
        """Start with the tables of a snapshot, and an empty log."""
        if self.state is not None:
            _log.warning(
                "copy.follower_begins_again", path=str(self.path), reason="its owner was restored, or replaced"
            )
        self._delete_built()
        for folder in ("commitlog", "standby/config"):
            shutil.rmtree(self.path / folder, ignore_errors=True)
            with disk_errors("create", self.path / folder):
                (self.path / folder).mkdir(mode=0o700, parents=True)
        start = snapshot.log_start
        self.state = StandbyState(
            self.url, catalogue.history, epoch.number, epoch.file_size, start, start, snapshot.end, snapshot.time_ms
        )
        for moment in catalogue.segment(snapshot).moments:
            self._write_tables(moment)
        self._save()
        return self.state

    def _write_piece(self, catalogue: Catalogue, state: StandbyState, piece: Piece) -> None:
        piece, segment = catalogue.merged_piece(piece)
        if piece.end > state.end:
            first = piece.name.start
            if first > state.end:
                raise catalogue.missing(state.end, _AGAIN)
            data = segment.log[state.end - first : piece.end - first]
            write_log(self.path / "commitlog", state.file_size, state.end, data)
            for start in range(state.end - state.end % state.file_size, piece.end, state.file_size):
                sync_file(self.path / "commitlog" / file_name(start))
            state.end, state.is_warm = piece.end, False
        for moment in segment.moments:
            if moment.time_ms > state.moment_ms and moment.end <= state.end:
                self._write_tables(moment)
                state.moment_ms, state.is_warm = moment.time_ms, state.is_warm and not moment.tables
        self._save()

    def _write_tables(self, moment: Moment) -> None:
        for name, data in moment.tables.items():
            if data is None:
                self._files.delete(f"{_FOLDER}/{name}")
            else:
                self._files.write_bytes(f"{_FOLDER}/{name}", data)

    def _save(self) -> None:
        assert self.state is not None, "the directory has begun"
        self._files.write_bytes(STANDBY_FILE, to_json(asdict(self.state)))

    def _delete_old(self, catalogue: Catalogue, epoch: Epoch, state: StandbyState) -> None:
        """Delete the files of the log that the owner had deleted before its last snapshot."""
        snapshot = catalogue.snapshot_at(epoch, None)
        if snapshot is None or snapshot.log_start - state.log_start < state.file_size:
            return
        for path in (self.path / "commitlog").iterdir():
            if int(path.name) + state.file_size <= snapshot.log_start:
                path.unlink()
        state.log_start, state.is_warm = snapshot.log_start, False
        self._save()

    # --- building ------------------------------------------------------------------------------

    def _is_warm_due(self, state: StandbyState) -> bool:
        if state.is_warm:
            return False
        return state.end - self._warm_end >= _WARM_BYTES or self._clock.steady_ms() >= self._warm_due_ms

    def warm(self) -> StoreSummary:
        """Build queues, index and timers up to the end of the log, with the tables of the last moment.

        Raises:
            StoreError: The files cannot be used.
        """
        state = self.state
        assert state is not None, "the directory has begun"
        self._take_tables()
        clock = VirtualClock(max(state.moment_ms, 1))
        with EmbeddedBroker(self.path, self._settings, clock, store_files=self._files) as broker:
            summary = summary_of(broker, create_missing_topics(broker))
        if summary.end_offset != state.end:
            raise StoreError(
                f"{self.path} has records up to physical offset {summary.end_offset}, and the copy up to {state.end}; "
                "this is a fault of mqtemplate: report it, and follow the copy in an empty folder"
            )
        state.is_warm = True
        self._warm_end, self._warm_due_ms = state.end, self._clock.steady_ms() + _WARM_MS
        self._save()
        return summary

    def _take_tables(self) -> None:
        found = [path for path in (self.path / _FOLDER / "config").iterdir() if is_copied_table(path.name)]
        copied = {path.name: path.read_bytes() for path in found}
        (self.path / "config").mkdir(mode=0o700, exist_ok=True)
        for path in (self.path / "config").iterdir():
            if is_copied_table(path.name) and path.name not in copied:
                path.unlink()
        for name, data in copied.items():
            write_table(self.path / "config" / name, data)

    def _delete_built(self) -> None:
        """Delete what `warm` builds."""
        for name in ("config", "consumequeue", "index", "timerlog", "timerwheel", "checkpoint", ABORT_FILE):
            path = self.path / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        if self.state is not None:
            self.state.is_warm = False
        self._warm_end = 0

    # --- taking over ---------------------------------------------------------------------------

    def promote(self, *, force: bool = False, on_wait: Waiting = lambda milliseconds: None) -> Promotion:
        """Make the directory the store of its history, once its owner cannot store anything any more.

        With a lease (``mqtemplate.copy.lease`` of the owner) it waits until that is over, and the owner knows by itself
        that it is. Without one it is the operator who knows that the owner has ended: it must have been silent for a
        minute, or *force* says so.

        Args:
            force: The owner has ended for certain, for example with its machine: do not wait, nor ask the copy.

        Raises:
            CopyError: The owner is alive, another follower was faster, or the place does not answer.
            StoreLockedError: The owner is a process of this machine, which has its directory open.
        """
        try:
            self._wait_for_owner(force, on_wait)
            self._take_over(force, on_wait)
        except CopyError as exc:
            if not force or self.state is None or self.state.end < self.state.tables_end:
                raise
            _log.warning("copy.promoted_without_copy", path=str(self.path), reason=str(exc))
        state = self.state
        assert state is not None, "the directory has begun"
        summary = self.warm()
        self._files.delete(STANDBY_FILE)
        self._hide()
        self._lock.release()
        shutil.rmtree(self.path / _FOLDER, ignore_errors=True)
        _log.info("copy.promoted", path=str(self.path), end_offset=state.end, moment=time_text(state.moment_ms))
        return Promotion(state.moment_ms, summary)

    def _wait_for_owner(self, force: bool, on_wait: Waiting) -> None:
        """Catch up, and wait until the owner is gone for certain.

        Raises:
            CopyError: It gives signs of life.
        """
        self.catch_up()
        owner, sign = self._epochs[-1], self._owner.sign
        check_local_owner(owner)
        while not (force or self._is_own(owner) or owner.host == socket.gethostname()):
            remaining_ms = self._owner.remaining_ms(self._clock)
            if not remaining_ms:
                return
            on_wait(remaining_ms)
            self._clock.sleep(min(remaining_ms, _LOOK_MS) / 1_000)
            self.catch_up()
            if self._owner.sign != sign and not (self._owner.sign is not None and self._owner.sign.is_closed):
                raise CopyError(
                    f"the owner is alive: process {owner.pid} on {owner.host} has just copied {owner.folder} to "
                    f"{self.url}; stop it, then promote"
                )

    def _take_over(self, force: bool, on_wait: Waiting) -> None:
        """Create an epoch: the owner, should it come back, finds it and stores nothing more."""
        self.catch_up()
        owner, state = self._epochs[-1], self.state
        assert state is not None, "it has caught up"
        if self._is_own(owner):
            return  # a promotion that was interrupted has created it
        time_ms = max(self._clock.now_ms(), owner.time_ms + 1)
        own = Epoch(
            owner.number + 1, state.end, time_ms, state.file_size, socket.gethostname(), os.getpid(), str(self.path)
        )
        before = self._owner.sign
        if not self._objects.create(own.object, to_json(own)):
            raise CopyError(
                f"another process has taken over {self.url} at this moment; see: mqtemplate copy ls {self.url}"
            )
        state.epoch = own.number
        self._save()
        now = Catalogue.read(self._objects, self._epochs).alive(owner)
        if now != before and not force:  # its sign was faster than the epoch: it stores until it writes the next one
            self._owner.note(now, self._clock.steady_ms())
            remaining_ms = self._owner.remaining_ms(self._clock)
            on_wait(remaining_ms)
            self._clock.sleep(remaining_ms / 1_000)

    def _is_own(self, epoch: Epoch) -> bool:
        return (epoch.host, epoch.folder) == (socket.gethostname(), str(self.path))


def read_state(path: Path) -> StandbyState | None:
    """Return how far a directory follows a copy; None if it does not.

    Raises:
        StoreError: The file is damaged.
    """
    text = FolderStoreFiles(path).read_bytes(STANDBY_FILE)
    if text is None:
        return None
    try:
        return StandbyState(**json.loads(text))
    except (ValueError, TypeError) as exc:
        raise StoreError(f"{path / STANDBY_FILE} is damaged: {exc}; follow the copy in an empty folder") from exc


def _check_empty(path: Path, url: str | None) -> None:
    with disk_errors("read", path):
        found = [each.name for each in path.iterdir() if each.name != _FOLDER] if path.is_dir() else []
    if url is None:
        raise StoreError(f"{path} follows no copy; name the copy: mqtemplate broker --follow SOURCE --store {path}")
    if found or (os.path.lexists(path) and not path.is_dir()):
        raise StoreError(
            f"{path} is not empty, and follows no copy; give a folder that does not exist yet, or an empty one: "
            "nothing is overwritten"
        )


# --- a follower that runs, and the request to promote it ------------------------------------------


def is_running(path: Path) -> bool:
    """Return True if a process keeps the directory current."""
    return (path / _FOLDER).is_dir() and FolderLock(path / _FOLDER, Disk()).owner() is not None


def request_promotion(path: Path, *, force: bool, clock: Clock | None = None) -> None:
    """Ask the process that keeps a directory current to promote it, and wait until it has, or refuses.

    Raises:
        CopyError: It refuses, or it has ended.
    """
    clock, files = clock or SystemClock(), FolderStoreFiles(path)
    files.delete(_ANSWER_FILE)
    files.write_bytes(_REQUEST_FILE, to_json({"force": force}))
    while files.exists(STANDBY_FILE):
        if (answer := files.read_bytes(_ANSWER_FILE)) is not None:
            raise CopyError(str(json.loads(answer)["reason"]))
        if not is_running(path):
            files.delete(_REQUEST_FILE)
            raise CopyError(f"the process that kept {path} current has ended; promote it again")
        clock.sleep(_LOOK_MS / 1_000)


class FollowLoop:
    """Keeps a directory current until it is promoted.

    Args:
        interval_ms: Time between two looks at the copy.
        report: Called with a sentence for the operator.
    """

    def __init__(self, follower: Follower, interval_ms: int, report: Callable[[str], None]) -> None:
        self._follower = follower
        self._files = FolderStoreFiles(follower.path)
        self._interval_ms = interval_ms
        self._report = report
        self._error: str | None = None
        self._is_current = False

    def run(self, is_stopped: Callable[[float], bool]) -> Promotion | None:
        """Return the promotion; None if it was stopped.

        Args:
            is_stopped: Waits for this many seconds; returns True if the process is to end.
        """
        while True:
            self._step()
            if (promotion := self._answer_request()) is not None:
                return promotion
            if is_stopped(self._interval_ms / 1_000):
                return None

    def _step(self) -> None:
        try:
            count = self._follower.catch_up()
        except CopyError as exc:
            if self._error is None:
                _log.warning("copy.follower_waits", url=self._follower.url, reason=str(exc))
                self._report(f"waiting: {exc}")
            self._error, self._is_current = str(exc), False
            return
        if self._error is not None:
            _log.info("copy.follower_works_again", url=self._follower.url)
        self._error = None
        if not self._is_current and not count and self._follower.state is not None:
            self._is_current = True
            self._report(f"current until {time_text(self._follower.state.moment_ms)}; it follows on")

    def _answer_request(self) -> Promotion | None:
        request = self._files.read_bytes(_REQUEST_FILE)
        if request is None:
            return None
        force = bool(json.loads(request).get("force"))
        self._files.delete(_REQUEST_FILE)
        try:
            return self._follower.promote(
                force=force, on_wait=lambda milliseconds: self._report(_waiting_text(milliseconds))
            )
        except MQTemplateError as exc:
            self._report(f"not promoted: {exc}")
            self._files.write_bytes(_ANSWER_FILE, to_json({"reason": str(exc)}))
            return None


def _waiting_text(milliseconds: int) -> str:
    return f"waiting until the owner cannot store anything any more, {span_text(milliseconds)} at least"
