"""Runs one listener: fetches its messages, has them handled, tells the broker how far it is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import Enum

import structlog

from mqtemplate.broker import Broker, Consumer
from mqtemplate.converter import MessageConverter
from mqtemplate.errors import BrokerClosedError, CorruptRecordError, ListenerError
from mqtemplate.listener.consuming.async_loop import LoopThread, PrivateLoop
from mqtemplate.listener.consuming.concurrently import Concurrently
from mqtemplate.listener.consuming.failure import FailureLog
from mqtemplate.listener.consuming.invocation import Invocation
from mqtemplate.listener.consuming.orderly import Orderly
from mqtemplate.listener.consuming.process_queue import ProcessQueues
from mqtemplate.listener.consuming.replier import Replier
from mqtemplate.listener.consuming.worker_pool import WorkerPool
from mqtemplate.listener.endpoint import Endpoint

_log = structlog.stdlib.get_logger("mqtemplate.listener")

_LONGEST_WAIT_MS = 5_000
_WAIT_WHILE_HANDLING_MS = 500  # finished messages are committed at least so often
_WAIT_WHILE_SUPERVISING_MS = 1
_RETRY_POLL_MS = 1_000
_JOIN_S = 10.0


class ContainerState(Enum):
    CREATED = "created"
    RUNNING = "running"
    PAUSED = "paused"
    STOPPING = "stopping"
    STOPPED = "stopped"
    BROKEN = "broken"  # the broker was closed under it


class ListenerContainer:
    """The life of one listener, and a `Service` for virtual clocks.

    On a real clock one thread fetches and a `WorkerPool` handles. On a virtual clock there are no threads: ``step``
    fetches, handles in the caller's thread and in the order of the queues, and returns when it wants to be called
    again: now if there may be more, the end of a rest, or None.

    ``start`` joins the group and returns; it waits for no message. A container that was stopped may be started anew:
    it goes on where it had committed.

    Args:
        loop: Where ``async def`` handlers run; by default one of the container's own.
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
        self._wake: Callable[[], None] = lambda: None
        self._life = threading.Lock()
        self._wake_event = threading.Event()
        self._thread: threading.Thread | None = None
        self._pool: WorkerPool | None = None
        self._next_poll_ms = 0
        self._consumer: Consumer
        self._queues: ProcessQueues
        self._work: Concurrently | Orderly

    @property
    def is_running(self) -> bool:
        """Whether it is a member of its group; a container that pauses is."""
        return self.state in (ContainerState.RUNNING, ContainerState.PAUSED)

    @property
    def in_flight(self) -> int:
        """Messages that were fetched and are not finished."""
        return self._queues.in_flight if self.is_running else 0

    # --- life --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Join the group and begin. Starting twice is harmless.

        Raises:
            ListenerError: The group has members with another subscription.
            BrokerError: The broker is not there.
        """
        with self._life:
            if self.is_running:
                return
            if self.state is ContainerState.STOPPING:
                raise ListenerError(f"{self.name} is being stopped; start it when stop() has returned")
            settings = self.endpoint.settings
            self._consumer = self._broker.subscribe(settings.consumer_spec(self._clock.now_ms()))
            self._queues = ProcessQueues(self._consumer)
            replier = Replier(self._broker, self._converter, settings.reply_timeout_ms, self.endpoint.id)
            invocation = Invocation(self.endpoint, self._converter, self._loop.run, self._failures, replier.reply)
            kind = Orderly if settings.is_orderly else Concurrently
            self._work = kind(self.endpoint, self._consumer, self._queues, invocation, self._failures, self._clock)
            self._next_poll_ms = 0
            self.state = ContainerState.RUNNING
            if not self._clock.is_virtual:
                self._start_threads()
        self._log.info(
            "listener.started",
            topics=list(settings.topics),
            selector=settings.selector.expression,
            mode=settings.consume_mode.value,
        )

    def _start_threads(self) -> None:
        settings, name = self.endpoint.settings, f"mqtemplate-{self.endpoint.id}"
        self._pool = WorkerPool(name, self._work, settings.thread_number, settings.thread_max)
        self._work.on_late_return = self._pool.found
        self._work.on_later = self._ring
        self._wake_event.clear()
        self._thread = threading.Thread(target=self._poll_loop, args=(self._pool,), name=f"{name}-poll", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Fetch no more, let handlers finish for ``await_termination_millis_when_shutdown``, commit, leave the group.

        What was not finished by then stays uncommitted and comes again. Stopping twice is harmless.
        """
        with self._life:
            if not self.is_running and self.state is not ContainerState.BROKEN:
                return
            self.state = ContainerState.STOPPING
            self._stop_threads()
            unfinished = self._work.abandon()
            try:
                self._commit()
            finally:
                self._consumer.close()
                self.state = ContainerState.STOPPED
                if self._owns_loop:
                    self._loop.stop()
        write = self._log.warning if unfinished else self._log.info
        write("listener.stopped", unfinished=unfinished)

    def _stop_threads(self) -> None:
        self._ring()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)
        if self._pool is not None:
            self._pool.stop(self.endpoint.settings.await_termination_ms / 1_000)
        self._thread = self._pool = None

    def _commit(self) -> None:
        try:
            self._queues.commit()
        except BrokerClosedError:
            self._log.warning("listener.commit_failed", reason="the broker was closed first")

    def pause(self) -> None:
        """Fetch no more until ``resume``; what was fetched is finished, and the queues stay this member's."""
        with self._life:
            if self.state is ContainerState.RUNNING:
                self.state = ContainerState.PAUSED
                self._ring()

    def resume(self) -> None:
        with self._life:
            if self.state is ContainerState.PAUSED:
                self.state = ContainerState.RUNNING
                self._ring()
        self._wake()

    # --- on a virtual clock ------------------------------------------------------------------------

    def on_wake(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def step(self) -> int | None:
        if not self._clock.is_virtual or not self.is_running:
            return None
        try:
            return self._step(self._clock.now_ms())
        except Exception as error:
            self._report(error)
            return None if self._has_ended() else self._next_poll_ms

    def _step(self, now_ms: int) -> int | None:
        self._work.release_due(now_ms)
        self._drain()
        found = False
        if self.state is ContainerState.RUNNING and now_ms >= self._next_poll_ms:
            found = self._fetch(0)
            self._drain()
        if self._has_ended():
            return None
        next_poll_ms = self._next_poll_ms if found or self._next_poll_ms > now_ms else None
        return min((due for due in (next_poll_ms, self._work.next_due()) if due is not None), default=None)

    def _drain(self) -> None:
        while not self._has_ended() and self._work.run_next():
            pass

    def _has_ended(self) -> bool:
        """Whether a handler stopped it, or the broker was closed."""
        return not self.is_running

    # --- on a real clock ---------------------------------------------------------------------------

    def _poll_loop(self, pool: WorkerPool) -> None:
        wait_ms = 0
        while self.is_running:
            try:
                rest_ms = self._next_poll_ms - self._clock.now_ms()
                if self.state is ContainerState.PAUSED or rest_ms > 0:
                    self._wake_event.wait((min(wait_ms, rest_ms) if rest_ms > 0 else wait_ms) / 1_000)
                    self._wake_event.clear()
                elif self._fetch(wait_ms):
                    pool.wake()
                self._work.check_overdue(pool.replace)
                wait_ms = self._next_wait_ms(pool)
            except Exception as error:
                self._report(error)
                wait_ms = _RETRY_POLL_MS

    def _next_wait_ms(self, pool: WorkerPool) -> int:
        """How long the next fetch may wait before there is something else to do."""
        now_ms = self._clock.now_ms()
        due_ms = self._work.next_due()
        if due_ms is not None and due_ms <= now_ms:
            self._work.release_due(now_ms)
            pool.wake()
            due_ms = self._work.next_due()
        if pool.supervise():
            return _WAIT_WHILE_SUPERVISING_MS
        wait_ms = _WAIT_WHILE_HANDLING_MS if self._queues.in_flight else _LONGEST_WAIT_MS
        return wait_ms if due_ms is None else max(0, min(wait_ms, due_ms - now_ms))

    def _ring(self) -> None:
        """End whatever the fetching thread waits for: something falls due earlier than it knows."""
        self._wake_event.set()
        self._consumer.wake()

    # --- fetching ----------------------------------------------------------------------------------

    def _fetch(self, wait_ms: int) -> bool:
        """Fetch messages and put them in line; returns whether to fetch again at once, as there may be more."""
        self._queues.refresh()
        without = self._work.excluded()
        try:
            messages = self._consumer.poll(self.endpoint.settings.pull_batch_size, wait_ms, without=without)
        except CorruptRecordError as error:
            self._log.error(
                "listener.record_corrupt", file=str(error.path), offset=error.physical_offset, reason=error.reason
            )
            return True
        if not messages:
            self._queues.commit_positions()
            return False
        self._work.accept(messages)
        if self.endpoint.settings.pull_interval_ms:
            self._next_poll_ms = self._clock.now_ms() + self.endpoint.settings.pull_interval_ms
        return True

    def _report(self, error: Exception) -> None:
        """The broker could not be talked to: it is tried again in a second, unless it was closed for good."""
        if not isinstance(error, BrokerClosedError):
            self._log.error("listener.poll_failed", exc_info=error, retry_in_ms=_RETRY_POLL_MS)
            self._next_poll_ms = self._clock.now_ms() + _RETRY_POLL_MS
        elif self.is_running:
            self.state = ContainerState.BROKEN
            self._log.warning("listener.broker_closed")
