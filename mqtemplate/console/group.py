"""The processes of one application on one machine: one of them serves the management address for all.

Each process has a private actuator on loopback, and a file in a folder of the user that tells the others its port and
its key. A lock belongs to each file, so the end of a process is seen however it ends. One more lock chooses the process
that listens on the address.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import http.client
import json
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

from mqtemplate.console.actuator import MAX_BODY_BYTES, SAMPLES, Actuator, ActuatorAccess
from mqtemplate.console.merging import NO_ANSWER, NO_PROCESS, ActuatorCall, WorkerAnswer
from mqtemplate.context.settings.app import AppSettings
from mqtemplate.context.settings.features import ManagementSettings
from mqtemplate.event_log import get_logger
from mqtemplate.http.exchange import HttpRequest, HttpResponse
from mqtemplate.http.server import HttpServer
from mqtemplate.processes import OPEN_FLAGS, call_after_fork, write_private
from mqtemplate.store.files.disk import lock_first_byte

_log = get_logger("mqtemplate.actuator")

_LOOPBACK = "127.0.0.1"
_REMOTE = "x-mqtemplate-remote"
_READ_S, _CHANGE_S = 8.0, 20.0
"""Most time to wait for a process: Prometheus waits 10 s for a scrape by default, and `ActuatorClient` 30 s."""
_TRIES, _PAUSE_S = 25, 0.02
_MAX_WORKERS = 1_000
_MAX_CONNECTIONS = 16


Expected: TypeAlias = Callable[[], Mapping[str, int | None]]


class LockedFile:
    """A file that this process has locked. The lock ends with the process, also if it is killed.

    A forked child closes its copy: it must not keep the lock.
    """

    def __init__(self, path: Path, fd: int) -> None:
        self._path = path
        self._fd = fd
        call_after_fork(self)

    @classmethod
    def take(cls, path: Path) -> LockedFile | None:
        """Create the file if it is missing, and lock it; return None if another one has it locked."""
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | OPEN_FLAGS, 0o600)
            try:
                lock_first_byte(fd)
                if os.fstat(fd).st_ino == path.stat().st_ino:
                    return cls(path, fd)
            except (BlockingIOError, PermissionError):
                os.close(fd)
                return None
            except FileNotFoundError:
                pass  # its owner has ended between the two calls, and removed it
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    @property
    def is_held(self) -> bool:
        """True until `release`."""
        return self._fd >= 0

    def refresh(self) -> None:
        """Note that the file is in use: some systems delete old files of temporary folders."""
        with contextlib.suppress(OSError):
            os.utime(self._path)

    def release(self) -> None:
        """Remove the file, and end the lock. A second call has no effect."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):  # Windows does not remove a file that is open
                self._path.unlink()
            os.close(fd)

    def after_fork(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def take_name(folder: Path, wanted: str | None) -> tuple[str, LockedFile]:
    """Return the wanted name, or the lowest free number, with its lock.

    Raises:
        OSError: The folder cannot be written, or has no free number.
    """
    for _ in range(_TRIES if wanted is not None else 0):  # a reader has the lock of an ended process for a moment
        if (lock := _take_in(folder, wanted)) is not None:
            return str(wanted), lock
        time.sleep(_PAUSE_S)
    for number in range(1, _MAX_WORKERS):
        if (lock := _take_in(folder, number)) is not None:
            return str(number), lock
    raise OSError(f"{folder} has {_MAX_WORKERS} processes already")


def _take_in(folder: Path, name: object) -> LockedFile | None:
    """Take the lock of a name. The last process that leaves the folder may remove it at any time."""
    for _ in range(_TRIES):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            return LockedFile.take(folder / f"{name}.lock")
    raise FileNotFoundError(f"{folder} is removed again and again by another program")


# --- folders ------------------------------------------------------------------------------------


def private_folder() -> Path | None:
    """Return a folder that only this user can use, the same one in all processes; None if this machine has none."""
    for base in (os.environ.get("XDG_RUNTIME_DIR"), _temporary_folder(), "/dev/shm"):
        if base and (folder := _own_folder(Path(base))) is not None:
            return folder
    return None


def _temporary_folder() -> str | None:
    try:
        return tempfile.gettempdir()
    except OSError:  # none can be written
        return None


def _own_folder(base: Path) -> Path | None:
    """Return our folder in a folder that others may write to; None if it cannot be used, or another user made it."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    folder = base / f"mqtemplate-{user}"
    try:
        if not base.is_dir():
            return None
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return None
    is_private = os.name == "nt" or (found.st_uid == user and not stat.S_IMODE(found.st_mode) & 0o077)
    return folder if stat.S_ISDIR(found.st_mode) and is_private and os.access(folder, os.W_OK) else None


def group_folder(settings: AppSettings) -> Path | None:
    """Return the folder of the processes with one configuration folder and address; None if there can be none.

    Another application that has the same port by mistake has another folder, and gets the error of a port in use.
    """
    base = private_folder()
    if base is None:
        return None
    management = settings.mqtemplate.management
    identity = [str(settings.origins.folder), management.name, management.address, management.port]
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    return base / f"management-{management.port}-{digest[:16]}"


# --- one process --------------------------------------------------------------------------------


class ProcessGroup:
    """The processes of one application, as one of them sees the others; see `Processes`.

    Args:
        folder: Folder of the group.
        wanted: Name of this process; None for the lowest free number.
        expected: Returns the processes that should run: name -> process id, None for one that has none now.
        is_several: The application has several processes, also while the others have not started yet.
    """

    def __init__(
        self,
        actuator: Actuator,
        folder: Path,
        wanted: str | None,
        health_timeout_s: float,
        expected: Expected = dict,
        *,
        is_several: bool = False,
    ) -> None:
        self.folder = folder
        self._actuator = actuator
        self._health_timeout_s = health_timeout_s
        self._expected = expected
        self.name, self._lock = take_name(folder, wanted)
        self._is_several = is_several or self.name != (wanted or "1")
        self._key = secrets.token_urlsafe(32)
        self._authorization = f"Bearer {self._key}"
        self._access = ActuatorAccess(token=self._key)
        self.endpoints: Sequence[str] = (*actuator.endpoints, SAMPLES)
        self.read, self.change = actuator.read, actuator.change
        self._server = HttpServer(
            self._handle,
            _LOOPBACK,
            0,
            thread_name="mqtemplate-worker",
            events=_log,
            event="management",
            max_connections=_MAX_CONNECTIONS,
            max_body_bytes=MAX_BODY_BYTES,
            urgent_path="/health",
        )

    # --- this process --------------------------------------------------------------------------

    def start(self) -> None:
        """Let the others find this process."""
        try:
            self._server.start()
            self._write()
        except BaseException:
            self.stop()
            raise

    def _write(self) -> None:
        document = {"process": os.getpid(), "port": self._server.address.port, "key": self._key}
        write_private(self.folder / f"{self.name}.json", json.dumps(document).encode())

    def refresh(self) -> None:
        """Keep the files of this process in a temporary folder, from which old ones may be deleted."""
        self._lock.refresh()
        try:
            os.utime(self.folder / f"{self.name}.json")
        except OSError:
            self._write()

    def stop(self) -> None:
        """Leave the group. A second call has no effect."""
        if not self._lock.is_held:
            return
        with contextlib.suppress(OSError):
            (self.folder / f"{self.name}.json").unlink()
        self._server.stop()
        self._lock.release()
        with contextlib.suppress(OSError):  # not empty
            self.folder.rmdir()

    def _handle(self, request: HttpRequest) -> HttpResponse:
        given = request.headers.get("authorization", "").encode()
        if hmac.compare_digest(given, self._authorization.encode()):  # from one of us, who says who has asked it
            request = dataclasses.replace(request, remote=request.headers.get(_REMOTE, request.remote))
        return self._access.answer(self, request)

    # --- all processes -------------------------------------------------------------------------

    @property
    def is_alone(self) -> bool:
        """True if the application has this process only, and never had another one."""
        if not self._is_several:
            self._is_several = len(self.names()) > 1
        return not self._is_several

    def note_others(self) -> None:
        """Note that another process serves the address: this one is not alone."""
        self._is_several = True

    def names(self) -> Sequence[str]:
        """Return the names of the processes, numbers first."""
        others = self._others()
        running = {found["process"] for found in others.values()}
        missing = [name for name, process in self._expected().items() if process not in running]
        names = {self.name, *others, *missing}
        return sorted(names, key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name))

    def _others(self) -> dict[str, Mapping[str, Any]]:
        return {path.stem: found for path in self.folder.glob("*.json") if (found := self._found(path)) is not None}

    def _found(self, path: Path) -> Mapping[str, Any] | None:
        """Return the file of another process; None if it has ended."""
        if path.stem == self.name:
            return None
        try:
            lock = LockedFile.take(path.with_suffix(".lock"))
            if lock is None:
                found: Mapping[str, Any] = json.loads(path.read_bytes())
                return found
            path.unlink(missing_ok=True)
            lock.release()
        except (OSError, ValueError):
            pass  # it ends now
        return None

    def ask(self, call: ActuatorCall, names: Sequence[str] = ()) -> Sequence[WorkerAnswer]:
        """Send a call to these processes, or to all, at the same time."""
        others = self._others()
        asked = names or self.names()
        with ThreadPoolExecutor(min(32, len(asked)), thread_name_prefix="mqtemplate-worker") as pool:
            return list(pool.map(lambda name: self._ask(name, others.get(name), call), asked))

    def _ask(self, name: str, found: Mapping[str, Any] | None, call: ActuatorCall) -> WorkerAnswer:
        if name == self.name:
            headers = {"authorization": self._authorization, **call.headers}
            own = HttpRequest(
                method=call.method, path=f"/{call.path}", headers=headers, body=call.body, remote=call.remote
            )
            response = self._access.answer(self, own)
            assert isinstance(response.body, bytes), "a document is not a stream"
            return WorkerAnswer(name, response.status, json.loads(response.body))
        if found is None:
            return WorkerAnswer(name, NO_PROCESS, {"error": "the process does not run, or has not started yet"})
        timeout_s = self._timeout_of(call)
        connection = http.client.HTTPConnection(_LOOPBACK, found["port"], timeout=timeout_s)
        try:
            headers = {"Authorization": f"Bearer {found['key']}", _REMOTE: call.remote, **call.headers}
            connection.request(call.method, call.target, call.body or None, headers)
            answer = connection.getresponse()
            return WorkerAnswer(name, answer.status, json.loads(answer.read()))
        except ConnectionRefusedError:
            return WorkerAnswer(name, NO_PROCESS, {"error": f"process {found['process']} ends"})
        except (OSError, ValueError, http.client.HTTPException) as exc:
            reason = f"within {timeout_s:g} s" if isinstance(exc, TimeoutError) else f"({exc})"
            return WorkerAnswer(name, NO_ANSWER, {"error": f"process {found['process']} does not answer {reason}"})
        finally:
            connection.close()

    def _timeout_of(self, call: ActuatorCall) -> float:
        if call.method == "POST":
            return _CHANGE_S
        longest_s = self._health_timeout_s + 1 if call.path.startswith("health") else _READ_S
        return longest_s if call.wait_s is None else min(longest_s, call.wait_s)


def joined_group(
    actuator: Actuator,
    management: ManagementSettings,
    folder: Path,
    name: str | None,
    expected: Expected = dict,
    *,
    is_several: bool = False,
) -> ProcessGroup | None:
    """Return the group of a folder, which this process has joined; None if the folder cannot be used."""
    try:
        timeout_s = management.health.timeout_ms / 1_000
        return ProcessGroup(actuator, folder, name, timeout_s, expected, is_several=is_several)
    except OSError as exc:
        _log.warning("management.not_shared", folder=str(folder), reason=str(exc))
        return None
