"""An application: settings, starters, objects and listeners, started and stopped in order."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from contextvars import Context
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

from mqtemplate.broker import Broker
from mqtemplate.clock import Clock
from mqtemplate.context.failure_report import reported_failures, without_library_frames
from mqtemplate.context.injection.lifecycle import AwaitingCaller, BlockingCaller, HookCaller, finish
from mqtemplate.context.interactive import InteractiveApplications, source_of
from mqtemplate.context.signals import StopRequests, stop_at_exit
from mqtemplate.errors import ConfigurationError, DependencyError, EventLoopBlockedError, MQTemplateError
from mqtemplate.event_log import get_logger
from mqtemplate.futures import running_loop
from mqtemplate.listener.container.loops import HandlerLoop, RunningLoop
from mqtemplate.processes import OwnerProcess
from mqtemplate.services import Service
from mqtemplate.user_code import error_text

if TYPE_CHECKING:
    # A program that imports `MQApplication` may never create one; the rest of it is imported by the constructor.
    from mqtemplate.context.autoconfigure import StarterSource
    from mqtemplate.context.injection.application_context import ApplicationContext
    from mqtemplate.context.settings.app import AppSettings
    from mqtemplate.listener.container.container import ListenerContainer
    from mqtemplate.listener.registry import ListenerRegistry
    from mqtemplate.template.rocketmq_template import RocketMQTemplate

_log = get_logger("mqtemplate.context")

T = TypeVar("T")


class ApplicationState(Enum):
    """State of an application: new, checked or started; a started one is stopped once."""

    NEW = "new"
    CHECKED = "checked"
    STARTED = "started"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Health:
    """State of an application at one moment, without a request to a broker.

    Attributes:
        is_ready: True if the application is started and every listener with ``auto_startup`` runs.
        brokers: Name -> reason why the broker cannot be reached now; None if it can. The names are the keys of
            `MQApplication.brokers`.
        listeners: Id -> state, such as ``running``.
    """

    is_ready: bool
    brokers: Mapping[str, str | None]
    listeners: Mapping[str, str]

    @property
    def is_up(self) -> bool:
        """True if the application is ready and all brokers can be reached."""
        return self.is_ready and not any(self.brokers.values())


def read_health(is_started: bool, brokers: Mapping[str, Broker], containers: Sequence[ListenerContainer]) -> Health:
    """Return the health of an application over all its brokers and listeners."""
    return Health(
        is_ready=is_started and all(each.is_running for each in containers if each.endpoint.settings.auto_startup),
        brokers={name: broker.outage() for name, broker in brokers.items()},
        listeners={each.endpoint.id: each.state.value for each in containers},
    )


class MQApplication:
    """An application, assembled from its configuration and its components.

    ::

        MQApplication(ScheduleListener, AuditService).run()  # until Ctrl-C or SIGTERM
        with MQApplication(__name__) as app:  # scripts and tests
            app.template.sync_send("orders:paid", order)
        async with MQApplication(__name__) as app:  # in a program that runs on asyncio
            await app.template.async_send("orders:paid", order)

    The start reads the settings, runs the starters and resolves all dependencies. Then it starts the broker, the
    services in the order of their dependencies (``on_start``), the listeners, and the parts of starters (Spark). The
    stop runs in reverse order, the broker last; every stop runs, even if another fails. An application is used once,
    in the process that starts it: in one that was forked later each use raises `ForkedError`, and `stop` does nothing.
    If the process ends before the stop (its main thread ends or raises, SIGTERM), the application is stopped then.
    In a notebook, the start of an application stops the one that an earlier run of the same cell has started.

    Args:
        components: Classes and ``@service`` functions to build, ``@message_listener`` classes and functions,
            finished objects (the application stops them too), modules or their names to search.
        config_folder: Folder of ``application.yml``; by default the working directory.
        profiles: Active profiles; by default ``MQTEMPLATE_PROFILES_ACTIVE``.
        environment: Environment variables, instead of the variables of the process.
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
        from mqtemplate.context.components import claim, collect_components
        from mqtemplate.context.injection.application_context import ApplicationContext
        from mqtemplate.context.settings.app import AppSettings
        from mqtemplate.context.settings.source import load_settings

        self._invalid: MQTemplateError | None = None
        self._settings: AppSettings | None = None
        self._context: ApplicationContext | None = None
        self.is_ready = threading.Event()
        given: tuple[object, ...] = ()
        try:
            if not isinstance(settings, AppSettings):
                settings = load_settings(config_folder, profiles, environment, settings)
            elif config_folder is not None or profiles or environment is not None:
                raise ConfigurationError(
                    "finished settings were given, so config_folder, profiles and environment would not be read; "
                    "pass them to load_settings instead"
                )
            self._settings = settings
            given = collect_components(components)
            claim(given)
            self._context = ApplicationContext(settings, overrides, given, is_ready=self.is_ready)
        except MQTemplateError as exc:
            self._invalid = exc  # raised by the first use, so that `run` can report it
        self._source = source_of(sys._getframe(1))
        self._created_in = str(sys._getframe(1).f_globals.get("__name__", "__main__"))
        self._clock = clock or _clock_of_broker((*given, *(overrides or {}).values()))
        self._starters = starters
        self._stop_requests = StopRequests()
        self._lock = threading.RLock()
        self._state = ApplicationState.NEW
        self._owner: OwnerProcess | None = None
        self._runner: threading.Thread | None = None
        self._runs_loop = False
        self._stopper: threading.Thread | None = None
        self._stopped = threading.Event()
        self._ending: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        from mqtemplate.context.injection.marks import name_of

        if self._invalid is not None:
            return f"<{type(self).__name__}: invalid: {self._invalid}>"
        components = (each if hasattr(each, "__qualname__") else type(each) for each in self.context.components)
        names = ", ".join(map(name_of, components))
        return f"<{type(self).__name__}({names}): {self._state.value}, broker {self.settings.rocketmq.name_server}>"

    @property
    def settings(self) -> AppSettings:
        """The settings; an invalid configuration is raised."""
        return self._valid(self._settings)

    @property
    def context(self) -> ApplicationContext:
        """The objects; an invalid configuration or component is raised."""
        return self._valid(self._context)

    def _valid(self, part: T | None) -> T:
        if part is None:
            assert self._invalid is not None  # else the constructor has set it
            raise self._invalid
        return part

    # --- objects -------------------------------------------------------------------------------

    @property
    def template(self) -> RocketMQTemplate:
        """The application's template."""
        from mqtemplate.template.rocketmq_template import RocketMQTemplate

        return self.get(RocketMQTemplate)

    @property
    def broker(self) -> Broker:
        """The application's broker."""
        return self.get(Broker)  # type: ignore[type-abstract]  # selected by its base class

    @property
    def brokers(self) -> Mapping[str, Broker]:
        """All brokers by name: ``broker`` for the application's own; then the name of the template for a broker of a
        further template, and the address for a broker that a listener names."""
        return self.context.brokers

    def health(self) -> Health:
        """Return the health of all brokers and listeners now, for a probe; it sends no request."""
        return read_health(self.is_ready.is_set(), self.brokers, self.containers)

    @property
    def listeners(self) -> ListenerRegistry:
        """The registry of the listeners."""
        from mqtemplate.listener.registry import ListenerRegistry

        return self.get(ListenerRegistry)

    def get(self, wanted: type[T], name: str | None = None) -> T:
        """Return the object of a type, or among several the one with this name.

        Raises:
            DependencyError: No object or several have the type, or the application was not started.
        """
        if self._state is ApplicationState.NEW:
            raise DependencyError(
                "the application is not started; use 'with MQApplication(...) as app:', start() or run()"
            )
        self._check_process()
        return self.context.get(wanted, name)

    def _check_process(self) -> None:
        if self._owner is not None:
            self._owner.check()

    @property
    def _is_unstarted(self) -> bool:
        return self._state in (ApplicationState.NEW, ApplicationState.CHECKED)

    @property
    def _is_foreign(self) -> bool:
        """True in a forked child: the objects and files belong to the process that started the application."""
        return self._owner is not None and not self._owner.is_current

    @property
    def containers(self) -> Sequence[ListenerContainer]:
        """The listeners' containers, in the order of their registration."""
        return self.listeners.containers

    def services(self) -> Sequence[Service]:
        """Return the services in the order in which a harness steps them: of the brokers, then the listeners."""
        return (*(service for broker in self.brokers.values() for service in broker.services()), *self.containers)

    # --- life cycle ----------------------------------------------------------------------------

    def start(self) -> None:
        """Start everything and return. If something fails, stop what is open.

        ``async def`` handlers and hooks run on the event loop that runs in this thread, else on one of their own.

        Raises:
            MQTemplateError: The application cannot start; the class of the error names the cause.
            EventLoopBlockedError: A hook is async, and this call blocks the loop: use `start_async`.
        """
        try:
            for earlier in self._earlier():
                with _logged_stop_errors():
                    earlier.stop()
            finish(self._start(self._blocking()))
        except MQTemplateError as exc:
            raise self._start_failed(exc)  # noqa: B904 (it is the same exception)

    async def start_async(self) -> None:
        """Start everything, as `start`; async hooks are awaited. ``async def`` handlers run on this event loop.

        On a virtual clock they run on a loop of the clock, since a harness blocks this one.
        """
        try:
            for earlier in self._earlier():
                with _logged_stop_errors():
                    await earlier.stop_async()
            await self._start(self._awaiting())
        except MQTemplateError as exc:
            raise self._start_failed(exc)  # noqa: B904 (it is the same exception)

    def _earlier(self) -> list[MQApplication]:
        """Return the running applications that this one replaces: a cell of a notebook runs again."""
        if self._source is None or self._state is not ApplicationState.NEW:
            return []
        earlier = _interactive.replaced_by(self._source, self._content())
        for app in earlier:
            _log.info("application.replaced", replaced=repr(app), hint="the same cell runs again")
        return earlier

    def _content(self) -> Hashable:
        """Return a value that is equal for applications of the same components and broker."""
        from mqtemplate.context.injection.marks import name_of

        components = (each if hasattr(each, "__qualname__") else type(each) for each in self.context.components)
        settings = self.settings
        return (*map(name_of, components), settings.rocketmq.name_server, settings.is_embedded and settings.store_path)

    def _start_failed(self, error: MQTemplateError) -> MQTemplateError:
        """Return the error without the lines of this library. Its reason is logged first, unless `run` reports it."""
        if self._runner is None:
            _log.error("application.start_failed", error=type(error).__name__, reason=str(error))
        return without_library_frames(error)

    async def _start(self, caller: HookCaller) -> None:
        from mqtemplate.context.phases import configure_and_link, log_ready, open_all

        begin = time.monotonic()
        self._check_process()
        context = self.context
        with self._lock:
            if self._state is not ApplicationState.NEW:
                raise DependencyError("an application is started once; create another MQApplication")
            self._owner = OwnerProcess("this application")
            self._state = ApplicationState.STARTED
            try:
                configure_and_link(context, self._clock, self._starters)
                await open_all(context, caller)
            except BaseException as exc:
                await self._stop_after(exc, caller)
                raise
            if self._clock is None or not self._clock.is_virtual:
                context.lifecycle.push("process exit", stop_at_exit(self._stop_at_exit))
            for container in self.containers:
                container.on_broken = self.is_ready.clear
            # A part that failed already, such as a query of Spark, keeps the application from becoming ready.
            if all(getattr(part, "is_ready", True) for part in context.parts):
                self.is_ready.set()
        if self._source is not None:
            _interactive.add(self._source, self._content(), self)
            context.lifecycle.push("interactive session", lambda: _interactive.remove(self))
        log_ready(context, round((time.monotonic() - begin) * 1_000))
        self._warn_of_unclaimed()

    def _warn_of_unclaimed(self) -> None:
        """Log the listeners beside the components of this application that no application has: they never run."""
        if self._is_virtual:  # a test has the part that it tests
            return
        from mqtemplate.context.components import unclaimed_listeners

        for name in unclaimed_listeners(self.context.components, "__main__", self._created_in):
            hint = "give it to MQApplication(...), or its module: MQApplication(__name__)"
            _log.warning("listener.not_in_application", listener=name, hint=hint)

    def check(self) -> None:
        """Build everything and start nothing, to find errors before the application runs. It cannot be started then.

        Objects are built, so their constructors run; ``on_start`` does not. No broker is started: what only a broker
        can refuse, such as an unknown topic, is found at the start.

        Raises:
            MQTemplateError: The application could not start; the class of the error names the cause.
        """
        from mqtemplate.context.phases import check_all, configure_and_link

        context = self.context
        with self._lock:
            if self._state is not ApplicationState.NEW:
                raise DependencyError("an application is checked before its start; create another MQApplication")
            self._state = ApplicationState.CHECKED
            configure_and_link(context, self._clock, self._starters)
            check_all(context)

    def stop(self) -> None:
        """Stop everything: the listeners first, the broker last. Stopping twice has no effect.

        While `run` works, this call only requests the stop, so a handler may call it too. In a handler it returns at
        once if another thread stops the application already. On the event loop of the handlers it cannot wait for
        them: it cancels them, and their messages are redelivered.

        Raises:
            ExceptionGroup: The errors of the stops that failed; all others succeeded.
            EventLoopBlockedError: An async hook would have to run on the loop that this call blocks: use `stop_async`.
        """
        if self._is_foreign or self._requests_stop() or self._is_unstarted or self._stopped.is_set():
            return
        if self._stopper is not None and self._handler_loop().is_current():
            return  # another thread stops it, and may need this loop
        caller = self._blocking()
        for name, hook in self.context.lifecycle.hooks():
            caller.check(name, hook)
        finish(self._stop(caller))

    async def stop_async(self) -> None:
        """Stop everything, as `stop`. The event loop goes on, so running handlers can finish.

        In a handler it only requests the stop and returns: the handler does not wait for itself.
        """
        if not self._is_foreign and not self._requests_stop():
            await self._end()

    async def _end(self) -> None:
        """Stop in a task of its own: a handler that requested the stop may be cancelled by it."""
        from mqtemplate.listener.handler.current import current_group

        if self._ending is None:
            if self._is_unstarted or self._stopped.is_set():
                return
            loop = self._handler_loop()
            if loop.is_current() and not isinstance(loop, RunningLoop):  # a handler, on a loop that ends with this stop
                loop.call_outside(self.stop)
                return
            self._ending = asyncio.get_running_loop().create_task(self._stop(self._awaiting()), context=Context())
        if current_group() is None:
            await asyncio.shield(self._ending)

    def _requests_stop(self) -> bool:
        """Return True if `run` works, which then stops the application; request it."""
        if self._runner is None or (self._runner is threading.current_thread() and not self._runs_loop):
            return False
        self._stop_requests.request("stop()")
        return True

    async def _stop(self, caller: HookCaller) -> None:
        from mqtemplate.listener.handler.current import current_group

        with self._lock:
            is_first = self._state is ApplicationState.STARTED
            if is_first:
                self._state, self._stopper = ApplicationState.STOPPED, threading.current_thread()
        if not is_first:
            if current_group() is None:  # the stop waits for a handler, so a handler must not wait for it
                await caller.call_blocking(self._wait_for_stop)
            return
        self.is_ready.clear()
        _log.debug("application.stopping")
        try:
            await self.context.lifecycle.stop(caller)
        finally:
            self._stopped.set()

    def _wait_for_stop(self) -> None:
        """Wait until the thread that stops the application has finished."""
        if self._stopper is not None and self._stopper is not threading.current_thread():
            self._stopped.wait()

    def _blocking(self) -> BlockingCaller:
        return BlockingCaller(self._handler_loop)

    def _awaiting(self) -> AwaitingCaller:
        return AwaitingCaller(self._handler_loop, is_virtual=self._is_virtual)

    def _handler_loop(self) -> HandlerLoop:
        from mqtemplate.listener.registry import ListenerRegistry

        return self.context.get(ListenerRegistry).loop

    @property
    def _is_virtual(self) -> bool:
        return self._clock is not None and self._clock.is_virtual

    @overload
    def run(self, main: Callable[..., Coroutine[Any, Any, T]], *, keep_running: bool = False) -> T | None: ...

    @overload
    def run(self, main: Callable[..., T] | None = None, *, keep_running: bool = False) -> T | None: ...

    def run(self, main: Callable[..., Any] | None = None, *, keep_running: bool = False) -> Any:
        """Start, work, and stop in order.

        Without *main* it works until SIGINT, SIGTERM or `stop`. With *main* it calls the function when everything is
        ready, with arguments by the types of its parameters, and stops when it returns; a signal interrupts it. A
        second signal ends the process at once.

        An ``async def`` *main* runs on an event loop of its own, together with all async handlers and hooks; a signal
        cancels it.

        Args:
            keep_running: True: after *main* returned, work until a signal or `stop`.

        Returns:
            The result of *main*.

        Raises:
            SystemExit: The application cannot start. Standard error has a report: what, where, what to do. With the
                option ``--debug`` or ``MQTEMPLATE_DEBUG=1`` the error itself is raised.
            EventLoopBlockedError: An event loop runs in this thread already.
            Exception: The exception of *main*, after the stop.
        """
        if self._is_virtual:
            raise ConfigurationError(
                "run() waits, and nothing advances a virtual clock; use 'with MQApplication(...) as app:' "
                "and a harness that steps the application"
            )
        if running_loop() is not None:
            raise EventLoopBlockedError(
                "run() would block the event loop of this thread; write 'async with MQApplication(...) as app:'"
            )
        from mqtemplate.listener.handler.providers import is_async

        self._runner = threading.current_thread()
        if self._invalid is None:
            self.context.owns_process = True
        with self._stop_requests.from_signals():
            try:
                if main is not None and is_async(main):
                    self._runs_loop = True
                    return asyncio.run(self._run_async(main, keep_running=keep_running))
                return self._run(main, keep_running=keep_running)
            finally:
                self._runner = None

    def _run(self, main: Callable[..., T] | None, *, keep_running: bool) -> T | None:
        with reported_failures():
            self.start()
        with ExitStack() as running:
            running.push(self)
            result, interrupted = self._call(main)
            if main is None or (keep_running and not interrupted):
                _log.info("application.stop_requested", by=self._stop_requests.wait())
        return result

    async def _run_async(self, main: Callable[..., Coroutine[Any, Any, T]], *, keep_running: bool) -> T | None:
        with reported_failures():
            await self.start_async()
        async with AsyncExitStack() as running:
            running.push_async_exit(self)
            result, interrupted = await self._call_async(main)
            if keep_running and not interrupted:
                reason = await asyncio.to_thread(self._stop_requests.wait)
                _log.info("application.stop_requested", by=reason)
        return result

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is None:
            self.stop()
        else:
            finish(self._stop_after(error, self._blocking()))

    async def __aenter__(self) -> Self:
        await self.start_async()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        try:
            await self._end()
        except ExceptionGroup as group:
            if error is None:
                raise
            _add_notes(error, group)

    def _call(self, main: Callable[..., T] | None) -> tuple[T | None, bool]:
        """Return the result of *main*, and True if a signal interrupted it."""
        if main is None:
            return None, False
        try:
            with self._stop_requests.interrupting():
                # A signal may have arrived during the start, before it could interrupt anything.
                return (None, True) if self._stop_requests.signalled else (self.context.call(main), False)
        except KeyboardInterrupt:
            from mqtemplate.context.injection.marks import name_of

            _log.info("application.interrupted", main=name_of(main))
            return None, True

    def _stop_at_exit(self) -> None:
        """Stop because the process ends; wait for a thread that is in `run`."""
        runner = self._runner
        self.stop()
        if runner is not None and runner is not threading.current_thread():
            runner.join()

    async def _call_async(self, main: Callable[..., Coroutine[Any, Any, T]]) -> tuple[T | None, bool]:
        """Return the result of *main*, and True if a signal cancelled it."""
        loop = asyncio.get_running_loop()
        task = loop.create_task(self.context.call(main))
        with self._stop_requests.interrupting(lambda: loop.call_soon_threadsafe(task.cancel)):
            if self._stop_requests.signalled:
                task.cancel()
            try:
                return await task, False
            except asyncio.CancelledError:
                if not self._stop_requests.signalled:
                    raise
                from mqtemplate.context.injection.marks import name_of

                _log.info("application.interrupted", main=name_of(main))
                return None, True

    async def _stop_after(self, error: BaseException, caller: HookCaller) -> None:
        """Stop because of an error. Errors of the stop are added to it as notes."""
        try:
            await self._stop(caller)
        except ExceptionGroup as group:
            _add_notes(error, group)


_interactive: InteractiveApplications[MQApplication] = InteractiveApplications()


@contextmanager
def _logged_stop_errors() -> Iterator[None]:
    """Log the errors of stopping an application that is replaced: the new one starts all the same."""
    try:
        yield
    except ExceptionGroup as group:
        _log.warning("application.stop_failed", errors=[error_text(each) for each in group.exceptions])


def _add_notes(error: BaseException, group: ExceptionGroup) -> None:
    for each in group.exceptions:
        error.add_note(f"stopping failed too: {type(each).__name__}: {each}")


def _clock_of_broker(given: Iterable[object]) -> Clock | None:
    """Return the clock of a broker among the components: an application has one clock."""
    return next((component.clock for component in given if isinstance(component, Broker)), None)
