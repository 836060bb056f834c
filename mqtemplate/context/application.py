"""An application: settings, starters, objects and listeners, started and stopped in order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import structlog

from mqtemplate.broker import Broker
from mqtemplate.clock import Clock
from mqtemplate.context.autoconfigure import AutoConfiguration
from mqtemplate.context.config.source import load_settings
from mqtemplate.context.injection.application_context import ApplicationContext
from mqtemplate.context.injection.components import collect_components
from mqtemplate.context.injection.marks import name_of
from mqtemplate.context.settings.app import AppSettings
from mqtemplate.context.signals import StopRequests
from mqtemplate.context.startup import start
from mqtemplate.errors import ConfigurationError, DependencyError
from mqtemplate.listener import ListenerContainer, ListenerRegistry
from mqtemplate.services import Service
from mqtemplate.template import RocketMQTemplate

_log = structlog.stdlib.get_logger("mqtemplate.context")

T = TypeVar("T")


class MQApplication:
    """Puts an application together from its configuration and its components, and runs it.

    ::

        MQApplication(ScheduleListener, AuditService).run()  # until Ctrl-C or SIGTERM
        with MQApplication(__name__) as app:  # scripts and tests
            app.template.sync_send("orders:paid", order)

    Start: settings, starters, all wiring, then the broker, the services in the order of their dependencies
    (``on_start``), what starters run beside (Spark), and the listeners last but those. Stop is the reverse:
    listeners first, the broker last; every stop is tried. An application is used once.

    Args:
        components: Classes and ``@service`` functions to build, ``@message_listener`` classes and functions,
            finished objects (the application stops them too), modules or their names to look into.
        config_folder: Where ``application.yml`` is; the working directory if not given.
        profiles: Profiles in force; else those of ``MQTEMPLATE_PROFILES_ACTIVE``.
        environment: Variables instead of the process's own.
        overrides: Type -> object or class in its place, for tests. Its objects are not stopped.
        settings: Keys that win over files and environment (``{"rocketmq.name-server": "embedded:memory"}``), or
            finished `AppSettings`; then nothing else is read.
        clock: The time to live by. On a `VirtualClock` nothing starts a thread: a harness steps `services`.
        starters: Starters instead of those that are installed.

    Raises:
        ConfigurationError: The configuration cannot be used.
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
        starters: Iterable[EntryPoint | type[AutoConfiguration] | AutoConfiguration] | None = None,
    ) -> None:
        self.settings = _settings(settings, config_folder, profiles, environment)
        self.context = ApplicationContext(self.settings, overrides)
        self.context.components = collect_components(components)
        self.is_ready = threading.Event()
        self._clock = clock or _clock_of_broker((*self.context.components, *(overrides or {}).values()))
        self._starters = starters
        self._stop_requests = StopRequests()
        self._lock = threading.RLock()
        self._state = "new"
        self._runner: threading.Thread | None = None

    # --- what is in it -------------------------------------------------------------------------

    @property
    def template(self) -> RocketMQTemplate:
        return self.get(RocketMQTemplate)

    @property
    def broker(self) -> Broker:
        return self.get(Broker)  # type: ignore[type-abstract]  # asked for by its base, whichever it is

    @property
    def listeners(self) -> ListenerRegistry:
        return self.get(ListenerRegistry)

    def get(self, wanted: type[T], name: str | None = None) -> T:
        """The object of a type; *name* tells two apart.

        Raises:
            DependencyError: There is none or several, or the application was not started.
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
        """Whatever works by itself, in the order in which a harness steps it: the broker's, then the listeners."""
        return (*self.broker.services(), *self.containers)

    # --- life ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start everything and return. What is open is closed again if something fails on the way.

        Raises:
            MQTemplateError: It cannot start; the kinds in `errors` say why.
        """
        with self._lock:
            if self._state != "new":
                raise DependencyError("an application is started once; make another MQApplication")
            self._state = "started"
            try:
                start(self.context, self._clock, self._starters)
            except BaseException as exc:
                self._stop_after(exc)
                raise
            self.is_ready.set()
        _log.info("application.ready", listeners=len(self.listeners.containers), broker=self.broker.name)

    def stop(self) -> None:
        """Stop everything, listeners first, the broker last. Stopping twice is harmless.

        While another thread is in `run`, that thread does it and this call only asks for it, so that a handler may
        call it as well.

        Raises:
            ExceptionGroup: What could not stop cleanly; everything else did.
        """
        if self._runner is not None and self._runner is not threading.current_thread():
            self._stop_requests.request("stop()")
            return
        with self._lock:
            if self._state != "started":
                return
            self._state = "stopped"
            self.is_ready.clear()
            _log.info("application.stopping")
            self.context.lifecycle.stop()

    def run(self, main: Callable[..., T] | None = None, *, keep_running: bool = False) -> T | None:
        """Start, work, and stop in order.

        Without *main* it works until SIGINT, SIGTERM or `stop`. With *main* it calls that when everything is ready,
        with arguments found by their types, and ends when it returns; a signal interrupts it. A second signal ends
        the process at once.

        Args:
            keep_running: Go on after *main* returned, until a signal or `stop`.

        Returns:
            What *main* returned.

        Raises:
            MQTemplateError: It cannot start.
            Exception: What *main* raised, after the stop.
        """
        if self._clock is not None and self._clock.is_virtual:
            raise ConfigurationError(
                "run() waits, and on a virtual clock nothing moves by itself; use 'with MQApplication(...) as app:' "
                "and step it by the test harness"
            )
        self._runner = threading.current_thread()
        result: T | None = None
        with self._stop_requests.from_signals():
            try:
                with self:
                    result, interrupted = self._call(main)
                    if main is None or (keep_running and not interrupted):
                        _log.info("application.stop_requested", by=self._stop_requests.wait())
            finally:
                self._runner = None
        return result

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is None:
            self.stop()
        else:
            self._stop_after(error)

    # --- inside --------------------------------------------------------------------------------

    def _call(self, main: Callable[..., T] | None) -> tuple[T | None, bool]:
        """What *main* returned, and whether a signal cut it short."""
        if main is None:
            return None, False
        try:
            with self._stop_requests.interrupting():
                return (None, True) if self._stop_requests.signalled else (self.context.call(main), False)
        except KeyboardInterrupt:
            _log.info("application.interrupted", main=name_of(main))
            return None, True

    def _stop_after(self, error: BaseException) -> None:
        """Stop because of an error, which stays the one that is raised."""
        try:
            self.stop()
        except ExceptionGroup as group:
            for each in group.exceptions:
                error.add_note(f"stopping failed too: {type(each).__name__}: {each}")


def _settings(
    given: AppSettings | Mapping[str, object] | None,
    config_folder: Path | str | None,
    profiles: Sequence[str],
    environment: Mapping[str, str] | None,
) -> AppSettings:
    if not isinstance(given, AppSettings):
        return load_settings(config_folder, profiles, environment, given)
    if config_folder is not None or profiles or environment is not None:
        raise ConfigurationError(
            "finished settings were given, so config_folder, profiles and environment would not be read; "
            "pass them to load_settings instead"
        )
    return given


def _clock_of_broker(given: Iterable[object]) -> Clock | None:
    """The time of a broker that was made before the application; two times in one application would confuse both."""
    return next((component.clock for component in given if isinstance(component, Broker)), None)
