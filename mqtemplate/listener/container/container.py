"""Listener container: it fetches the messages of one listener, has them handled, and commits offsets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from enum import Enum
from typing import Any

from mqtemplate.broker import Broker, ConsumeFromWhere, Consumer
from mqtemplate.clock import VirtualClock
from mqtemplate.converter import MessageConverter
from mqtemplate.durations import Duration
from mqtemplate.errors import BrokerClosedError, BrokerError, CorruptRecordError, ForkedError, ListenerError
from mqtemplate.event_log import get_logger
from mqtemplate.listener.container.concurrent import ConcurrentConsumeService
from mqtemplate.listener.container.consume_service import ConsumeContext, ConsumeService, Handling
from mqtemplate.listener.container.loops import HandlerLoop, choose_loop
from mqtemplate.listener.container.orderly import OrderlyConsumeService
from mqtemplate.listener.container.positions import PollingRequests, Repositioning, epoch_ms, span_ms
from mqtemplate.listener.container.process_queue import ProcessQueues
from mqtemplate.listener.container.virtual import VirtualThreads
from mqtemplate.listener.container.workers import AsyncConsumePool, ConsumeThreadPool, StartTask
from mqtemplate.listener.declaration.resolution import matching
from mqtemplate.listener.failures.failure import is_kind, raise_if_not_of_handler
from mqtemplate.listener.failures.failure_log import FailureLog
from mqtemplate.listener.failures.policy import FailurePolicy
from mqtemplate.listener.handler.invoke import Invocation, uses_loop
from mqtemplate.listener.handler.plan import Endpoint
from mqtemplate.listener.handler.wrappers import ObservedHandling, Observer, TracedHandling
from mqtemplate.message import MessageExt, MessageQueue
from mqtemplate.message_trace.dispatcher import TraceDispatcher
from mqtemplate.observation.interface import Observation
from mqtemplate.services import wall_time
from mqtemplate.user_code import safe_text

_log = get_logger("mqtemplate.listener")


_LONGEST_WAIT_MS = 5_000


_WAIT_WHILE_HANDLING_MS = 500  # finished messages are committed at least this often


_WAIT_WHILE_SUPERVISING_MS = 1


_RETRY_POLL_MS = 1_000


_JOIN_S = 10.0


class ListenerContainer:
    """Container of one listener, and a `Service` for virtual clocks.

    On a real clock one thread fetches and a `ConsumeThreadPool` handles. On a virtual clock there are no threads:
    ``step`` fetches, and handles in the calling thread in the order of the queues.

    ``start`` joins the group and does not wait for messages. A stopped container may be started again; it continues
    after the last commit.

    Args:
        loop: Loop for ``async def`` handlers; by default one of the container's own.
        trace: Writes the calls into RocketMQ's message trace; None for no trace.
        observation: Measures or traces the calls of the handler; None: nothing does.

    Attributes:
        on_broken: Called when the state has become ``BROKEN``.
    """

    def __init__(
        self,
        broker: Broker,
        endpoint: Endpoint,
        converter: MessageConverter,
        *,
        loop: HandlerLoop | None = None,
        trace: TraceDispatcher | None = None,
        observation: Observation | None = None,
    ) -> None:
        self.name = f"listener {endpoint.id}"
        self.endpoint = endpoint
        self.state = ContainerState.CREATED
        self._broker = broker
        self._clock = broker.clock
        self._converter = converter
        self._trace = trace
        self._named_topics = endpoint.settings.topics
        self._observation = observation
        self.on_broken: Callable[[], object] = lambda: None
        self._owns_loop = loop is None
        self._loop = loop or choose_loop(broker.clock)
        self._uses_loop = uses_loop(endpoint)
        self._failures = FailureLog(endpoint.id, endpoint.settings.group, broker.clock)
        self._log = _log.bind(listener=endpoint.id, group=endpoint.settings.group)
        self._observers: list[Observer] = []
        self._wake: Callable[[], None] = lambda: None
        self._state_lock = threading.Lock()
        self._wake_event = threading.Event()
        self._thread: threading.Thread | None = None
        self._pool: ConsumeThreadPool | AsyncConsumePool | None = None
        self._virtual_threads: VirtualThreads | None = None
        self._next_poll_ms = 0
        self._resume_ms: int | None = None  # end of a pause that a middleware or handler requested
        self._drained_until = 0.0  # on the monotonic clock
        # The container has these from `start` on; each start creates new ones.
        self._consumer: Consumer
        self._invocation: Invocation
        self._task_of: StartTask
        self._queues: ProcessQueues
        self._policy: FailurePolicy
        self._repositioning: Repositioning
        self._requests: PollingRequests
        self._service: ConsumeService[Any, Any]

    @property
    def converter(self) -> MessageConverter:
        """The converter of the listener's bodies and replies."""
        return self._converter

    @property
    def broker(self) -> Broker:
        """The broker from which the listener reads."""
        return self._broker

    @property
    def is_running(self) -> bool:
        """True if the container is a member of its group; a paused one is."""
        return self.state in (ContainerState.RUNNING, ContainerState.PAUSED)

    @property
    def concurrency(self) -> int:
        """Maximum number of handlers that run at the same time, without replacements of hanging ones."""
        return self.endpoint.settings.thread_number

    @property
    def in_flight(self) -> int:
        """Number of messages that were fetched and are not finished; 0 before the first start."""
        return self._queues.in_flight if self.state is not ContainerState.CREATED else 0

    @property
    def hanging_count(self) -> int:
        """Number of calls of the handler that run longer than ``consume_timeout``."""
        return self._service.hanging_count if self.is_running else 0

    @property
    def outcomes(self) -> Mapping[str, int]:
        """Next step (`NextStep.value`) -> number of failed messages for which it was decided."""
        return self._failures.outcomes

    def positions(self) -> dict[MessageQueue, int | None]:
        """Return the committed offset of each queue that is assigned to this member; None if there is none."""
        return (
            {queue: self._consumer.committed(queue) for queue in self._consumer.assignment()} if self.is_running else {}
        )

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
            if self.endpoint.settings.topic_patterns:
                self._find_topics()
            settings = self.endpoint.settings
            self._consumer = self._broker.subscribe(settings.consumer_spec(self._clock.now_ms()))
            self._queues = ProcessQueues(self._consumer)
            self._policy = FailurePolicy(settings, self._broker)
            self._service = self._make_service()
            self._repositioning = Repositioning(
                self._broker, self._consumer, self._queues, self._service.discard_dropped
            )
            self._requests = PollingRequests(self.name)
            self._next_poll_ms, self._resume_ms = 0, None
            self.state = ContainerState.RUNNING
            if self._uses_loop:
                self._loop.serve()
            if not self._clock.is_virtual:
                self._start_threads()
            elif self._uses_loop and isinstance(self._clock, VirtualClock):
                run_next, number = self._service.run_next, settings.thread_number
                self._virtual_threads = VirtualThreads(run_next, number, self._clock, self._freed, self._report)
        self._log.debug(
            "listener.started",
            topics=list(settings.topics),
            selector=settings.selector.expression,
            mode=settings.consume_mode.value,
            retry=self._policy.describe(),
        )
        if (replaced := self._policy.replaced_delays()) is not None:
            self._log.info(
                "listener.retries_by_level",
                retry=str(settings.retry),
                used=replaced,
                reason="the broker has no exact retry delays; each retry has the nearest level that is not shorter",
            )

    def _make_service(self) -> ConsumeService[Any, Any]:
        endpoint, settings = self.endpoint, self.endpoint.settings
        context = ConsumeContext(
            settings=settings,
            take_size=endpoint.take_size,
            is_batch=endpoint.plan.is_batch,
            consumer=self._consumer,
            queues=self._queues,
            handling=self._make_handling(),
            failures=self._failures,
            decide=self._policy.decide,
            clock=self._clock,
            on_earlier_due=self._wake_polling,
            on_pause=self._pause_until,
        )
        return OrderlyConsumeService(context) if settings.is_orderly else ConcurrentConsumeService(context)

    def _make_handling(self) -> Handling:
        self._invocation = invocation = Invocation(
            self.endpoint,
            self._broker,
            self._converter,
            self._loop.run,
            self._failures,
            self._end_requested_pause,
            self._observation,
        )
        handling: Invocation | TracedHandling = invocation
        if self._trace is not None:
            handling = TracedHandling(invocation, self._trace, self.endpoint.settings.group, self._clock.now_ms)
        self._task_of = handling.task_of
        # A virtual clock is that of a test. On a real clock an observer would cost time for each message.
        return ObservedHandling(handling, self._observers) if self._clock.is_virtual else handling

    def around(self, middlewares: Iterable[object], call: Callable[[MessageExt], Any]) -> Callable[[MessageExt], Any]:
        """Return a function of a message with middlewares around it, for a handler that calls them itself."""
        return self._invocation.around(middlewares, call)

    def observe(self, observer: Observer) -> None:
        """Report each call of the handler to a function, on a virtual clock only."""
        self._observers.append(observer)

    def _start_threads(self) -> None:
        settings, plan, name = self.endpoint.settings, self.endpoint.plan, f"mqtemplate-{self.endpoint.id}"
        number, maximum = settings.thread_number, settings.consume_thread_max
        if plan.is_async and not plan.is_batch and isinstance(self._service, ConcurrentConsumeService):
            self._pool = AsyncConsumePool(name, self._service, self._task_of, self._loop, number, maximum)
        else:
            self._pool = ConsumeThreadPool(name, self._service, number, maximum)
        self._wake_event.clear()
        self._thread = threading.Thread(target=self._poll_loop, args=(self._pool,), name=f"{name}-poll", daemon=True)
        self._thread.start()

    def stop_fetching(self) -> None:
        """Fetch no more. `stop` then waits for the handlers; their time starts now."""
        with self._state_lock:
            if self.is_running or self.state is ContainerState.BROKEN:
                self.state = ContainerState.STOPPING
                wait_ms = self.endpoint.settings.await_termination_millis_when_shutdown
                self._drained_until = time.monotonic() + wait_ms / 1_000
                self._wake_polling()

    def stop(self) -> None:
        """Stop fetching, wait for running handlers, commit, and leave the group. Stopping twice is harmless.

        The wait ends after ``await_termination_millis_when_shutdown``. Messages that are unfinished then stay
        uncommitted and are redelivered.
        """
        self.stop_fetching()
        with self._state_lock:
            if self.state is not ContainerState.STOPPING:
                return
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
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)
        # On the loop of the handlers a wait for them would never end.
        is_abandoned = self._uses_loop and self._loop.is_current()
        if self._pool is not None:
            self._pool.stop(0.0 if is_abandoned else max(0.0, self._drained_until - time.monotonic()))
        if self._virtual_threads is not None:
            wait_ms = self.endpoint.settings.await_termination_millis_when_shutdown
            self._virtual_threads.finish(0 if is_abandoned else wait_ms)
        self._thread = self._pool = self._virtual_threads = None

    def _commit(self) -> None:
        try:
            self._queues.commit()
        except (BrokerClosedError, ForkedError):
            self._log.warning("listener.commit_failed", reason="the broker was closed first")

    def pause(self) -> None:
        """Call no handler and fetch nothing until ``resume``.

        When this returns, handlers finish the messages that they have, and no further one starts. Fetched messages
        are kept, and the queues stay assigned.
        """
        with self._state_lock:
            if self.state is ContainerState.RUNNING:
                self._service.is_paused = True
                self.state = ContainerState.PAUSED
                self._wake_polling()
            self._resume_ms = None

    def resume(self) -> None:
        """Handle messages and fetch again after ``pause``, or after a pause that a middleware or handler requested."""
        with self._state_lock:
            self._resume_ms = None
            if self.is_running:
                self.state = ContainerState.RUNNING
                self._service.is_paused = False
                if self._pool is not None:
                    self._pool.wake()
                self._wake_polling()
        self._wake()

    def set_concurrency(self, number: int) -> None:
        """Change how many handlers may run at the same time, from any thread and in any state.

        When this returns, handlers that run finish, and no further one starts until fewer than *number* run. A restart
        of the container keeps the number.

        Raises:
            ListenerError: It is not 1 to ``consume_thread_max``.
        """
        with self._state_lock:
            self.endpoint = replace(self.endpoint, settings=self.endpoint.settings.with_thread_number(number))
            if self._pool is not None:
                self._pool.resize(number, self.endpoint.settings.consume_thread_max)
                self._wake_polling()
            if self._virtual_threads is not None:
                self._virtual_threads.resize(number)
        self._wake()

    def _pause_until(self, due_ms: int, reason: str) -> None:
        """Pause until a time, since a middleware or handler requested it. A later request has priority.

        The consume threads call it, so it does not wait for the lock of the state: `stop` waits for them under it.
        """
        self._service.is_paused = True
        if self.state is ContainerState.RUNNING:
            is_new = self._resume_ms is None
            self._resume_ms = due_ms
            if is_new:
                self._log.info("listener.paused", until_ms=wall_time(self._clock, due_ms), reason=reason)
            self._wake_polling()

    def _end_requested_pause(self) -> None:
        """End a pause that a middleware or handler requested; one of ``pause`` goes on."""
        if self._resume_ms is not None:
            self._resume_ms = self._clock.steady_ms()
            self._wake_polling()
            self._wake()

    def _resume_due(self, now_ms: int) -> None:
        """End a requested pause whose time has come. The polling thread calls it."""
        due_ms = self._resume_ms
        # Without waiting for the lock: `stop` waits for this thread under it. The next round tries again.
        if due_ms is None or due_ms > now_ms or not self._state_lock.acquire(blocking=False):
            return
        try:
            if self._resume_ms != due_ms or self.state is not ContainerState.RUNNING:
                return
            self._resume_ms = None
            self._service.is_paused = False
        finally:
            self._state_lock.release()
        if self._pool is not None:
            self._pool.wake()

    # --- topics ------------------------------------------------------------------------------------

    def _find_topics(self) -> bool:
        """Add the topics that match the patterns of the listener. Return True if they differ from those before."""
        settings = self.endpoint.settings
        found = matching(settings.topic_patterns, self._broker.topic_names())
        topics = tuple(dict.fromkeys((*self._named_topics, *found)))
        if is_changed := topics != settings.topics:
            self.endpoint = replace(self.endpoint, settings=replace(settings, topics=topics))
        return is_changed

    def follow_topics(self) -> None:
        """Join the group again if there are new topics that match the patterns of the listener.

        A new topic is read from its start: its messages were sent after the listener had started. A listener that is
        paused joins after the pause.
        """
        if self._service.is_paused:
            return
        before = list(self.endpoint.settings.topics)
        if not self._find_topics():
            return
        self._log.info("listener.topics_changed", before=before, topics=list(self.endpoint.settings.topics))
        self.stop()
        settings = replace(self.endpoint.settings, consume_from_where=ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET)
        self.endpoint = replace(self.endpoint, settings=settings)
        self.start()

    # --- positions ---------------------------------------------------------------------------------

    def seek(self, queue: MessageQueue, queue_offset: int) -> None:
        """Continue a queue at another offset: an earlier one to handle messages again, a later one to skip some.

        It works on a running or paused listener, from any thread. Messages that were fetched and that no handler has
        are dropped; a handler that runs finishes. The new offset is committed. An offset that does not exist becomes
        the nearest that does.

        Raises:
            ListenerError: The listener is not running, or the queue is assigned to another member.
        """
        self._reposition(lambda: self._repositioning.to_offsets({queue: queue_offset}))

    def rewind(self, span: Duration | None = None) -> None:
        """Handle the messages of the last *span* again, such as ``"1h"``; None: all that the broker has.

        It moves the queues that are assigned to this member, as `seek` does.

        Raises:
            ListenerError: The listener is not running.
            ValueError: *span* is no span of time.
        """
        time_ms = 0 if span is None else max(0, self._clock.now_ms() - span_ms(span))
        self._reposition(lambda: self._repositioning.to_time(time_ms))

    def reset_to_time(self, time: datetime | int) -> None:
        """Continue with the first messages that were stored at a time or later; now skips all earlier ones.

        It moves the queues that are assigned to this member, as `seek` does.

        Args:
            time: An aware datetime, or epoch milliseconds.

        Raises:
            ListenerError: The listener is not running, or *time* has no time zone or is epoch seconds.
        """
        time_ms = epoch_ms(time)
        self._reposition(lambda: self._repositioning.to_time(time_ms))

    def skip_to_latest(self) -> None:
        """Continue after the last message of each queue that is assigned to this member: skip what is not handled.

        Raises:
            ListenerError: The listener is not running.
        """
        self._reposition(self._repositioning.to_latest)

    def _reposition(self, action: Callable[[], None]) -> None:
        if not self.is_running:
            raise ListenerError(f"{self.name} is not running; start it first")
        if self._clock.is_virtual:
            action()
            self._wake()
        else:
            self._requests.submit(action, self._wake_polling)

    # --- on a virtual clock ------------------------------------------------------------------------

    def on_wake(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def step(self) -> int | None:
        """Fetch and handle what is due. Return now if there may be more, the next due time, or None."""
        if not self._clock.is_virtual or not self.is_running:
            return None
        try:
            return wall_time(self._clock, self._step(self._clock.steady_ms()))
        except BaseException as error:
            raise_if_not_of_handler(error)
            return wall_time(self._clock, self._report(error))

    def _step(self, now_ms: int) -> int | None:
        self._resume_due(now_ms)
        self._service.release_due(now_ms)
        self._handle_ready()
        found = self._may_fetch and now_ms >= self._next_poll_ms and self._fetch(0)
        self._handle_ready()
        if not self.is_running:
            return None
        next_poll_ms = self._next_poll_ms if found or self._next_poll_ms > now_ms else None
        dues_ms = (next_poll_ms, self._service.next_due(), self._resume_ms)
        return min((due for due in dues_ms if due is not None), default=None)

    def _freed(self) -> None:
        self._wake()  # a handler that awaited something has ended

    def _handle_ready(self) -> None:
        # A handler may stop its own container, and the broker may be closed under it.
        threads = self._virtual_threads
        run_next = self._service.run_next if threads is None else threads.run_next
        while self.is_running and run_next():
            pass

    @property
    def _may_fetch(self) -> bool:
        return self.state is ContainerState.RUNNING and self._resume_ms is None

    # --- on a real clock ---------------------------------------------------------------------------

    def _poll_loop(self, pool: ConsumeThreadPool | AsyncConsumePool) -> None:
        wait_ms = 0
        try:
            while self.is_running:
                try:
                    wait_ms = self._poll(pool, wait_ms)
                except BaseException as error:  # whatever its class: in this thread none is meant for the process
                    self._report(error)
                    wait_ms = _RETRY_POLL_MS
        finally:
            self._requests.close()
            self._break("listener.polling_ended")

    def _poll(self, pool: ConsumeThreadPool | AsyncConsumePool, wait_ms: int) -> int:
        """Fetch once, waiting for messages at most *wait_ms*. Return how long the next fetch may wait."""
        self._requests.run()
        now_ms = self._clock.steady_ms()
        self._resume_due(now_ms)
        rest_ms = self._next_poll_ms - now_ms if self._resume_ms is None else max(self._resume_ms - now_ms, 1)
        if not self._may_fetch or rest_ms > 0:
            self._wake_event.wait((min(wait_ms, rest_ms) if rest_ms > 0 else wait_ms) / 1_000)
            self._wake_event.clear()
        elif self._fetch(wait_ms):
            pool.wake()
        self._service.check_hanging(pool.replace)
        return self._next_wait_ms(pool)

    def _next_wait_ms(self, pool: ConsumeThreadPool | AsyncConsumePool) -> int:
        now_ms = self._clock.steady_ms()
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
        if resets := self._consumer.take_resets():
            self._repositioning.by_administrator(resets)
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
            self._queues.commit_positions(without)
            return False
        self._service.accept(messages)
        if settings.pull_interval:
            self._next_poll_ms = self._clock.steady_ms() + settings.pull_interval
        return True

    def _report(self, error: BaseException) -> int | None:
        """Report an error of the broker. Return the time of the next fetch; None if the broker was closed."""
        if not is_kind(error, (BrokerClosedError, ForkedError)):
            if is_kind(error, BrokerError):
                self._log.warning("listener.poll_failed", reason=safe_text(error), retry_in_ms=_RETRY_POLL_MS)
            else:
                self._log.error("listener.poll_failed", exc_info=error, retry_in_ms=_RETRY_POLL_MS)
            self._next_poll_ms = self._clock.steady_ms() + _RETRY_POLL_MS
            return self._next_poll_ms
        self._break("listener.broker_closed")
        return None

    def _break(self, event: str) -> None:
        """Show in the state, and so in the health of the application, that a running container can handle nothing."""
        if self.is_running:
            self.state = ContainerState.BROKEN
            self._log.warning(event)
            self.on_broken()


class ContainerState(Enum):
    """State of a listener container."""

    CREATED = "created"
    RUNNING = "running"
    PAUSED = "paused"
    STOPPING = "stopping"
    STOPPED = "stopped"
    BROKEN = "broken"  # the broker was closed before the container, or its polling thread has ended
