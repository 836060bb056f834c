"""Listener container: it joins and leaves the group of one listener, and is what a program pauses and moves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from mqtemplate.broker import Broker, ConsumeFromWhere
from mqtemplate.calls.handling import Observation
from mqtemplate.calls.message_trace import MessageTrace, TraceDispatcher
from mqtemplate.clock import Clock, VirtualClock
from mqtemplate.converter import MessageConverter
from mqtemplate.durations import Duration, option_ms
from mqtemplate.errors import ListenerError
from mqtemplate.event_log import get_logger
from mqtemplate.futures import running_loop
from mqtemplate.listener.container.consume_modes import PullMembership
from mqtemplate.listener.container.loops import HandlerLoop, LoopThread, RunningLoop
from mqtemplate.listener.container.membership import ContainerState, Membership
from mqtemplate.listener.container.process_queue import Repositioning, epoch_ms
from mqtemplate.listener.declaration.resolution import matching
from mqtemplate.listener.failures.failure_log import FailureLog
from mqtemplate.listener.handler.invoke import HandlerInvocation, Observer, around, listener_info, uses_loop
from mqtemplate.listener.handler.plan import Endpoint
from mqtemplate.message import MessageExt, MessageQueue

_log = get_logger("mqtemplate.listener")


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
        broker: The broker from which the listener reads.
        converter: The converter of the listener's bodies and replies.
        member: What the last start created; None before the first one.
        observers: Functions that get each call of the handler, on a virtual clock only.
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
        self.on_broken: Callable[[], object] = lambda: None
        self.member: Membership | None = None
        self.broker = broker
        self.converter = converter
        self._clock = broker.clock
        self._trace = trace
        self._named_topics = endpoint.settings.topics
        self._observation = observation
        self._owns_loop = loop is None
        self._loop = loop or choose_loop(broker.clock)
        self._uses_loop = uses_loop(endpoint)
        self._failures = FailureLog(endpoint.id, endpoint.settings.group, broker.clock)
        self._log = _log.bind(listener=endpoint.id, group=endpoint.settings.group)
        self.observers: list[Observer] = []
        self._wake: Callable[[], None] = lambda: None
        self._state_lock = threading.Lock()

    @property
    def state(self) -> ContainerState:
        """State of the last start; ``CREATED`` before the first one."""
        return ContainerState.CREATED if self.member is None else self.member.state

    @property
    def is_running(self) -> bool:
        """True if the container is a member of its group; a paused one is."""
        return self.member is not None and self.member.is_running

    @property
    def concurrency(self) -> int:
        """Maximum number of handlers that run at the same time, without replacements of hanging ones."""
        return self.endpoint.settings.thread_number

    @property
    def in_flight(self) -> int:
        """Number of messages that were fetched and are not finished; 0 before the first start."""
        return 0 if self.member is None else self.member.in_flight

    @property
    def renewals(self) -> tuple[int, int]:
        """By POP: numbers of renewed invisible times, and of those that were over too early, since the last start."""
        return (0, 0) if self.member is None else self.member.renewals

    @property
    def hanging_count(self) -> int:
        """Number of calls of the handler that run longer than ``consume_timeout``."""
        return self.member.service.hanging_count if self.member is not None and self.member.is_running else 0

    @property
    def outcomes(self) -> Mapping[str, int]:
        """Next step (`NextStep.value`) -> number of failed messages for which it was decided."""
        return self._failures.outcomes

    def positions(self) -> dict[MessageQueue, int | None]:
        """Return the committed offset of each queue that is assigned to this member; None before the first commit."""
        return self.member.positions() if self.member is not None and self.member.is_running else {}

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
            self.member = member = self._kind_of_membership()(
                self.endpoint,
                self.broker,
                self._make_invocation(),
                self._failures,
                loop=self._loop if self._uses_loop else None,
                lock=self._state_lock,
                wake=lambda: self._wake(),  # noqa: PLW0108  it is set by each harness
                on_broken=lambda: self.on_broken(),  # noqa: PLW0108  it is set later
            )
            member.start()
        settings, policy = self.endpoint.settings, member.policy
        self._log.debug(
            "listener.started",
            topics=list(settings.topics),
            selector=settings.selector.expression,
            mode=settings.consume_mode.value,
            request_mode=settings.request_mode.value,
            retry=policy.describe(),
        )
        if (replaced := policy.replaced_delays()) is not None:
            self._log.info(
                "listener.retries_by_level",
                retry=str(settings.retry),
                used=replaced,
                reason="the broker has no exact retry delays; each retry has the nearest level that is not shorter",
            )

    def _kind_of_membership(self) -> type[Membership]:
        if not self.endpoint.settings.is_pop:
            return PullMembership
        from mqtemplate.listener.container.pop import PopMembership  # few listeners need it

        return PopMembership

    def _make_invocation(self) -> HandlerInvocation:
        observation = self._observation
        if self._trace is not None:
            group = self.endpoint.settings.group
            observation = MessageTrace(self._trace, group, self._clock, observation or Observation())
        return HandlerInvocation(
            self.endpoint,
            listener_info(self.endpoint, self.broker, self._end_requested_pause),
            self.broker,
            self.converter,
            self._loop.run,
            self._failures,
            observation,
            self.observers,
        )

    def _end_requested_pause(self) -> None:
        if self.member is not None:
            self.member.end_requested_pause()

    def around(self, middlewares: Iterable[object], call: Callable[[MessageExt], Any]) -> Callable[[MessageExt], Any]:
        """Return a function of a message with middlewares around it, for a handler that calls them itself."""
        info = listener_info(self.endpoint, self.broker, self._end_requested_pause)
        return around(middlewares, call, info, self._loop.run)

    def stop_fetching(self) -> None:
        """Fetch no more. `stop` then waits for the handlers; their time starts now."""
        with self._state_lock:
            if self.member is not None:
                self.member.stop_fetching()

    def stop(self) -> None:
        """Stop fetching, wait for running handlers, commit, and leave the group. Stopping twice is harmless.

        The wait ends after ``await_termination_millis_when_shutdown``. Messages that are unfinished then, and fetched
        ones that no handler has, stay uncommitted and are redelivered.
        """
        self.stop_fetching()
        with self._state_lock:
            if self.member is None or self.member.state is not ContainerState.STOPPING:
                return
            try:
                unfinished = self.member.stop()
            finally:
                if self._owns_loop:
                    self._loop.stop()
        write = self._log.warning if unfinished else self._log.debug
        write("listener.stopped", unfinished=unfinished)

    def pause(self) -> None:
        """Call no handler and fetch nothing until ``resume``.

        When this returns, handlers finish the messages that they have, and no further one starts. Fetched messages
        are kept, and the queues stay assigned. By POP, other members may have the fetched messages, and the broker has
        acknowledged those that were handled; if it does not answer, the wait ends as that of `stop` does.
        """
        with self._state_lock:
            member = self.member
            if member is not None:
                member.pause()
        if member is not None:
            member.wait_until_settled()

    def resume(self) -> None:
        """Handle messages and fetch again after ``pause``, or after a pause that a middleware or handler requested."""
        with self._state_lock:
            if self.member is not None:
                self.member.resume()
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
            if self.member is not None:
                self.member.resize(number, self.endpoint.settings.consume_thread_max)
        self._wake()

    # --- topics ------------------------------------------------------------------------------------

    def _find_topics(self) -> bool:
        """Add the topics that match the patterns of the listener. Return True if they differ from those before."""
        settings = self.endpoint.settings
        found = matching(settings.topic_patterns, self.broker.topic_names())
        topics = tuple(dict.fromkeys((*self._named_topics, *found)))
        if is_changed := topics != settings.topics:
            self.endpoint = replace(self.endpoint, settings=replace(settings, topics=topics))
        return is_changed

    def follow_topics(self) -> None:
        """Join the group again if there are new topics that match the patterns of the listener.

        A new topic is read from its start: its messages were sent after the listener had started. A listener that is
        paused joins after the pause.
        """
        if self.member is None or self.member.service.is_paused:
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
        self.seek_all({queue: queue_offset})

    def seek_all(self, offsets: Mapping[MessageQueue, int]) -> None:
        """Continue several queues at other offsets, as `seek` does one."""
        self._reposition(lambda positions: positions.to_offsets(offsets))

    def rewind(self, span: Duration | None = None) -> None:
        """Handle the messages of the last *span* again, such as ``"1h"``; None: all that the broker has.

        It moves the queues that are assigned to this member, as `seek` does.

        Raises:
            ListenerError: The listener is not running.
            ValueError: *span* is not a span of time.
        """
        time_ms = 0 if span is None else max(0, self._clock.now_ms() - option_ms("span", span, ValueError))
        self._reposition(lambda positions: positions.to_time(time_ms))

    def reset_to_time(self, time: datetime | int) -> None:
        """Continue with the first messages that were stored at a time or later; now skips all earlier ones.

        It moves the queues that are assigned to this member, as `seek` does.

        Args:
            time: An aware datetime, or epoch milliseconds.

        Raises:
            ListenerError: The listener is not running, or *time* has no time zone or is epoch seconds.
        """
        time_ms = epoch_ms(time)
        self._reposition(lambda positions: positions.to_time(time_ms))

    def skip_to_latest(self) -> None:
        """Continue after the last message of each queue that is assigned to this member: skip what is not handled.

        Raises:
            ListenerError: The listener is not running.
        """
        self._reposition(Repositioning.to_latest)

    def _reposition(self, move: Callable[[Repositioning], None]) -> None:
        member = self.member
        if member is None or not member.is_running:
            raise ListenerError(f"{self.name} is not running; start it first")
        member.reposition(move)

    # --- on a virtual clock ------------------------------------------------------------------------

    def on_wake(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def step(self) -> int | None:
        """Fetch and handle what is due. Return now if there may be more, the next due time, or None."""
        if self.member is None or not self._clock.is_virtual or not self.member.is_running:
            return None
        return self.member.step()


def choose_loop(clock: Clock) -> HandlerLoop:
    """Return the loop for the handlers of an application that this thread starts.

    It is the event loop that runs in this thread, so that handlers share its clients and sessions. Without one it is a
    loop in a thread of its own. On a virtual clock it is a loop with the time of the clock.
    """
    if isinstance(clock, VirtualClock):
        from mqtemplate.listener.container.virtual import VirtualLoop  # only tests need it

        return VirtualLoop(clock)
    loop = running_loop()
    return LoopThread() if loop is None else RunningLoop(loop)
