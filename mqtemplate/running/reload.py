"""Reload of the configuration while a broker or an application runs: by SIGHUP, by request, by a change of a file."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from mqtemplate.clock import Clock, SystemClock
from mqtemplate.context.config.files import ENV_FILE
from mqtemplate.context.logging import change_level
from mqtemplate.context.settings.app import AppSettings
from mqtemplate.context.settings.broker import acl_settings
from mqtemplate.context.settings.source import changed_keys, read_again
from mqtemplate.context.signals import handled_signals
from mqtemplate.errors import MQTemplateError
from mqtemplate.event_log import get_logger
from mqtemplate.remoting.protocol.bodies.own_requests import ReloadedConfig
from mqtemplate.server.acl.access import AccessControl
from mqtemplate.server.acl.settings import AclSettings
from mqtemplate.services import PeriodicService, Service, ServiceRunner

if TYPE_CHECKING:  # a server has no application
    from mqtemplate.context.application import MQApplication
    from mqtemplate.context.injection.application_context import ApplicationContext

_log = get_logger("mqtemplate.config")

_INTERVAL_MS = 2_000
_HINT = (
    "the former settings stay in force; correct the file: the next change is read by itself, and mqtemplate reload or "
    "SIGHUP reads it at once"
)

_SUFFIXES = (".yml", ".yaml", ".toml")

_Stamp = tuple[int, int, int]
_Stamps = dict[Path, _Stamp | None]


def _stamp(file: Path) -> _Stamp | None:
    """Return what differs after a change of a file: the time, the size, and the file that a link leads to."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _no_files(_settings: AppSettings) -> Sequence[str | None]:
    return ()


@dataclass(frozen=True, slots=True)
class ReloadablePart:
    """A part of the running program that takes new settings.

    Attributes:
        keys: Keys, and sections, that it reads.
        apply: Takes the settings. If it raises `MQTemplateError`, the former ones stay in force.
        files: Returns the files whose content it reads.
    """

    keys: tuple[str, ...]
    apply: Callable[[AppSettings], object]
    files: Callable[[AppSettings], Sequence[str | None]] = _no_files

    def reads(self, key: str) -> bool:
        """Return True if the part reads a key."""
        return any(key == each or key.startswith(f"{each}.") for each in self.keys)

    def stamps(self, settings: AppSettings) -> _Stamps:
        """Return the present state of its files."""
        return {Path(file): _stamp(Path(file)) for file in self.files(settings) if file}


LOG_LEVEL = ReloadablePart(
    ("mqtemplate.logging.level",), lambda settings: change_level(settings.mqtemplate.logging.level)
)


def delay_levels(configure: Callable[[str], object]) -> ReloadablePart:
    """Return the part for the delay levels of a broker.

    Args:
        configure: `Engine.configure_delay_levels`.
    """
    key = "mqtemplate.broker.message-delay-level"
    return ReloadablePart((key,), lambda settings: configure(settings.mqtemplate.broker.message_delay_level))


def accounts_part(access: Callable[[], AccessControl]) -> ReloadablePart:
    """Return the part of a program that has the accounts of the settings and no server: those of its dashboard."""

    def use_accounts(settings: AppSettings) -> None:
        access().change_accounts(acl_settings(settings.mqtemplate.server.acl) or AclSettings())

    return ReloadablePart(("mqtemplate.server.acl",), use_accounts)


class ConfigReload:
    """Reads the configuration again, and gives it to the parts of the program that can take it while they run.

    - All files are read and checked first: with an error in one of them nothing changes.
    - A part that cannot take its settings keeps the former ones, and the others change. So a private key that does not
      belong to the certificate, because only one of the two files is written yet, changes nothing: the next change
      of a file is read again.
    - Keys that only a start reads are in the log, and in the result, until the restart.
    - A change of a file is noticed by its time and size, within two intervals: the files are read when they have not
      changed for one interval.

    Args:
        settings: The settings in force.
        load: Reads the configuration again.
        sections: Beginnings of the keys that this program reads; empty for all. Other programs share the file.
        further_files: Files that *load* reads beside the folder of the configuration.
    """

    def __init__(
        self,
        settings: AppSettings,
        load: Callable[[], AppSettings],
        parts: Sequence[ReloadablePart],
        *,
        sections: tuple[str, ...] = (),
        further_files: Sequence[Path] = (),
        clock: Clock | None = None,
    ) -> None:
        self._at_start = settings
        self._load = load
        self._parts = parts
        self._sections = sections
        self._further_files = further_files
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._in_force = dict.fromkeys(parts, settings)
        self._files_in_force = {part: part.stamps(settings) for part in parts}
        self._newest = settings
        self._tried = self._stamps_of_parts(settings)
        self._seen = self._read = self._stamps()
        self._requested: deque[str] = deque()
        self._watch = PeriodicService("config.watch", self._check, self._clock, _INTERVAL_MS)

    # --- causes ------------------------------------------------------------------------------------

    @contextmanager
    def running(self) -> Iterator[None]:
        """Handle SIGHUP and watch the files inside the context. Only the main thread can handle signals."""
        with ExitStack() as stack:
            if hasattr(signal, "SIGHUP") and threading.current_thread() is threading.main_thread():
                handler = _HangUp(lambda: self.request("SIGHUP"), signal.getsignal(signal.SIGHUP))
                stack.enter_context(handled_signals(handler, signal.SIGHUP))
            stack.enter_context(self.watching())
            yield

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the files inside the context; for a program whose signals belong to others."""
        runner = ServiceRunner(self._watch, self._clock, "mqtemplate-reload", _report)
        runner.start()
        try:
            yield
        finally:
            runner.stop()

    def request(self, reason: str) -> None:
        """Reload soon, in the thread that watches the files. A signal handler may call this."""
        self._requested.append(reason)
        self._watch.trigger()

    def _check(self) -> None:
        if self._requested:
            reason = self._requested.popleft()
            if self._requested:
                self._watch.trigger()
            self.reload(reason)
            return
        stamps = self._stamps()
        is_settled, self._seen = stamps == self._seen, stamps
        if is_settled and stamps != self._read:
            changed = {file.name for file, _ in stamps.items() ^ self._read.items()}
            self.reload(f"change of {', '.join(sorted(changed))}")

    def _stamps(self) -> _Stamps:
        """Return the state of all files that a reload reads, and of those that may be added."""
        return self._stamps_of_configuration() | self._stamps_of_parts(self._newest)

    def _stamps_of_configuration(self) -> _Stamps:
        folder = self._at_start.origins.folder
        found = [] if folder is None else sorted(folder.glob("application*.*"))
        files = [file for file in found if file.suffix in _SUFFIXES]
        if folder is not None:
            files.append(folder / ENV_FILE)
        return {file: _stamp(file) for file in (*files, *self._further_files)}

    def _stamps_of_parts(self, settings: AppSettings) -> _Stamps:
        return {file: stamp for part in self._parts for file, stamp in part.stamps(settings).items()}

    # --- reload ------------------------------------------------------------------------------------

    def reload(self, reason: str) -> ReloadedConfig:
        """Read the configuration, apply it, log the result, and return it.

        Args:
            reason: Such as ``SIGHUP``, for the log.
        """
        with self._lock:
            stamps = self._stamps_of_configuration()  # before the files are read: a later change is read again
            try:
                self._newest = self._load()
            except MQTemplateError as exc:
                result = ReloadedConfig(problems=[str(exc)])
            else:
                result = self._apply(self._newest)
            self._seen = self._read = stamps | self._tried
        _log_result(reason, result)
        return result

    def _apply(self, settings: AppSettings) -> ReloadedConfig:
        """Give the settings to the parts that have changed."""
        changed: list[str] = []
        problems: list[str] = []
        self._tried = self._stamps_of_parts(settings)
        for part in self._parts:
            keys = [key for key in changed_keys(self._in_force[part], settings) if part.reads(key)]
            files = part.stamps(settings)
            if not keys and files == self._files_in_force[part]:
                continue
            try:
                part.apply(settings)
            except MQTemplateError as exc:
                problems.append(str(exc))
                continue
            changed += keys or sorted(map(str, files))
            self._in_force[part], self._files_in_force[part] = settings, files
        read = [key for key in changed_keys(self._at_start, settings) if self._concerns(key)]
        fixed = [key for key in read if not any(part.reads(key) for part in self._parts)]
        return ReloadedConfig(changed=changed, needs_restart=fixed, problems=problems)

    def _concerns(self, key: str) -> bool:
        return not self._sections or key.startswith(self._sections)


class _HangUp:
    """Handler of SIGHUP: a request to reload, or the end of the terminal in which the program runs.

    Args:
        request: Requests a reload.
        former: The former handler of the program, which is called too. Under ``nohup`` the signal was ignored, so the
            end of the terminal stays without effect.
    """

    def __init__(self, request: Callable[[], object], former: object) -> None:
        self._request = request
        self._former = former
        self._ends_with_terminal = former is not signal.SIG_IGN and _has_terminal()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._ends_with_terminal and not _has_terminal():
            signal.raise_signal(signal.SIGTERM)  # an orderly stop; by default SIGHUP would end the process at once
            return
        self._request()
        if callable(self._former):
            self._former(number, frame)


def _has_terminal() -> bool:
    """Return True if this process has a controlling terminal. It has none after a hang-up: see ``man 4 tty``."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _report(service: Service, error: Exception, repeated: int) -> None:
    """Log a step that failed; the service repeats it."""
    _log.error("config.reload_failed", service=service.name, repeated=repeated, exc_info=error)


def _log_result(reason: str, result: ReloadedConfig) -> None:
    for problem in result.problems:
        _log.error("config.reload_failed", reason=reason, problem=problem, hint=_HINT)
    if result.needs_restart:
        _log.warning("config.restart_needed", reason=reason, keys=result.needs_restart)
    if result.changed or not result.problems:
        _log.info("config.reloaded", reason=reason, changed=result.changed)


def reload_of(app: MQApplication) -> ConfigReload:
    """Return the reload of an application that a process of ``mqtemplate run`` runs."""
    settings, parts = app.settings, [LOG_LEVEL]

    def configure(text: str) -> None:
        from mqtemplate.brokers.embedded.broker import EmbeddedBroker  # an application of a cluster has none

        broker = app.broker
        if isinstance(broker, EmbeddedBroker):  # else the program has replaced it
            broker.engine.configure_delay_levels(text)

    if settings.is_embedded:
        parts.append(delay_levels(configure))
    management = settings.mqtemplate.management
    if management.enabled and management.dashboard.enabled and settings.mqtemplate.server.acl.enabled:
        parts.append(accounts_part(lambda: app.get(AccessControl)))
    found = ConfigReload(settings, lambda: read_again(settings), parts)
    app.context.on_reload(found.reload)  # for its actuator
    return found


@contextmanager
def accounts_watched(context: ApplicationContext) -> Iterator[None]:
    """Inside the context, let the accounts of an application's dashboard follow changes of the configuration's files.

    ``mqtemplate run`` reloads more than them, and then this has no effect. Any other program has started the
    application itself, and keeps its signals.
    """
    settings = context.settings
    if context.can_reload or not settings.mqtemplate.server.acl.enabled:
        yield
        return
    parts = [accounts_part(lambda: context.get(AccessControl))]
    reload = ConfigReload(settings, lambda: read_again(settings), parts, clock=context.brokers["broker"].clock)
    context.on_reload(reload.reload)
    with reload.watching():
        yield
