"""The program ``mqtemplate run``: an application in this process, or in worker processes and their supervisor.

The supervisor starts, restarts, replaces and stops worker processes, and watches source files for it.
"""

from __future__ import annotations

import dataclasses
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from mqtemplate.context.application import MQApplication
from mqtemplate.context.logging import show_events
from mqtemplate.context.settings.app import AppSettings
from mqtemplate.context.signals import LONGEST_WAIT_S, handled_signals
from mqtemplate.errors import ConfigurationError
from mqtemplate.event_log import get_logger, has_handlers
from mqtemplate.extras import install_command
from mqtemplate.listener.registry import ListenerRegistry
from mqtemplate.running.reload import reload_of
from mqtemplate.running.target import READY, RunOptions, load_application

if TYPE_CHECKING:
    from mqtemplate.brokers.embedded.broker import EmbeddedBroker
    from mqtemplate.server.broker_server import LocalCluster

_log = get_logger("mqtemplate.run")


class WorkerProcess(subprocess.Popen[bytes]):
    """One process that runs the application. It is not forked: it starts with an interpreter of its own.

    It has a process group of its own, so Ctrl-C in a terminal reaches the supervisor only, which stops it in order.
    After `terminate` handlers finish, and offsets are committed. After `kill` messages of running handlers are
    delivered again.

    Args:
        on_ready: Called in a thread when the application is ready.
        on_end: Called in a thread with the exit code when the process has ended; negative: the signal that ended it.
    """

    def __init__(self, options: RunOptions, on_ready: Callable[[], object], on_end: Callable[[int], object]) -> None:
        self._channel, theirs = socket.socketpair()
        with theirs:
            # The target is for readers of lists of processes. The options may contain an account.
            command = [sys.executable, "-m", "mqtemplate.running.worker", options.target, str(theirs.fileno())]
            super().__init__(command, pass_fds=[theirs.fileno()], process_group=0)
        with suppress(ConnectionError):  # it has ended already, which `_observe` reports
            self._channel.sendall(f"{options.to_json()}\n".encode())
        self._on_ready, self._on_end = on_ready, on_end
        threading.Thread(target=self._observe, name=f"mqtemplate-worker-{self.pid}", daemon=True).start()

    def _observe(self) -> None:
        # A worker that ends before it has read its options resets the connection.
        with self._channel, suppress(ConnectionError):
            received = b""
            while part := self._channel.recv(64):
                received += part
                if received == READY:
                    self._on_ready()
        self._on_end(self.wait())


def exit_text(code: int) -> str:
    """Return the end of a process in words, after its name: ``was ended by SIGKILL``."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


_FIRST_S = 0.5
_LONGEST_S = 30.0
_HEALTHY_S = 60.0


class RestartBackoff:
    """Pause before each restart of one worker: 0.5 s, 1 s, 2 s, … 30 s.

    After a worker that was ready for a minute the pause is 0.5 s again. Times are in seconds of any clock that does not
    go back.
    """

    def __init__(self) -> None:
        self._failures = 0
        self._ready_at: float | None = None

    def ready(self, now: float) -> None:
        """Note that the worker is ready."""
        self._ready_at = now

    def ended(self, now: float) -> float:
        """Note that the worker has ended. Return the pause before its restart."""
        if self._ready_at is not None and now - self._ready_at >= _HEALTHY_S:
            self._failures = 0
        self._ready_at = None
        pause = min(_LONGEST_S, _FIRST_S * (1 << min(self._failures, 10)))
        self._failures += 1
        return pause

    def reset(self) -> None:
        """Forget the failures: the code has changed."""
        self._failures = 0


# Not .json: the store directory has such files, and the broker writes them every few seconds.
_SUFFIXES = (".py", ".yml", ".yaml", ".toml", ".env")


@contextmanager
def file_changes(folders: Sequence[Path], on_change: Callable[[list[str]], object]) -> Iterator[None]:
    """Call a function in a thread, inside the context, with the names of files that have changed.

    Args:
        folders: Folders with all that is in them, except hidden ones, virtual environments and caches. None: no thread.

    Raises:
        ConfigurationError: watchfiles is not installed, or a folder is missing.
    """
    if not folders:
        yield
        return
    try:
        import watchfiles
    except ImportError as exc:
        raise ConfigurationError(
            f"--reload needs watchfiles, which is not installed; {install_command('reload')}"
        ) from exc
    for folder in folders:
        if not folder.is_dir():
            raise ConfigurationError(f"--reload-dir {folder} is not a folder; give one with source files")
    stop = threading.Event()

    class SourceFilter(watchfiles.DefaultFilter):
        def __call__(self, change: watchfiles.Change, path: str) -> bool:
            return path.endswith(_SUFFIXES) and super().__call__(change, path)

    def watch() -> None:
        for changes in watchfiles.watch(
            *folders, watch_filter=SourceFilter(), stop_event=stop, rust_timeout=500, raise_interrupt=False
        ):
            on_change(sorted({_shown(Path(path)) for _, path in changes}))

    thread = threading.Thread(target=watch, name="mqtemplate-reload", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _shown(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


Report = Callable[[str], None]
"""Function that prints a line for people."""

Management = Callable[
    [AppSettings, "LocalCluster[EmbeddedBroker] | None", Callable[[], Mapping[str, int | None]]],
    AbstractContextManager[Path | None],
]
"""Function that serves the management address of all workers in a context.

It takes the settings, the server of this process for the workers, and a function that returns the workers:
number -> process id, None while none runs. It yields the folder in which the workers make themselves known; None
without an address."""

_MANY_FILES = 3


class _State(Enum):
    DOWN = "down"
    STARTING = "starting"
    READY = "ready"
    REPLACED = "being replaced"


@dataclass(slots=True, eq=False)
class _Slot:
    """One of the workers: its current process, and when to start the next one."""

    number: int
    state: _State = _State.DOWN
    process: WorkerProcess | None = None
    was_ready: bool = False
    restart_at: float | None = None
    kill_at: float | None = None
    backoff: RestartBackoff = field(default_factory=RestartBackoff)

    @property
    def name(self) -> str:
        return f"worker {self.number}" + (f" (process {self.process.pid})" if self.process else "")


class Supervisor:
    """Runs an application in several processes, from this process.

    - The processes are not forked: each imports the application itself.
    - If the broker is a local folder and there are several workers, this process serves it to them.
    - A worker that ends is started again after a growing pause. If one cannot start at all in the beginning, all stop.
    - SIGHUP, or a changed file, replaces the workers one after the other: each one finishes its messages first. If a
      new one does not start, the others go on with the code that they have.
    - SIGTERM or Ctrl-C stops them in order; a second signal kills them. A worker stops by itself if this process dies.

    All methods but `run` are private and run in its thread. Other threads pass calls to it through a queue.

    Args:
        settings: Settings of the application.
        report: Prints a line for people.
        watched: Folders whose changes replace the workers.
        stop_timeout_s: Time after which a worker that stops is killed.
        management: Serves the management address of all workers.
    """

    def __init__(
        self,
        options: RunOptions,
        settings: AppSettings,
        workers: int,
        report: Report,
        management: Management,
        *,
        watched: Sequence[Path] = (),
        stop_timeout_s: float = 60.0,
    ) -> None:
        self._options = options
        self._settings = settings
        self._slots = [_Slot(number) for number in range(1, workers + 1)]
        self._report = report
        self._management = management
        self._watched = watched
        self._stop_timeout_s = stop_timeout_s
        # A signal handler may put into a SimpleQueue while the thread that it interrupts waits on it.
        self._calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._to_replace: deque[_Slot] = deque()
        self._replaced: _Slot | None = None
        self._is_stopping = False
        self._exit_code = 0

    def run(self) -> int:
        """Work until a signal arrives. Return the exit code of the program.

        Raises:
            MQTemplateError: The server for the workers cannot start, or files cannot be watched.
        """
        count = len(self._slots)
        with self._shown_events():
            self._run(count)
            self._report("stopped")
        return self._exit_code

    def _run(self, count: int) -> None:
        from mqtemplate.running.server import shared_server  # only needed for several processes

        with (
            handled_signals(self._on_signal, signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
            shared_server(self._settings, count, self._report) as (server, cluster),
            self._management(self._settings, cluster, self._workers) as group,
            file_changes(self._watched, lambda files: self._calls.put(lambda: self._reload(_named(files)))),
        ):
            self._options = dataclasses.replace(self._options, group=None if group is None else str(group))
            if server is not None:
                self._options = dataclasses.replace(
                    self._options,
                    name_server=server.address,
                    access_key=server.access_key,
                    secret_key=server.secret_key,
                )
            self._report(f"{self._options.target}: {_counted(count)} start; press Ctrl-C to stop")
            for slot in self._slots:
                self._start(slot)
            while not self._is_stopping or any(slot.process for slot in self._slots):
                with suppress(queue.Empty):
                    self._calls.get(timeout=self._wait_s())()
                self._do_what_is_due()

    @contextmanager
    def _shown_events(self) -> Iterator[None]:
        """Show the events of this process inside the context as a worker shows its own, and the reports among them.

        On a console the reports are for people, and stay as they are.
        """
        logging = self._settings.mqtemplate.logging
        if not logging.enabled or has_handlers():
            yield
            return
        if logging.format == "JSON":
            self._report = lambda text: _log.info("supervisor.reported", text=text)
        undo = show_events(logging)
        try:
            yield
        finally:
            undo()

    def _workers(self) -> dict[str, int | None]:
        """Return the process id of each worker; None while none runs. Called by any thread."""
        processes = {str(slot.number): slot.process for slot in self._slots}
        return {number: None if process is None else process.pid for number, process in processes.items()}

    # --- events ------------------------------------------------------------------------------------

    def _start(self, slot: _Slot) -> None:
        slot.restart_at = slot.kill_at = None
        slot.state = _State.STARTING
        slot.process = WorkerProcess(
            dataclasses.replace(self._options, worker=str(slot.number)),
            lambda: self._calls.put(lambda: self._ready(slot)),
            lambda code: self._calls.put(lambda: self._ended(slot, code)),
        )

    def _ready(self, slot: _Slot) -> None:
        if slot.state is not _State.STARTING:
            return  # it is being replaced already
        slot.state, slot.was_ready = _State.READY, True
        slot.backoff.ready(time.monotonic())
        self._report(f"{slot.name} is ready")
        if slot is self._replaced:
            self._replaced = None
        self._replace_next()

    def _ended(self, slot: _Slot, code: int) -> None:
        name, state = slot.name, slot.state
        slot.process, slot.state, slot.kill_at = None, _State.DOWN, None
        if self._is_stopping:
            if code:
                self._report(f"{name} {exit_text(code)}")
        elif state is _State.REPLACED:
            self._start(slot)
        elif state is _State.STARTING:
            self._did_not_start(slot, f"{name} {exit_text(code)} before it was ready")
        else:
            self._restart_later(slot, f"{name} {exit_text(code)}")

    def _did_not_start(self, slot: _Slot, text: str) -> None:
        if self._replaced is slot:
            self._replaced = None
            self._to_replace.clear()
        if self._watched:
            self._report(f"{text}; its next start is after a change of the files")
        elif slot.was_ready:
            self._restart_later(slot, text)
        else:
            self._report(f"{text}; see its report above")
            self._exit_code = 1
            self._stop("a worker cannot start")

    def _restart_later(self, slot: _Slot, text: str) -> None:
        now = time.monotonic()
        pause = slot.backoff.ended(now)
        slot.restart_at = now + pause
        self._report(f"{text}; restart in {pause:g} s")

    # --- new code ----------------------------------------------------------------------------------

    def _reload(self, reason: str) -> None:
        if self._is_stopping:
            return
        self._report(f"reloading ({reason})")
        for slot in self._slots:
            slot.backoff.reset()
        self._to_replace = deque(self._slots)
        self._replace_next()

    def _replace_next(self) -> None:
        if self._replaced is not None or not self._to_replace or self._is_stopping:
            return
        slot = self._replaced = self._to_replace.popleft()
        if slot.process is None:
            self._start(slot)
            return
        slot.state = _State.REPLACED
        self._terminate(slot)

    # --- stop --------------------------------------------------------------------------------------

    def _stop(self, reason: str) -> None:
        alive = [slot for slot in self._slots if slot.process]
        if self._is_stopping:
            self._report(f"killing {_counted(len(alive))} ({reason})")
            for slot in alive:
                slot.kill_at = 0.0
            return
        self._is_stopping = True
        self._report(f"stopping ({reason}): {_counted(len(alive))} finish their messages")
        for slot in self._slots:
            slot.restart_at = None
            self._terminate(slot)

    def _terminate(self, slot: _Slot) -> None:
        if slot.process is not None:
            slot.process.terminate()
            slot.kill_at = time.monotonic() + self._stop_timeout_s

    # --- time and signals --------------------------------------------------------------------------

    def _wait_s(self) -> float:
        """Return the time until something is due."""
        due = [at for slot in self._slots for at in (slot.restart_at, slot.kill_at) if at is not None]
        return max(0.001, min(LONGEST_WAIT_S, min(due, default=float("inf")) - time.monotonic()))

    def _do_what_is_due(self) -> None:
        now = time.monotonic()
        for slot in self._slots:
            if slot.restart_at is not None and slot.restart_at <= now:
                self._start(slot)
            if slot.kill_at is not None and slot.kill_at <= now and slot.process is not None:
                slot.kill_at = None
                slot.process.kill()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        self._calls.put(lambda: self._reload(name) if number == signal.SIGHUP else self._stop(name))


def _counted(workers: int) -> str:
    return "1 worker" if workers == 1 else f"{workers} workers"


def _named(files: Sequence[str]) -> str:
    shown = ", ".join(files[:_MANY_FILES])
    return shown if len(files) <= _MANY_FILES else f"{shown} and {len(files) - _MANY_FILES} more"


def run(
    options: RunOptions,
    report: Report,
    management: Management,
    *,
    workers: int | None = None,
    watched: Sequence[Path] = (),
    stop_timeout_s: float = 60.0,
) -> int:
    """Run an application until a signal arrives. Return the exit code of the program.

    Args:
        management: Serves the management address of several processes.
        workers: Number of processes; None: this process runs the application, unless files are watched.
        watched: Folders whose changes start new processes.
        stop_timeout_s: Time after which a process that stops is killed.

    Raises:
        SystemExit: The application in this process cannot start.
        MQTemplateError: The application is invalid.
    """
    if workers is not None and workers < 1:
        raise ConfigurationError(f"--workers must be 1 or more, got {workers}")
    app = load_application(options)
    if workers is None and not watched:
        _run_here(app, options.target, report)
        return 0
    if not hasattr(signal, "SIGHUP"):
        raise ConfigurationError(
            "--workers and --reload need signals and process groups, which this system (Windows) does not have; "
            "run without them: one process with the threads of its listeners, or several programs with "
            "rocketmq.name-server of a broker that runs as a server (mqtemplate broker)"
        )
    supervisor = Supervisor(
        options, app.settings, workers or 1, report, management, watched=watched, stop_timeout_s=stop_timeout_s
    )
    return supervisor.run()


def _run_here(app: MQApplication, target: str, report: Report) -> None:
    def report_ready() -> None:
        app.is_ready.wait()
        report(f"{target} is running (process {os.getpid()}); press Ctrl-C to stop")

    threading.Thread(target=report_ready, name="mqtemplate-ready", daemon=True).start()
    with reload_of(app).running():
        app.run()
    report("stopped")


def check(options: RunOptions) -> str:
    """Build everything and start nothing. Return a line about the application.

    Raises:
        MQTemplateError: The application could not start.
    """
    app = load_application(options)
    app.check()
    names = [container.endpoint.id for container in app.context.get(ListenerRegistry).containers]
    objects = sum(1 for _ in app.context.in_order())
    listeners = "no listeners" if not names else f"{'listener' if len(names) == 1 else 'listeners'} {', '.join(names)}"
    return (
        f"{options.target} is valid: {listeners}; objects: {objects}; broker: {app.settings.rocketmq.name_server}; "
        "nothing was started"
    )
