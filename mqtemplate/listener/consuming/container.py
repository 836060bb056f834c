"""Listener container: it fetches the messages of one listener, has them handled, and commits offsets."""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import Enum
from typing import Any

from mqtemplate.broker import Broker, Consumer
from mqtemplate.converter import MessageConverter
from mqtemplate.errors import BrokerClosedError, CorruptRecordError, ListenerError
from mqtemplate.event_log import get_logger
from mqtemplate.listener.consuming.async_loop import LoopThread, PrivateLoop
from mqtemplate.listener.consuming.concurrently import ConcurrentConsumeService
from mqtemplate.listener.consuming.consume_service import ConsumeContext, ConsumeService
from mqtemplate.listener.consuming.failure import FailureLog
from mqtemplate.listener.consuming.invocation import Invocation
from mqtemplate.listener.consuming.observed import ObservedInvocation, Observer
from mqtemplate.listener.consuming.orderly import OrderlyConsumeService
from mqtemplate.listener.consuming.process_queue import ProcessQueues
from mqtemplate.listener.consuming.thread_pool import ConsumeThreadPool
from mqtemplate.listener.endpoint import Endpoint

_log = get_logger("mqtemplate.listener")

_LONGEST_WAIT_MS = 5_000
_WAIT_WHILE_HANDLING_MS = 500  # finished messages are committed at least this often
_WAIT_WHILE_SUPERVISING_MS = 1
_RETRY_POLL_MS = 1_000
_JOIN_S = 10.0


class ContainerState(Enum):
    """State of a listener container."""

    CREATED = "created"
    RUNNING = "running"
    PAUSED = "paused"
    STOPPING = "stopping"
    STOPPED = "stopped"
    BROKEN = "broken"  # the broker was closed before the container


class ListenerContainer:
    """Container of one listener, and a `Service` for virtual clocks.

    On a real clock one thread fetches and a `ConsumeThreadPool` handles. On a virtual clock there are no threads:
    ``step`` fetches, and handles in the calling thread in the order of the queues.

    ``start`` joins the group and does not wait for messages. A stopped container may be started again; it continues
    after the last commit.

    Args:
        loop: Loop for ``async def`` handlers; by default one of the container's own.
    """

    def __init__(
        self,
        broker: Broker,
        endpoint: Endpoint,
        converter: MessageConverter,
        *,
        loop: LoopThread | PrivateLoop | None = None,
    ) -> None:
        self.name = f"listener {endpoint.id}"
        self.endpoint = endpoint
        self.state = ContainerState.CREATED
        self._broker = broker
        self._clock = broker.clock
        self._converter = converter
        self._owns_loop = loop is None
        self._loop = loop or (PrivateLoop() if broker.clock.is_virtual else LoopThread())
        self._failures = FailureLog(endpoint.id, endpoint.settings.group)
        self._log = _log.bind(listener=endpoint.id, group=endpoint.settings.group)
        self._observers: list[Observer] = []
        self._wake: Callable[[], None] = lambda: None
        self._state_lock = threading.Lock()
        self._wake_event = threading.Event()
        self._thread: threading.Thread | None = None
        self._pool: ConsumeThreadPool | None = None
        self._next_poll_ms = 0
        # The container has these from `start` on; each start creates new ones.
        self._consumer: Consumer
        self._queues: ProcessQueues
        self._service: ConsumeService[Any, Any]

    @property
    def is_running(self) -> bool:
        """True if the container is a member of its group; a paused one is."""
        return self.state in (ContainerState.RUNNING, ContainerState.PAUSED)

    # --- start and stop ----------------------------------------------------------------------------

    def start(self) -> None:
        """Join the group and fetch. Starting twice is harmless.

        Raises:
            ListenerError: The group has members with another subscription.
            BrokerError: The broker cannot be reached.
        """
        with self._state_lock:
            if self.is_running:
                return
            if self.state is ContainerState.STOPPING:
                raise ListenerError(f"{self.name} is being stopped; start it when stop() has returned")
            settings = self.endpoint.settings
            self._consumer = self._broker.subscribe(settings.consumer_spec(self._clock.now_ms()))
            self._queues = ProcessQueues(self._consumer)
            self._service = self._make_service()
            self._next_poll_ms = 0
            self.state = ContainerState.RUNNING
            if not self._clock.is_virtual:
                self._start_threads()
        self._log.debug(
            "listener.started",
            topics=list(settings.topics),
            selector=settings.selector.expression,
            mode=settings.consume_mode.value,
        )

    def _make_service(self) -> ConsumeService[Any, Any]:
        endpoint, settings = self.endpoint, self.endpoint.settings
        context = ConsumeContext(
            settings=settings,
            take_size=endpoint.take_size,
            is_batch=endpoint.plan.is_batch,
            consumer=self._consumer,
            queues=self._queues,
            handling=self._make_invocation(),
            failures=self._failures,
            clock=self._clock,
            on_earlier_due=self._wake_polling,
        )
        return OrderlyConsumeService(context) if settings.is_orderly else ConcurrentConsumeService(context)

    def _make_invocation(self) -> Invocation:
        arguments = (self.endpoint, self._broker, self._converter, self._loop.run, self._failures)
        if self._clock.is_virtual:  # a test; a real clock has no observers, which would cost time for each message
            return ObservedInvocation(*arguments, observers=self._observers)
        return Invocation(*arguments)

    def observe(self, observer: Observer) -> None:
        """Report each call of the handler to a function, on a virtual clock only."""
        self._observers.append(observer)

    def _start_threads(self) -> None:
        settings, name = self.endpoint.settings, f"mqtemplate-{self.endpoint.id}"
        self._pool = ConsumeThreadPool(name, self._service, settings.thread_number, settings.consume_thread_max)
        self._wake_event.clear()
        self._thread = threading.Thread(target=self._poll_loop, args=(self._pool,), name=f"{name}-poll", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop fetching, wait for running handlers, commit, and leave the group. Stopping twice is harmless.

        The wait ends after ``await_termination_millis_when_shutdown``. Messages that are unfinished then stay
        uncommitted and are redelivered.
        """
        with self._state_lock:
            if not self.is_running and self.state is not ContainerState.BROKEN:
                return
            self.state = ContainerState.STOPPING
            self._stop_threads()
            unfinished = self._service.abandon()
            try:
                self._commit()
            finally:
                self._consumer.close()
                self.state = ContainerState.STOPPED
                if self._owns_loop:
                    self._loop.stop()
        write = self._log.warning if unfinished else self._log.debug
        write("listener.stopped", unfinished=unfinished)

    def _stop_threads(self) -> None:
        self._wake_polling()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)
        if self._pool is not None:
            self._pool.stop(self.endpoint.settings.await_termination_millis_when_shutdown / 1_000)
        self._thread = self._pool = None

    def _commit(self) -> None:
        try:
            self._queues.commit()
        except BrokerClosedError:
            self._log.warning("listener.commit_failed", reason="the broker was closed first")

    def pause(self) -> None:
        """Stop fetching until ``resume``. Fetched messages are handled, and the queues stay assigned."""
        with self._state_lock:
            if self.state is ContainerState.RUNNING:
                self.state = ContainerState.PAUSED
                self._wake_polling()

    def resume(self) -> None:
        """Fetch again after ``pause``."""
        with self._state_lock:
            if self.state is ContainerState.PAUSED:
                self.state = ContainerState.RUNNING
                self._wake_polling()
        self._wake()

    # --- on a virtual clock ------------------------------------------------------------------------

    def on_wake(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def step(self) -> int | None:
        """Fetch and handle what is due. Return now if there may be more, the next due time, or None."""
        if not self._clock.is_virtual or not self.is_running:
            return None
        try:
            return self._step(self._clock.now_ms())
        except Exception as error:
            return self._report(error)

    def _step(self, now_ms: int) -> int | None:
        self._service.release_due(now_ms)
        self._handle_ready()
        found = False
        if self.state is ContainerState.RUNNING and now_ms >= self._next_poll_ms:
            found = self._fetch(0)
            self._handle_ready()
        if not self.is_running:
            return None
        next_poll_ms = self._next_poll_ms if found or self._next_poll_ms > now_ms else None
        return min((due for due in (next_poll_ms, self._service.next_due()) if due is not None), default=None)

    def _handle_ready(self) -> None:
        # A handler may stop its own container, and the broker may be closed under it.
        while self.is_running and self._service.run_next():
            pass

    # --- on a real clock ---------------------------------------------------------------------------

    def _poll_loop(self, pool: ConsumeThreadPool) -> None:
        wait_ms = 0
        while self.is_running:
            try:
                rest_ms = self._next_poll_ms - self._clock.now_ms()
                if self.state is ContainerState.PAUSED or rest_ms > 0:
                    self._wake_event.wait((min(wait_ms, rest_ms) if rest_ms > 0 else wait_ms) / 1_000)
                    self._wake_event.clear()
                elif self._fetch(wait_ms):
                    pool.wake()
                self._service.check_hanging(pool.replace)
                wait_ms = self._next_wait_ms(pool)
            except Exception as error:
                self._report(error)
                wait_ms = _RETRY_POLL_MS

    def _next_wait_ms(self, pool: ConsumeThreadPool) -> int:
        """Return how long the next fetch may wait for messages."""
        now_ms = self._clock.now_ms()
        due_ms = self._service.next_due()
        if due_ms is not None and due_ms <= now_ms:
            self._service.release_due(now_ms)
            pool.wake()
            due_ms = self._service.next_due()
        if pool.supervise():
            return _WAIT_WHILE_SUPERVISING_MS
        wait_ms = _WAIT_WHILE_HANDLING_MS if self._queues.in_flight else _LONGEST_WAIT_MS
        return wait_ms if due_ms is None else max(0, min(wait_ms, due_ms - now_ms))

    def _wake_polling(self) -> None:
        """End the wait of the polling thread, since the state changed or something is due earlier."""
        self._wake_event.set()
        self._consumer.wake()

    # --- fetching ----------------------------------------------------------------------------------

    def _fetch(self, wait_ms: int) -> bool:
        """Fetch messages for the consume service. Return True if there may be more to fetch at once."""
        self._queues.refresh()
        without = self._service.excluded()
        settings = self.endpoint.settings
        try:
            messages = self._consumer.poll(settings.pull_batch_size, wait_ms, without=without)
        except CorruptRecordError as error:
            self._log.error(
                "listener.record_corrupt", file=str(error.path), offset=error.physical_offset, reason=error.reason
            )
            return True
        if not messages:
            self._queues.commit_positions()
            return False
        self._service.accept(messages)
        if settings.pull_interval:
            self._next_poll_ms = self._clock.now_ms() + settings.pull_interval
        return True

    def _report(self, error: Exception) -> int | None:
        """Report an error of the broker. Return the time of the next fetch; None if the broker was closed."""
        if not isinstance(error, BrokerClosedError):
            self._log.error("listener.poll_failed", exc_info=error, retry_in_ms=_RETRY_POLL_MS)
            self._next_poll_ms = self._clock.now_ms() + _RETRY_POLL_MS
            return self._next_poll_ms
        if self.is_running:
            self.state = ContainerState.BROKEN
            self._log.warning("listener.broker_closed")
        return None
