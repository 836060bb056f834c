"""The process: the owner of objects that a forked child must not use, its user's home and private files, streams,
file descriptors, processors, and the settings of its interpreter."""

from __future__ import annotations

import codecs
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, Protocol
from weakref import WeakSet

from mqtemplate.errors import ConfigurationError, ForkedError

__all__ = [
    "OPEN_FLAGS",
    "OwnerProcess",
    "Unusable",
    "UsedByOneProcess",
    "absolute_path",
    "call_after_fork",
    "descriptor_limit",
    "discard_output",
    "expand_home",
    "home_folder",
    "is_terminal",
    "prompt_threads",
    "raise_descriptor_limit",
    "usable_processors",
    "write_private",
    "write_text",
]

OPEN_FLAGS = 0
for _name in ("O_CLOEXEC", "O_NOFOLLOW", "O_NOINHERIT", "O_BINARY"):  # no system has all
    OPEN_FLAGS |= getattr(os, _name, 0)
"""For each `os.open`: child processes do not inherit the file, a symbolic link is not followed, and the bytes stay as
they are. Windows cannot refuse a link here, and translates line ends without ``O_BINARY``."""
_NO_LIMIT = 1 << 30
_SWITCH_INTERVAL_S = 0.00005
"""Time after which a busy thread lets another one run. With Python's 5 ms, the I/O thread would wait so long after each
system call while a worker thread parses a large request, and a response needs several system calls."""
_GC_THRESHOLDS = (2_000, 5, 400)
"""Python's are (700, 10, 10): a collection of all objects, which holds all threads, is seldom needed here. One of the
second generation holds them, too, so it must not have many: with 200,000 objects it took up to 140 ms, with 50,000 up
to 40, with 10,000 up to 11."""
_QUOTA_FILE = Path("/sys/fs/cgroup/cpu.max")

_ADVICE = (
    "start it after the fork, in the process that uses it (gunicorn: post_fork, Celery: worker_process_init, "
    "multiprocessing: start method spawn). Several processes share a broker that runs as a server: start it with "
    "'mqtemplate broker' and point rocketmq.name-server at it"
)


def home_folder(purpose: str, instead: str) -> Path:
    """Return the home folder of the user. Call it only where it is used: a user of a container may have no home.

    Args:
        purpose: What the folder is for, and *instead*, what to set in its place; for the error.

    Raises:
        ConfigurationError: There is neither ``HOME`` nor an entry of the user in the system's list of users.
    """
    return _expanded(Path("~"), f"needed for {purpose}; set HOME, or {instead}")


def expand_home(path: Path, key: str) -> Path:
    """Return a path with the home folder in place of ``~``.

    Args:
        key: The setting with the path, for the error.

    Raises:
        ConfigurationError: The path starts with ``~``, and the user has no home folder, or there is no such user.
    """
    return _expanded(path, f"needed for {key} = {path}; set HOME, or write the path without ~")


def _expanded(path: Path, need: str) -> Path:
    if not path.parts or not path.parts[0].startswith("~"):
        return path
    try:
        expanded = path.expanduser()
    except RuntimeError as exc:  # of pathlib: `docker run --user 12345` has no entry in /etc/passwd
        raise ConfigurationError(f"this user has no home folder, which is {need}") from exc
    if path.parts[0] == "~" and os.environ.get("HOME", "-") == "":  # pathlib takes it as the root folder
        raise ConfigurationError(f"HOME is empty, and the home folder is {need}")
    return expanded


def is_terminal(stream: Any) -> bool:
    """Return True if a stream, such as `sys.stderr`, is a terminal.

    It may be None (a daemon, pythonw), closed, or an object of another program that only has ``write`` (a notebook).
    """
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError, OSError):  # ValueError: it is closed
        return False


def write_text(text: str, stream: Any) -> None:
    """Write a text to a stream, such as `sys.stderr`, and flush it. None takes no text, as for `print`.

    A character that the stream cannot show is escaped.

    Raises:
        OSError: The stream is closed, or cannot be written: the pipe has no reader, the disk is full.
    """
    if stream is None:
        return
    encoding = getattr(stream, "encoding", None)
    try:
        # An object of another program may have any attribute, also one that names no encoding.
        codec = codecs.lookup(encoding).name if isinstance(encoding, str) else "utf-8"
    except LookupError:
        codec = "ascii"
    try:
        stream.write(text.encode(codec, "backslashreplace").decode(codec))
        if (flush := getattr(stream, "flush", None)) is not None:
            flush()
    except OSError:
        raise
    except Exception as exc:  # ValueError: it is closed; others: of the object in its place
        raise OSError(f"{type(exc).__name__}: {exc}") from exc


def discard_output(stream: Any) -> None:
    """Send the rest of a stream that cannot be written to nowhere: Python would report it again at exit."""
    try:
        number = stream.fileno()
    except (AttributeError, ValueError, OSError):  # it has no file, or is closed
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)


class OwnerProcess:
    """The process that started an object: the only one that may use it.

    A child process that was forked has no threads of the parent. It may have locks that a missing thread holds, and
    files that the parent goes on writing. So each use of the object there has to raise before it takes a lock or
    touches a file.

    The check is a comparison of process ids. `os.register_at_fork` alone would not suffice: a server that forks without
    Python's hooks (uWSGI by default) does not call it.

    Args:
        name: The object, as the error names it: ``"broker 'broker-a'"``.
        advice: What to do instead, if it is not to start the object after the fork or to use a server.

    Attributes:
        pid: Id of the process.
    """

    __slots__ = ("_advice", "_name", "pid")

    def __init__(self, name: str, advice: str = _ADVICE) -> None:
        self.pid = os.getpid()
        self._name = name
        self._advice = advice

    @property
    def is_current(self) -> bool:
        """True in the process that started the object."""
        return os.getpid() == self.pid

    def check(self) -> None:
        """Raise `ForkedError` in any other process."""
        if os.getpid() != self.pid:
            raise self.error()

    def error(self) -> ForkedError:
        """Return the error for a use in this process."""
        return ForkedError(
            f"{self._name} was started by process {self.pid}, and this is process {os.getpid()}, forked from it "
            f"without its threads and files; {self._advice}"
        )


class Unusable:
    """Stand-in for a collaborator in a forked child, also for a lock: each use raises `ForkedError`."""

    def __init__(self, owner: OwnerProcess) -> None:
        self._owner = owner

    def __getattr__(self, name: str) -> NoReturn:
        raise self._owner.error()

    def __enter__(self) -> NoReturn:
        raise self._owner.error()

    def __exit__(self, *error: Any) -> None:
        """Never called: `__enter__` raises."""


class UsedByOneProcess(Protocol):
    """An object that has to change in a forked child, so that its hot path needs no check of its own."""

    def after_fork(self) -> None:
        """Refuse all work from now on. Called in the child process, before any other code runs there."""


_objects: WeakSet[UsedByOneProcess] = WeakSet()


def call_after_fork(each: UsedByOneProcess) -> None:
    """Call its method ``after_fork`` in each child process that is forked while the object exists."""
    _objects.add(each)


def _after_fork() -> None:
    for each in list(_objects):
        each.after_fork()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_after_fork)


def absolute_path(path: Path | str) -> Path:
    """Return the path from the root: what keeps a path calls it once, so that `os.chdir` has no effect later.

    Links and ``..`` stay as they are.

    Raises:
        ConfigurationError: The path is relative, and the working directory was deleted.
    """
    try:
        return Path(path).absolute()
    except OSError as exc:  # `os.getcwd`
        raise ConfigurationError(
            f"the relative path {str(path)!r} has no meaning: the working directory of this process cannot be found "
            f"({exc.strerror}); give an absolute path, or start in a directory that exists"
        ) from exc


def descriptor_limit() -> int:
    """Return the soft limit of open files and sockets (``RLIMIT_NOFILE``)."""
    try:
        import resource
    except ImportError:  # Windows
        return _NO_LIMIT
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _NO_LIMIT if soft == resource.RLIM_INFINITY else min(soft, _NO_LIMIT)


def raise_descriptor_limit() -> bool:
    """Raise the soft limit to the hard limit. Return False if it is there already, or the system does not allow it."""
    try:
        import resource
    except ImportError:
        return False
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return False
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):  # macOS: the hard limit is infinite, the kernel's own limit is not
        return False
    return True


def usable_processors() -> float:
    """Return the number of processors that this process may use: fewer by its affinity, or by a container's quota."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux
    count = os.cpu_count() or 1 if affinity is None else len(affinity(0))
    return min(float(count), _processor_quota())


def _processor_quota() -> float:
    """Return the limit of a control group (version 2): ``docker run --cpus``, a limit of Kubernetes."""
    try:
        quota, period = _QUOTA_FILE.read_text("ascii").split()
    except (OSError, ValueError):  # another system, or no limit for the root group
        return float("inf")
    return float("inf") if quota == "max" else int(quota) / int(period)


_M_MMAP_THRESHOLD = -3  # malloc.h of the GNU C library
_MMAP_BYTES = 1 << 20


def _return_large_blocks() -> None:
    """Let the allocator return large blocks to the system when they are freed. Has no effect without the GNU C library.

    By default it does so up to the size of the first large block that was freed, at most 32 MiB: below that, requests
    of some megabytes that grow leave gaps between small objects. They took twice their memory (``bench.hostile``).
    """
    import ctypes

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)


@contextmanager
def prompt_threads() -> Iterator[None]:
    """Let threads take turns often, and collect garbage only among the objects that are created in the block.

    Enter it when everything is started, in a process that serves clients. From then on large blocks of memory return to
    the system when they are freed. A full collection holds all threads. With the modules and settings of a server
    it took up to 100 ms, and large requests cause many (``bench.hostile``). Objects that the program has frozen before
    stay frozen.
    """
    interval_s, thresholds, is_frozen = sys.getswitchinterval(), gc.get_threshold(), gc.get_freeze_count() > 0
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    _return_large_blocks()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if not is_frozen:
            gc.unfreeze()
        sys.setswitchinterval(interval_s)


def write_private(path: Path, data: bytes) -> None:
    """Write a file durably and atomically, with mode 0600; its folder is created with mode 0700 if it is missing.

    The umask of the process may give more rights to others, never to these files. A link at the place of the new file
    is not followed.
    """
    path.parent.parent.mkdir(parents=True, exist_ok=True)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}.new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | OPEN_FLAGS, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
