"""Run a Python file as on another system: ``other_system.py windows|macos program.py arguments``.

The modules and functions that the system lacks are hidden before anything else is imported. On "Windows" there are
also its rules, as far as they can be built here: a file that is open or mapped cannot be deleted or replaced, a folder
cannot be opened, and each `os.open` has to ask for bytes.
"""

# ruff: noqa: PTH110, PTH112, PTH115, PTH123, PTH208

import asyncio  # noqa: F401  # on Windows it has other modules: it has to be loaded as it is here
import contextlib
import importlib.machinery
import importlib.util
import mmap
import os
import runpy
import select
import selectors
import shutil
import signal
import socket
import subprocess  # noqa: F401  # as asyncio
import sys
import types

MODULES = ("fcntl", "pwd", "grp", "resource", "termios")
ONLY_LINUX = {
    os: "fdatasync posix_fallocate eventfd eventfd_read eventfd_write sched_getaffinity SEEK_DATA SEEK_HOLE",
    select: "epoll",
    selectors: "EpollSelector",
}
NOT_ON_WINDOWS = {
    os: "fork forkpty register_at_fork pread pwrite preadv pwritev fdatasync posix_fallocate getuid geteuid getgid "
    "getegid eventfd eventfd_read eventfd_write fchmod fchown chown killpg getpgid setsid setpgid sched_getaffinity "
    "sched_yield statvfs sysconf mkfifo O_CLOEXEC O_NOFOLLOW O_NONBLOCK O_DIRECTORY SEEK_DATA SEEK_HOLE",
    mmap: "PROT_READ PROT_WRITE PROT_EXEC MAP_SHARED MAP_PRIVATE MAP_ANON MAP_ANONYMOUS MADV_DONTNEED",
    signal: "SIGHUP SIGKILL SIGUSR1 SIGUSR2 SIGCHLD SIGALRM SIGPIPE pthread_kill pthread_sigmask sigwait setitimer",
    select: "epoll poll",
    selectors: "EpollSelector PollSelector",
    socket: "AF_UNIX",
}
BYTES = 1 << 30  # no flag of Linux: `os.open` below takes it away


def _hide(names):
    for module, listed in names.items():
        for name in listed.split():
            if hasattr(module, name):
                delattr(module, name)


def _hide_modules(hidden):
    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name in hidden:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    for name in hidden:
        sys.modules.pop(name, None)
    sys.meta_path.insert(0, Finder())
    find_spec = importlib.util.find_spec
    importlib.util.find_spec = lambda name, package=None: None if name in hidden else find_spec(name, package)


def _in_use(path):
    """Return True if the process has a file open or mapped."""
    path = os.path.realpath(path)
    with open("/proc/self/maps") as maps:
        mapped = any(line.rstrip("\n").endswith(path) for line in maps)
    return mapped or any(_is_link_to(f"/proc/self/fd/{fd}", path) for fd in os.listdir("/proc/self/fd"))


def _is_link_to(link, path):
    with contextlib.suppress(OSError):  # the descriptor of the listing itself
        return os.readlink(link) == path
    return False


def _rules_of_windows():
    real_open, real_unlink, real_replace = os.open, os.unlink, os.replace

    def refuse(path):
        raise PermissionError(13, "The process cannot access the file because it is being used", os.fspath(path))

    def open_bytes(path, flags, mode=0o777):
        if not flags & BYTES and "mqtemplate" in sys._getframe(1).f_globals["__name__"]:
            raise ValueError(f"os.open({path!r}) without O_BINARY would translate line ends")
        if os.path.isdir(path):
            refuse(path)
        return real_open(path, flags & ~BYTES | 0o2000000, mode)

    def unlink(path):
        if os.path.exists(path) and _in_use(path):
            refuse(path)
        real_unlink(path)

    def replace(path, target):
        if _in_use(path) or (os.path.exists(target) and _in_use(target)):
            refuse(target)
        real_replace(path, target)

    usage = shutil.disk_usage(os.sep)
    shutil.disk_usage = lambda path: usage
    os.O_BINARY, os.O_NOINHERIT = BYTES, 0
    os.open, os.unlink, os.replace = open_bytes, unlink, replace


def _msvcrt():
    """Return a module with ``locking``: locks that belong to an open file, among the files of this process."""
    module, owners = types.ModuleType("msvcrt"), {}
    module.LK_UNLCK, module.LK_NBLCK = 0, 2

    def locking(fd, mode, count):
        found = os.fstat(fd)
        key = found.st_dev, found.st_ino
        assert os.lseek(fd, 0, os.SEEK_CUR) == 0
        assert count == 1
        if mode == module.LK_UNLCK:
            assert owners.pop(key) == fd
        elif owners.setdefault(key, fd) != fd:
            raise PermissionError(13, "Permission denied")

    module.locking = locking
    return module


def become(system):
    """Take away what *system* lacks, and add what it has instead."""
    selectors.DefaultSelector = selectors.SelectSelector
    if system == "macos":
        import fcntl

        _hide(ONLY_LINUX)
        del fcntl.F_OFD_SETLK
        fcntl.F_FULLFSYNC, real = 51, fcntl.fcntl
        fcntl.fcntl = lambda fd, command, *rest: os.fsync(fd) if command == 51 else real(fd, command, *rest)
        return
    sys.modules["msvcrt"] = module = _msvcrt()
    module.__spec__ = importlib.machinery.ModuleSpec("msvcrt", None)

    class WithoutMessages(type):
        def __getattribute__(cls, name):
            if name in ("sendmsg", "recvmsg"):
                raise AttributeError(name)
            return super().__getattribute__(name)

    class WindowsSocket(socket.socket, metaclass=WithoutMessages):
        sendmsg = recvmsg = property()  # an object has none either

    pair = socket.socketpair
    _rules_of_windows()
    _hide(NOT_ON_WINDOWS)
    socket.socketpair = lambda: pair(1)  # AF_UNIX, its default where that exists
    socket.socket = WindowsSocket
    _hide_modules(MODULES)


if __name__ == "__main__":
    become(sys.argv[1])
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
