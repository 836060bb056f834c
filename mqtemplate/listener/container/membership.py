"""Membership: what one start of a listener container creates, from joining the group until leaving it."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from enum import Enum
from logging import ERROR
from typing import TYPE_CHECKING, Any

from mqtemplate.broker import Broker
from mqtemplate.clock import VirtualClock
from mqtemplate.errors import BrokerClosedError, BrokerError, ForkedError, ListenerError
from mqtemplate.event_log import LimitedLog, get_logger
from mqtemplate.listener.container.consume_service import ConcurrentConsumeService, ConsumeService, ConsumeThreadPool
from mqtemplate.listener.container.loops import AsyncConsumePool, ConsumePool, HandlerLoop
from mqtemplate.listener.container.process_queue import Repositioning
from mqtemplate.listener.failures.failure import is_kind, raise_if_not_of_handler
from mqtemplate.listener.failures.failure_log import FailureLog
from mqtemplate.listener.failures.policy import FailurePolicy
from mqtemplate.listener.handler.invoke import HandlerInvocation
from mqtemplate.listener.handler.plan import Endpoint
from mqtemplate.message import MessageQueue
from mqtemplate.services import wall_time
from mqtemplate.user_code import safe_text

if TYPE_CHECKING:
    from mqtemplate.listener.container.virtual import VirtualThreads

_log = get_logger("mqtemplate.listener")

_LONGEST_WAIT_MS = 5_000
_WAIT_WHILE_HANDLING_MS = 500  # finished messages are committed at least this often
_WAIT_WHILE_SUPERVISING_MS = 1
_RETRY_POLL_MS = 1_000
_JOIN_S = 10.0
_FIRST_REPORT_S = 1.0
_REPORT_INTERVAL_S = 5.0


class ContainerState(Enum):
    """State of a listener container."""

    CREATED = "created"
    RUNNING = "running"
    PAUSED = "paused"
    STOPPING = "stopping"
    STOPPED = "stopped"
    BROKEN = "broken"  # the broker was closed before the container, or its polling thread has ended


class PollingRequests:
    """Queue of actions. `submit` waits until the polling thread has run the action."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._pending: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._is_closed = False

    def submit(self, action: Callable[[], None], wake: Callable[[], None]) -> None:
        """Run an action in the polling thread and wait for its end.

        Args:
            wake: Function that ends the wait of the polling thread.

        Raises:
            ListenerError: The polling thread has ended.
            Exception: The error of the action.
        """
        done: Future[None] = Future()
        with self._lock:
            if self._is_closed:
                raise self._stopped()
            self._pending.append((action, done))
        wake()
        done.result()

    def run(self) -> None:
        """Run the actions that are pending. The polling thread calls it."""
        while self._pending:
            action, done = self._pending.popleft()
            try:
                action()
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)

    def close(self) -> None:
        """Refuse the pending actions and all later ones. The polling thread calls it at its end."""
        with self._lock:
            self._is_closed = True
            pending, self._pending = self._pending, deque()
        for _, done in pending:
            done.set_exception(self._stopped())

    def _stopped(self) -> ListenerError:
        return ListenerError(f"{self._name} is not running; start it first")


class Membership(ABC):
    """One member of a consumer group, and all that fetches, handles and commits for it.

    On a real clock one thread fetches, and a pool of workers handles. On a virtual clock there are no such threads:
    `step` fetches and handles.

    Args:
        loop: Loop of ``async def`` handlers; None if nothing of the listener is ``async``.
        lock: Lock of the state, which the container has while it starts, pauses, resumes and stops.
        wake: Wakes the harness of a virtual clock.
        on_broken: Called when the state has become ``BROKEN``.

    Attributes:
        service: Handles the messages that are fetched.
        wake_fetch: Lets a fetch that waits in another thread return now.

    Raises:
        ListenerError: The group has members with another subscription.
        BrokerError: The broker cannot be reached.
    """

    service: ConsumeService[Any, Any]
    wake_fetch: Callable[[], None]

    def __init__(
        self,
        endpoint: Endpoint,
        broker: Broker,
        invocation: HandlerInvocation,
        failures: FailureLog,
        *,
        loop: HandlerLoop | None,
        lock: threading.Lock,
        wake: Callable[[], None],
        on_broken: Callable[[], object],
    ) -> None:
        settings = endpoint.settings
        self.endpoint = endpoint
        self.invocation = invocation
        self.state = ContainerState.RUNNING
        self._clock = broker.clock
        self._loop = loop
        self._lock = lock
        self._wake = wake
        self._on_broken = on_broken
        self._log = _log.bind(listener=endpoint.id, group=settings.group)
        self._poll_log = LimitedLog(self._log, broker.clock.steady_ms, burst=1)  # each second, until the cause is gone
        self._wake_event = threading.Event()
        self._next_poll_ms = 0
        self._resume_ms: int | None = None  # end of a pause that a middleware or handler requested
        self._drained_until = 0.0  # on the monotonic clock
        self.policy = FailurePolicy(settings, broker)
        self._failures = failures
        self._requests = PollingRequests(f"listener {endpoint.id}")
        self._thread: threading.Thread | None = None
        self._pool: ConsumePool | None = None
        self._virtual_threads: VirtualThreads | None = None
        self.service = self._join(broker)

    # --- by the kind of membership ------------------------------------------------------------------

    @abstractmethod
    def _join(self, broker: Broker) -> ConsumeService[Any, Any]:
        """Join the group. Return the service that handles what is fetched."""

    @property
    @abstractmethod
    def in_flight(self) -> int:
        """Number of messages that were fetched and are not finished."""

    @property
    def renewals(self) -> tuple[int, int]:
        """Numbers of renewed invisible times, and of those that were over too early; none without POP."""
        return 0, 0

    @abstractmethod
    def positions(self) -> dict[MessageQueue, int | None]:
        """Return the committed offset of each queue that is assigned to this member; None before the first commit."""

    @abstractmethod
    def reposition(self, move: Callable[[Repositioning], None]) -> None:
        """Let queues continue at other offsets.

        Raises:
            ListenerError: This kind of membership has no read positions, or it has ended.
        """

    @abstractmethod
    def _fetch(self, wait_ms: int) -> bool:
        """Fetch messages for the consume service. Return True if there may be more to fetch at once."""

    def _follow_assignment(self) -> None:  # noqa: B027  a member that receives by POP has no queues of its own
        """Give up the queues that other members have by now, while no message is fetched."""

    def _give_back(self) -> None:  # noqa: B027  a pulling member keeps them
        """Let other members have the fetched messages that no handler has, while this one handles nothing."""

    def wait_until_settled(self) -> None:  # noqa: B027  a pulling member commits
        """Wait until the broker knows of the messages that handlers have finished, as long as a stop would wait."""

    @abstractmethod
    def _leave(self) -> None:
        """Store the progress, and leave the group."""

    def _service_arguments(self) -> dict[str, Any]:
        return {
            "endpoint": self.endpoint,
            "invocation": self.invocation,
            "policy": self.policy,
            "failures": self._failures,
            "clock": self._clock,
            "on_earlier_due": self.wake_polling,
            "on_pause": self._pause_until,
        }

    @property
    def is_running(self) -> bool:
        """True if messages are fetched, or will be after a pause."""
        return self.state in (ContainerState.RUNNING, ContainerState.PAUSED)

    # --- start and stop ----------------------------------------------------------------------------

    def start(self) -> None:
        """Start the threads. On a virtual clock only handlers that await something have threads."""
        settings, plan, name = self.endpoint.settings, self.endpoint.plan, f"mqtemplate-{self.endpoint.id}"
        number, maximum = settings.thread_number, settings.consume_thread_max
        if self._loop is not None:
            self._loop.serve()
        if isinstance(self._clock, VirtualClock):
            if self._loop is not None:
                from mqtemplate.listener.container.virtual import VirtualThreads  # only tests need it

                run_next = self.service.run_next
                self._virtual_threads = VirtualThreads(run_next, number, self._clock, self._wake, self._report)
            return
        if (
            self._loop is not None
            and plan.is_async
            and not plan.is_batch
            and isinstance(self.service, ConcurrentConsumeService)
        ):
            self._pool = AsyncConsumePool(name, self.service, self.invocation.task_of, self._loop, number, maximum)
        else:
            self._pool = ConsumeThreadPool(name, self.service, number, maximum)
        self._thread = threading.Thread(target=self._poll_loop, args=(self._pool,), name=f"{name}-poll", daemon=True)
        self._thread.start()

    def stop_fetching(self) -> None:
        """Fetch no more, and start no handler. The time that `stop` waits for the running ones starts now."""
        if self.is_running or self.state is ContainerState.BROKEN:
            self.state = ContainerState.STOPPING
            # Fetched messages stay uncommitted: with slow handlers they would take the time of the running ones.
            self.service.is_paused = True
            wait_ms = self.endpoint.settings.await_termination_millis_when_shutdown
            self._drained_until = time.monotonic() + wait_ms / 1_000
            self.wake_polling()

    def stop(self) -> int:
        """Wait for running handlers, commit, and leave the group. Return how many messages handlers still have."""
        self._stop_threads()
        self._give_back()
        unfinished = self.service.abandon()
        try:
            self._leave()
        finally:
            self.state = ContainerState.STOPPED
        return unfinished

    def _stop_threads(self) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)
        # On the loop of the handlers a wait for them would never end.
        is_abandoned = self._loop is not None and self._loop.is_current()
        if self._pool is not None:
            self._wait_for_handlers(self._pool, time.monotonic() if is_abandoned else self._drained_until)
        if self._virtual_threads is not None:
            wait_ms = self.endpoint.settings.await_termination_millis_when_shutdown
            self._virtual_threads.finish(0 if is_abandoned else wait_ms)
        self._thread = self._pool = self._virtual_threads = None

    def _wait_for_handlers(self, pool: ConsumePool, deadline: float) -> None:
        """Wait until no handler runs, and say from time to time how many do. Then those that still run are abandoned.

        Args:
            deadline: On the monotonic clock.
        """
        interval_s = _FIRST_REPORT_S
        while running := pool.finish(max(0.0, min(interval_s, deadline - time.monotonic()))):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            self._log.info("listener.waiting", running_handlers=running, at_most_s=round(left_s, 1))
            interval_s = _REPORT_INTERVAL_S
        pool.abandon()

    # --- pauses and concurrency ---------------------------------------------------------------------

    def pause(self) -> None:
        """Call no handler and fetch nothing until `resume`."""
        if self.state is ContainerState.RUNNING:
            self.service.is_paused = True
            self.state = ContainerState.PAUSED
            self.wake_polling()
        self._resume_ms = None

    def resume(self) -> None:
        """End each pause."""
        self._resume_ms = None
        if self.is_running:
            self.state = ContainerState.RUNNING
            self.service.resume()
            if self._pool is not None:
                self._pool.wake()
            self.wake_polling()

    def resize(self, number: int, maximum: int) -> None:
        """Change how many handlers may run at the same time."""
        if self._pool is not None:
            self._pool.resize(number, maximum)
            self.wake_polling()
        if self._virtual_threads is not None:
            self._virtual_threads.resize(number)

    def _pause_until(self, due_ms: int, reason: str) -> None:
        """Pause until a time, since a middleware or handler requested it. A later request has priority.

        The consume threads call it, so it does not wait for the lock of the state: a stop waits for them under it.
        """
        self.service.is_paused = True
        if self.state is ContainerState.RUNNING:
            is_new = self._resume_ms is None
            self._resume_ms = due_ms
            if is_new:
                self._log.info("listener.paused", until_ms=wall_time(self._clock, due_ms), reason=reason)
            self.wake_polling()

    def end_requested_pause(self) -> None:
        """End a pause that a middleware or handler requested; one of `pause` goes on."""
        if self._resume_ms is not None:
            self._resume_ms = self._clock.steady_ms()
            self.wake_polling()
            self._wake()

    def _resume_due(self, now_ms: int) -> None:
        """End a requested pause whose time has come. The polling thread calls it."""
        due_ms = self._resume_ms
        # Without waiting for the lock: a stop waits for this thread under it. The next round tries again.
        if due_ms is None or due_ms > now_ms or not self._lock.acquire(blocking=False):
            return
        try:
            if self._resume_ms != due_ms:
                return
            self._resume_ms = None
            if self.state is not ContainerState.RUNNING:
                return  # `pause` was called at the moment of the request: that pause goes on
            self.service.resume()
        finally:
            self._lock.release()
        self.wake_fetch()
        if self._pool is not None:
            self._pool.wake()

    def _give_back_if_paused(self) -> None:
        if self.state is ContainerState.PAUSED:  # perhaps for long; a requested pause keeps its messages
            self._give_back()

    @property
    def _may_fetch(self) -> bool:
        return self.state is ContainerState.RUNNING and self._resume_ms is None

    # --- on a virtual clock ------------------------------------------------------------------------

    def step(self) -> int | None:
        """Fetch and handle what is due. Return now if there may be more, the next due time, or None."""
        try:
            return wall_time(self._clock, self._step(self._clock.steady_ms()))
        except BaseException as error:
            raise_if_not_of_handler(error)
            return wall_time(self._clock, self._report(error))

    def _step(self, now_ms: int) -> int | None:
        self._resume_due(now_ms)
        self._give_back_if_paused()
        self.service.release_due(now_ms)
        self._handle_ready()
        if self.is_running and not self._may_fetch:
            self._follow_assignment()
        found = self._may_fetch and now_ms >= self._next_poll_ms and self._fetch(0)
        self._handle_ready()
        if not self.is_running:
            return None
        next_poll_ms = self._next_poll_ms if found or self._next_poll_ms > now_ms else None
        dues_ms = (next_poll_ms, self.service.next_due(), self._resume_ms)
        return min((due for due in dues_ms if due is not None), default=None)

    def _handle_ready(self) -> None:
        # A handler may stop its own container, and the broker may be closed under it.
        threads = self._virtual_threads
        run_next = self.service.run_next if threads is None else threads.run_next
        while self.is_running and run_next():
            pass

    # --- on a real clock ---------------------------------------------------------------------------

    def run_when_polling(self, action: Callable[[], None]) -> None:
        """Run an action between two fetches, and wait for its end.

        Raises:
            ListenerError: The polling thread has ended.
        """
        if self._clock.is_virtual:
            action()
            self._wake()
        else:
            self._requests.submit(action, self.wake_polling)

    def _poll_loop(self, pool: ConsumePool) -> None:
        wait_ms = 0
        try:
            while self.is_running:
                try:
                    wait_ms = self._poll(pool, wait_ms)
                except BaseException as error:  # whatever its class: in this thread none is meant for the process
                    self._report(error)
                    wait_ms = _RETRY_POLL_MS
            self._give_back()
        finally:
            self._requests.close()
            self._break("listener.polling_ended")

    def _poll(self, pool: ConsumePool, wait_ms: int) -> int:
        """Fetch once, waiting for messages at most *wait_ms*. Return how long the next fetch may wait."""
        self._requests.run()
        now_ms = self._clock.steady_ms()
        self._resume_due(now_ms)
        self._give_back_if_paused()
        rest_ms = self._next_poll_ms - now_ms if self._resume_ms is None else max(self._resume_ms - now_ms, 1)
        if not self._may_fetch or rest_ms > 0:
            self._follow_assignment()
            self._wake_event.wait((min(wait_ms, rest_ms) if rest_ms > 0 else wait_ms) / 1_000)
            self._wake_event.clear()
        elif self._fetch(wait_ms):
            pool.wake()
        self.service.check_hanging(pool.replace)
        return self._next_wait_ms(pool)

    def _next_wait_ms(self, pool: ConsumePool) -> int:
        now_ms = self._clock.steady_ms()
        due_ms = self.service.next_due()
        if due_ms is not None and due_ms <= now_ms:
            self.service.release_due(now_ms)
            pool.wake()
            due_ms = self.service.next_due()
        if pool.supervise():
            return _WAIT_WHILE_SUPERVISING_MS
        wait_ms = _WAIT_WHILE_HANDLING_MS if self.in_flight else _LONGEST_WAIT_MS
        return wait_ms if due_ms is None else max(0, min(wait_ms, due_ms - now_ms))

    def wake_polling(self) -> None:
        """End the wait of the polling thread, since the state changed or something is due earlier."""
        self._wake_event.set()
        self.wake_fetch()

    def _report(self, error: BaseException) -> int | None:
        """Report an error of the broker. Return the time of the next fetch; None if the broker was closed."""
        if not is_kind(error, (BrokerClosedError, ForkedError)):
            if is_kind(error, BrokerError):
                self._poll_log.warning("listener.poll_failed", reason=safe_text(error), retry_in_ms=_RETRY_POLL_MS)
            else:
                self._poll_log.log(ERROR, "listener.poll_failed", exc_info=error, retry_in_ms=_RETRY_POLL_MS)
            self._next_poll_ms = self._clock.steady_ms() + _RETRY_POLL_MS
            return self._next_poll_ms
        self._break("listener.broker_closed")
        return None

    def _break(self, event: str) -> None:
        """Show in the state, and so in the health of the application, that a running container can handle nothing."""
        if self.is_running:
            self.state = ContainerState.BROKEN
            self._log.warning(event)
            self._on_broken()
