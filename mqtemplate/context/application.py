"""An application: settings, starters, objects and listeners, started and stopped in order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self, TypeVar

from mqtemplate.broker import Broker
from mqtemplate.clock import Clock
from mqtemplate.context.autoconfigure import StarterSource, apply_starters, find_starters
from mqtemplate.context.config.source import load_settings
from mqtemplate.context.failure_report import reported_failures
from mqtemplate.context.injection.application_context import ApplicationContext
from mqtemplate.context.injection.components import collect_components
from mqtemplate.context.injection.marks import name_of
from mqtemplate.context.settings.app import AppSettings
from mqtemplate.context.signals import StopRequests
from mqtemplate.context.startup import link, log_ready, open_all, register_components
from mqtemplate.errors import ConfigurationError, DependencyError, MQTemplateError
from mqtemplate.event_log import get_logger
from mqtemplate.listener.consuming.container import ListenerContainer
from mqtemplate.listener.registry import ListenerRegistry
from mqtemplate.services import Service
from mqtemplate.template.rocketmq_template import RocketMQTemplate

_log = get_logger("mqtemplate.context")

T = TypeVar("T")


class MQApplication:
    """An application, assembled from its configuration and its components.

    ::

        MQApplication(ScheduleListener, AuditService).run()  # until Ctrl-C or SIGTERM
        with MQApplication(__name__) as app:  # scripts and tests
            app.template.sync_send("orders:paid", order)

    The start reads the settings, runs the starters and resolves all dependencies. Then it starts the broker, the
    services in the order of their dependencies (``on_start``), the listeners, and the parts of starters (Spark). The
    stop runs in reverse order, the broker last; every stop runs, even if another fails. An application is used once.

    Args:
        components: Classes and ``@service`` functions to build, ``@message_listener`` classes and functions,
            finished objects (the application stops them too), modules or their names to search.
        config_folder: Folder of ``application.yml``; by default the working directory.
        profiles: Active profiles; by default those of ``MQTEMPLATE_PROFILES_ACTIVE``.
        environment: Environment variables, instead of those of the process.
        overrides: Type -> object or class that replaces it, for tests. The application does not stop its objects.
        settings: Keys that win over files and environment (``{"rocketmq.name-server": "embedded:memory"}``), or
            finished `AppSettings`; then nothing else is read.
        clock: The clock of all components. With a `VirtualClock` nothing starts a thread: a harness steps `services`.
        starters: Starters, instead of those that are installed.

    An invalid configuration or component is raised by the first use: `start`, ``with``, `settings`. `run` reports it.
    """

    def __init__(
        self,
        *components: object,
        config_folder: Path | str | None = None,
        profiles: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        overrides: Mapping[type, object] | None = None,
        settings: AppSettings | Mapping[str, object] | None = None,
        clock: Clock | None = None,
        starters: Iterable[StarterSource] | None = None,
    ) -> None:
        self._invalid: MQTemplateError | None = None
        given: tuple[object, ...] = ()
        try:
            if not isinstance(settings, AppSettings):
                settings = load_settings(config_folder, profiles, environment, settings)
            elif config_folder is not None or profiles or environment is not None:
                raise ConfigurationError(
                    "finished settings were given, so config_folder, profiles and environment would not be read; "
                    "pass them to load_settings instead"
                )
            self.settings = settings
            given = collect_components(components)
            self.context = ApplicationContext(self.settings, overrides, given)
        except MQTemplateError as exc:
            self._invalid = exc  # raised by the first use, so that `run` can report it
        self.is_ready = threading.Event()
        self._clock = clock or _clock_of_broker((*given, *(overrides or {}).values()))
        self._starters = starters
        self._stop_requests = StopRequests()
        self._lock = threading.RLock()
        self._state = "new"
        self._runner: threading.Thread | None = None

    def __getattr__(self, name: str) -> NoReturn:
        """Raise the error of an invalid application for ``settings`` and ``context``, which it does not have."""
        if name in ("settings", "context") and self.__dict__.get("_invalid") is not None:
            raise self._invalid  # type: ignore[misc]  # checked in the line above
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    def __repr__(self) -> str:
        if self._invalid is not None:
            return f"<{type(self).__name__}: invalid: {self._invalid}>"
        components = (each if hasattr(each, "__qualname__") else type(each) for each in self.context.components)
        names = ", ".join(map(name_of, components))
        return f"<{type(self).__name__}({names}): {self._state}, broker {self.settings.rocketmq.name_server}>"

    # --- objects -------------------------------------------------------------------------------

    @property
    def template(self) -> RocketMQTemplate:
        """The application's template."""
        return self.get(RocketMQTemplate)

    @property
    def broker(self) -> Broker:
        """The application's broker."""
        return self.get(Broker)  # type: ignore[type-abstract]  # selected by its base class

    @property
    def listeners(self) -> ListenerRegistry:
        """The registry of the listeners."""
        return self.get(ListenerRegistry)

    def get(self, wanted: type[T], name: str | None = None) -> T:
        """Return the object of a type, or among several the one with this name.

        Raises:
            DependencyError: There is none, several have the type, or the application was not started.
        """
        if self._state == "new":
            raise DependencyError(
                "the application is not started; use 'with MQApplication(...) as app:', start() or run()"
            )
        return self.context.get(wanted, name)

    @property
    def containers(self) -> Sequence[ListenerContainer]:
        """The listeners' containers, in the order of their registration."""
        return self.listeners.containers

    def services(self) -> Sequence[Service]:
        """Return the services in the order in which a harness steps them: those of the broker, then the listeners."""
        return (*self.broker.services(), *self.containers)

    # --- life cycle ----------------------------------------------------------------------------

    def start(self) -> None:
        """Start everything and return. If something fails, stop what is open.

        Raises:
            MQTemplateError: The application cannot start; the class of the error names the cause.
        """
        begin = time.monotonic()
        if self._invalid is not None:
            raise self._invalid
        with self._lock:
            if self._state != "new":
                raise DependencyError("an application is started once; create another MQApplication")
            self._state = "started"
            try:
                register_components(self.context, self._clock)
                apply_starters(find_starters(self._starters), self.context)
                link(self.context)
                open_all(self.context)
            except BaseException as exc:
                self._stop_after(exc)
                raise
            self.is_ready.set()
        log_ready(self.context, round((time.monotonic() - begin) * 1_000))

    def stop(self) -> None:
        """Stop everything: the listeners first, the broker last. Stopping twice has no effect.

        While another thread is in `run`, that thread stops the application and this call only requests it, so a handler
        may call it too.

        Raises:
            ExceptionGroup: The errors of the stops that failed; all others succeeded.
        """
        if self._runner is not None and self._runner is not threading.current_thread():
            self._stop_requests.request("stop()")
            return
        with self._lock:
            if self._state != "started":
                return
            self._state = "stopped"
            self.is_ready.clear()
            _log.debug("application.stopping")
            self.context.lifecycle.stop()

    def run(self, main: Callable[..., T] | None = None, *, keep_running: bool = False) -> T | None:
        """Start, work, and stop in order.

        Without *main* it works until SIGINT, SIGTERM or `stop`. With *main* it calls the function when everything is
        ready, with arguments by the types of its parameters, and stops when it returns; a signal interrupts it. A
        second signal ends the process at once.

        Args:
            keep_running: True: after *main* returned, work until a signal or `stop`.

        Returns:
            The result of *main*.

        Raises:
            SystemExit: The application cannot start. Standard error has a report: what, where, what to do. With the
                option ``--debug`` or ``MQTEMPLATE_DEBUG=1`` the error itself is raised.
            Exception: The exception of *main*, after the stop.
        """
        if self._clock is not None and self._clock.is_virtual:
            raise ConfigurationError(
                "run() waits, and nothing advances a virtual clock; use 'with MQApplication(...) as app:' "
                "and a harness that steps the application"
            )
        self._runner = threading.current_thread()
        if self._invalid is None:
            self.context.owns_process = True
        result: T | None = None
        with self._stop_requests.from_signals():
            try:
                with self._started():
                    result, interrupted = self._call(main)
                    if main is None or (keep_running and not interrupted):
                        _log.info("application.stop_requested", by=self._stop_requests.wait())
            finally:
                self._runner = None
        return result

    def _started(self) -> ExitStack:
        """Start, and return the context that stops; if the start fails, print a report and end the process."""
        with reported_failures():
            self.start()
        running = ExitStack()
        running.push(self)
        return running

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is None:
            self.stop()
        else:
            self._stop_after(error)

    def _call(self, main: Callable[..., T] | None) -> tuple[T | None, bool]:
        """Return the result of *main*, and True if a signal interrupted it."""
        if main is None:
            return None, False
        try:
            with self._stop_requests.interrupting():
                # A signal may have arrived during the start, before it could interrupt anything.
                return (None, True) if self._stop_requests.signalled else (self.context.call(main), False)
        except KeyboardInterrupt:
            _log.info("application.interrupted", main=name_of(main))
            return None, True

    def _stop_after(self, error: BaseException) -> None:
        """Stop because of an error. Errors of the stop are added to it as notes."""
        try:
            self.stop()
        except ExceptionGroup as group:
            for each in group.exceptions:
                error.add_note(f"stopping failed too: {type(each).__name__}: {each}")


def _clock_of_broker(given: Iterable[object]) -> Clock | None:
    """Return the clock of a broker among the components: an application has one clock."""
    return next((component.clock for component in given if isinstance(component, Broker)), None)
