"""Receiving by POP: each message is acknowledged by itself, and is invisible to other members until then.

Source: RocketMQ ``client: ConsumeMessagePopConcurrentlyService``.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from mqtemplate.broker import Broker, Capability, PopConsumers
from mqtemplate.clock import Clock
from mqtemplate.errors import ListenerError, UnsupportedError
from mqtemplate.listener.container.consume_service import ConcurrentConsumeService, ConsumeService
from mqtemplate.listener.container.membership import Membership
from mqtemplate.listener.container.pop_deliveries import PopDeliveries, PopDelivery
from mqtemplate.listener.container.process_queue import Repositioning
from mqtemplate.listener.failures.failure import Decision, NextStep, raise_if_not_of_handler
from mqtemplate.listener.failures.policy import properties_of_dead_letter
from mqtemplate.message import MessageExt, MessageQueue, create_unique_id
from mqtemplate.services import Service, ServiceRunner, join_woken

_LONG_POLL_MS = 20_000
_HORIZON_MS = 100  # a message waits for its handler about as long
_LONGEST_WAIT_MS = 1_000
_MOST_WAITING = 1_000
_MOST_UNSETTLED = 4_000
_MOST_BYTES = 16 << 20
_RETRY_MS = 1_000
_JOIN_S = 10.0


class _Order:
    """Messages of one order that this member has. One call of the handler at a time has some of them.

    Attributes:
        taken: Number of messages that a call of the handler has.
        has_failed: One of these failed: the waiting ones are released, and come again after it.
    """

    __slots__ = ("has_failed", "taken", "waiting")

    def __init__(self) -> None:
        self.taken = 0
        self.has_failed = False
        self.waiting: deque[PopDelivery] = deque()


@dataclass(eq=False, kw_only=True)
class PopConsumeService(ConcurrentConsumeService[PopDelivery]):
    """Messages that were received by POP, side by side.

    - A message is acknowledged when its handler returns. One that failed becomes visible to all members again after
      the delay that the failure policy decides, or goes to the dead letter topic.
    - ``ORDERLY``: messages with one ``hash_key`` are handled one after the other, and a batch has them in their order.
      After a failure the others of the key are released: the broker delivers them after the one that failed.

    Args:
        pop: The broker's part for POP.
        on_free: Called when a handler may be free for another message.
        on_ready: Called when a message is ready that was received before.
    """

    pop: PopConsumers
    on_free: Callable[[], None]
    on_ready: Callable[[], None]

    def __post_init__(self) -> None:
        super().__post_init__()
        settings = self.endpoint.settings
        self._is_ordered = settings.is_orderly
        self._longest_wait_ms = min(_LONGEST_WAIT_MS, settings.invisible_duration // 4)
        self._orders: dict[Hashable, _Order] = {}
        self._order_lock = threading.Lock()
        self.deliveries = PopDeliveries(
            settings, self.pop, self.clock, self._on_settled, self._on_refused, self.on_free
        )

    @property
    def order_count(self) -> int:
        """Number of orders of which this member has messages that have not ended; a few more at times."""
        return max(0, len(self._orders) - self.deliveries.unsettled_count)

    def resume(self) -> None:
        now_ms = self.clock.steady_ms()
        for delivery, _ in list(self._ready):
            delivery.ready_ms = now_ms  # it did not wait for slow handlers
        super().resume()

    def next_due(self) -> int | None:
        dues_ms = (super().next_due(), self._next_return_ms())
        return min((due_ms for due_ms in dues_ms if due_ms is not None), default=None)

    def release_due(self, now_ms: int) -> None:
        """Let other members have messages that no handler has begun for long: the handlers are slower than before."""
        super().release_due(now_ms)
        due_ms = self._next_return_ms()
        if due_ms is not None and due_ms <= now_ms:
            self.deliveries.release(self.unstarted())

    def _next_return_ms(self) -> int | None:
        if self.is_paused:  # the listener keeps its messages, or returns all of them at once
            return None
        try:
            return self._ready[0][0].ready_ms + self._longest_wait_ms
        except IndexError:
            return None

    def accept(self, deliveries: Sequence[PopDelivery]) -> None:
        """Take received messages."""
        if not self._is_ordered:
            self._ready.extend((delivery, delivery.message) for delivery in deliveries)
            return
        with self._order_lock:
            for delivery in deliveries:
                order = self._orders.get(delivery.order)
                if order is None:
                    self._orders[delivery.order] = _Order()
                    self._ready.append((delivery, delivery.message))
                else:
                    order.waiting.append(delivery)

    def unstarted(self) -> list[PopDelivery]:
        """Return the messages that no handler has, and forget them."""
        found: list[PopDelivery] = []
        with self._order_lock:
            while self._ready:
                try:
                    delivery, _ = self._ready.popleft()
                except IndexError:
                    break  # a thread took the last one
                found.append(delivery)
                if self._is_ordered and (order := self._orders.get(delivery.order)) is not None and not order.taken:
                    del self._orders[delivery.order]
                    found += order.waiting
            for order in self._orders.values():
                found += order.waiting
                order.waiting.clear()
        return found

    def abandon(self) -> int:
        self._orders.clear()
        return super().abandon()

    def _take(self) -> list[tuple[PopDelivery, MessageExt]]:
        if not self._is_ordered:
            return super()._take()
        work: list[PopDelivery] = []
        released: list[PopDelivery] = []
        has_dropped = False
        with self._order_lock:
            while self._ready and len(work) < self._take_size:
                head, _ = self._ready.popleft()
                order = self._orders[head.order]
                if head.dropped:
                    released += order.waiting
                    del self._orders[head.order]
                    has_dropped = True
                    continue
                work.append(head)
                order.taken += 1
                while order.waiting and not order.waiting[0].dropped and len(work) < self._take_size:
                    work.append(order.waiting.popleft())
                    order.taken += 1
        self.deliveries.release(released)
        if has_dropped:
            self.on_free()  # another order may be received instead
        return [(delivery, delivery.message) for delivery in work]

    def _put_back(self, work: Sequence[tuple[PopDelivery, MessageExt]]) -> None:
        if not self._is_ordered:
            super()._put_back(work)
            return
        with self._order_lock:
            heads: dict[Hashable, PopDelivery] = {}
            for delivery, _ in reversed(work):
                order = self._orders[delivery.order]
                order.taken -= 1
                if (follower := heads.get(delivery.order)) is not None:
                    order.waiting.appendleft(follower)
                heads[delivery.order] = delivery
            self._ready.extendleft((head, head.message) for head in heads.values())

    def _on_settled(self, delivery: PopDelivery, is_done: bool) -> None:
        """Let the next message of an order be handled; after a failure release the others."""
        released: list[PopDelivery] = []
        if delivery.order is not None:
            with self._order_lock:
                released = self._end_turn(delivery, is_done)
        if released:
            self.deliveries.release(released)
        elif is_done and not self.clock.is_virtual:
            self.on_ready()

    def _end_turn(self, delivery: PopDelivery, is_done: bool) -> list[PopDelivery]:
        order = self._orders.get(delivery.order)
        if order is None:
            return []
        order.taken -= 1
        order.has_failed |= not is_done
        if order.taken:
            return []
        if order.waiting and not order.has_failed:
            head = order.waiting.popleft()
            head.ready_ms = self.clock.steady_ms()
            self._ready.append((head, head.message))
            return []
        del self._orders[delivery.order]
        return list(order.waiting)

    # --- failures ----------------------------------------------------------------------------------

    def _may_take_longer(self, work: Sequence[tuple[PopDelivery, MessageExt]]) -> bool:
        now_ms = self.clock.steady_ms()
        return any(delivery.extended_ms > now_ms for delivery, _ in work)

    def _finish_failed(
        self, holder: PopDelivery, message: MessageExt, decision: Decision, error: BaseException | None
    ) -> None:
        if decision.next_step is not NextStep.DEAD_LETTER:
            self.deliveries.hide(holder, decision.delay_ms)
            return
        properties = properties_of_dead_letter(self.endpoint.id, message, error, self.clock.now_ms())
        try:
            self.deliveries.send_to_dead_letters(holder, properties)
        except BaseException as refusal:
            raise_if_not_of_handler(refusal)
            self._on_refused(holder, refusal)

    def _on_refused(self, delivery: PopDelivery, error: BaseException) -> None:
        self.failures.send_back_failed(delivery.message, error, self.deliveries.left_ms(delivery))

    def _not_settled(self, work: Sequence[tuple[PopDelivery, MessageExt]]) -> None:
        for delivery, _ in work:
            self.deliveries.let_expire(delivery)


class _Prefetch:
    """Number of messages to receive before handlers are free for them: as many as they finished in the last moment.

    It is 0 for handlers that finish less than three messages each in that time: they keep nothing waiting but their own
    messages, and the time of a request to the broker is short for them.
    """

    def __init__(self, clock: Clock, horizon_ms: int) -> None:
        self._clock = clock
        self._horizon_ms = horizon_ms
        self._last = (clock.steady_ms(), 0, 0)  # time, messages finished until then, result

    def count(self, finished: int, at_once: int) -> int:
        """Return the number.

        Args:
            finished: Number of messages that handlers have finished so far.
            at_once: Number of messages that all handlers together have at a time.
        """
        now_ms, (last_ms, last_finished, count) = self._clock.steady_ms(), self._last
        if (span_ms := now_ms - last_ms) < self._horizon_ms:
            return count
        in_horizon = (finished - last_finished) * self._horizon_ms // span_ms
        count = 0 if in_horizon < 3 * at_once else min(in_horizon, _MOST_WAITING)
        self._last = (now_ms, finished, count)
        return count


class PopMembership(Membership):
    """Membership that receives by POP: what handlers are free for, and what short ones finish in a tenth of a second.

    - On a real clock one thread for each topic waits at the broker, and one reports what became of messages.
    - A stop, or a pause by `pause`, lets other members have the messages that no handler has, and waits until the
      broker knows of the others that have ended; see ``await_termination_millis_when_shutdown``.
    """

    def _join(self, broker: Broker) -> ConsumeService[Any, Any]:
        settings = self.endpoint.settings
        try:
            self._pop = broker.pop
        except UnsupportedError as error:
            raise UnsupportedError(f"listener {settings.id}: request_mode=POP cannot be honoured: {error}") from error
        if settings.key_limits is not None and Capability.KEY_LIMITS not in broker.capabilities:
            raise UnsupportedError(
                f"listener {settings.id}: fair_by={settings.key_limits.fair_by!r} with POP cannot be honoured: the "
                "limits hold over all members of the group, and only the embedded broker and our server count for each "
                "key what is in flight; remove request_mode=POP, then they hold within each member, or use our server"
            )
        self._settings = settings
        self._number = settings.thread_number
        self._attempt_ids: dict[str, str] = {}
        self._free = threading.Condition()
        self._waiting = 0
        self._arrived: SimpleQueue[list[PopDelivery] | BaseException | None] = SimpleQueue()
        self._receivers: list[threading.Thread] = []
        self.wake_fetch = self._wake_receivers
        self._registration = self._pop.join(settings.consumer_spec(self._clock.now_ms()))
        service = PopConsumeService(
            pop=self._pop, on_free=self._notify_free, on_ready=self._wake_pool, **self._service_arguments()
        )
        self._service, self.deliveries = service, service.deliveries
        self._prefetch = _Prefetch(self._clock, min(_HORIZON_MS, settings.invisible_duration // 10))
        self._body_bytes = 1
        self._reports = ServiceRunner(
            self.deliveries, self._clock, f"mqtemplate-{settings.id}-deliveries", self._report_failed
        )
        return service

    @property
    def in_flight(self) -> int:
        return len(self.deliveries)

    @property
    def renewals(self) -> tuple[int, int]:
        return self.deliveries.renewed, self.deliveries.expired

    def positions(self) -> dict[MessageQueue, int | None]:
        return {}

    def reposition(self, move: Callable[[Repositioning], None]) -> None:
        group = self._settings.group
        raise ListenerError(
            f"listener {self._settings.id} receives by POP, so it has no read positions of its own; move those of the "
            f"group: mqtemplate offsets reset {group} TOPIC --to earliest, latest or a time"
        )

    def start(self) -> None:
        super().start()
        self._reports.start()
        if self._clock.is_virtual:
            return
        for topic in self._settings.topics:
            name = f"mqtemplate-{self._settings.id}-receive-{topic}"
            self._receivers.append(threading.Thread(target=self._receive_loop, args=(topic,), name=name, daemon=True))
        for thread in self._receivers:
            thread.start()

    def stop(self) -> int:
        join_woken(self._receivers, lambda: self._pop.wake(self._settings.group), _JOIN_S)
        return super().stop() + self.deliveries.unsettled_count

    def resize(self, number: int, maximum: int) -> None:
        self._number = number
        super().resize(number, maximum)
        self._notify_free()

    def wait_until_settled(self) -> None:
        if self._loop is None or not self._loop.is_current():
            limit_ms = self._settings.await_termination_millis_when_shutdown
            self.deliveries.wait_until_settled(time.monotonic() + limit_ms / 1_000)

    def _leave(self) -> None:
        self.deliveries.wait_until_settled(self._drained_until)
        self._reports.stop()
        self.deliveries.report()  # without time for a wait, each is sent once all the same
        self._registration.close()

    def _wake_pool(self) -> None:
        if self._pool is not None:
            try:
                self._pool.wake()
            except RuntimeError:  # no thread can be started: the polling thread tries again, and reports it
                self.wake_polling()

    def _give_back(self) -> None:
        while True:
            try:
                item = self._arrived.get_nowait()
            except Empty:
                break
            if isinstance(item, list):  # an error of a receiving thread means nothing for a member that stops
                self.deliveries.release(item)
        self.deliveries.release(self._service.unstarted())

    def _report_failed(self, service: Service, error: Exception, repeated: int) -> None:
        self._log.error("listener.report_failed", exc_info=error, repeated=repeated)

    # --- receiving ---------------------------------------------------------------------------------

    def _free_count(self, *, many: bool = False) -> int:
        """Return how many messages may be received now: those that handlers are free for, or will be soon.

        Args:
            many: Return 0 while more than three quarters of the messages that this member may have are there.
        """
        unsettled = self.deliveries.unsettled_count
        if not self._may_fetch or unsettled >= _MOST_UNSETTLED:
            return 0
        batch, service = self._settings.pull_batch_size, self._service
        at_once = self._number * (self.endpoint.take_size if self.endpoint.plan.is_batch else 1)
        prefetch = min(self._prefetch.count(self.deliveries.finished, at_once), _MOST_BYTES // self._body_bytes)
        if self._settings.is_orderly:
            return batch if service.order_count < self._number + prefetch else 0
        most = at_once + prefetch
        free = most - (len(self.deliveries) - unsettled)
        if not service.ready_count:
            return min(free, batch)
        return batch if free >= (max(batch, most // 4) if many else batch) else 0

    def _notify_free(self) -> None:
        # A thread that is woken for each batch would cost more than the batch.
        if self._waiting and (self._free_count(many=True) > 0 or self._has_ended()):
            with self._free:
                self._free.notify_all()

    def _wake_receivers(self) -> None:
        if not self._clock.is_virtual:
            self._arrived.put(None)
        self._notify_free()
        if not self._may_fetch:
            self._pop.wake(self._settings.group)

    def _receive(self, topic: str, max_count: int, wait_ms: int) -> list[PopDelivery]:
        settings, selector = self._settings, self._settings.selector
        attempt_id = self._attempt_ids.setdefault(topic, create_unique_id()) if settings.is_orderly else ""
        received = self._pop.receive(
            settings.group,
            topic,
            max_count,
            settings.invisible_duration,
            wait_ms,
            None if selector.selects_all else selector,
            is_ordered=settings.is_orderly,
            attempt_id=attempt_id,
        )
        if received:
            self._attempt_ids.pop(topic, None)
            self._body_bytes = max(1, sum(len(each.message.body) for each in received) // len(received))
        return self.deliveries.hold(received)

    def _fetch(self, wait_ms: int) -> bool:
        found = False
        try:
            for deliveries in self._receive_each() if self._clock.is_virtual else self._take_arrived(wait_ms / 1_000):
                self._service.accept(deliveries)
                found = True
        except Exception as error:
            if not found:
                raise
            self._arrived.put(error)  # the next fetch reports it
        if found and self._clock.is_virtual and self._settings.pull_interval:
            self._next_poll_ms = self._clock.steady_ms() + self._settings.pull_interval
        return found

    def _receive_each(self) -> Iterator[list[PopDelivery]]:
        for topic in self._settings.topics:
            if (count := self._free_count()) > 0 and (deliveries := self._receive(topic, count, 0)):
                yield deliveries

    def _take_arrived(self, wait_s: float) -> Iterator[list[PopDelivery]]:
        """Yield what the receiving threads have received.

        Raises:
            Exception: A thread could not receive.
        """
        while True:
            try:
                item = self._arrived.get(wait_s > 0, max(wait_s, 0.0))
            except Empty:
                return
            wait_s = 0.0
            if isinstance(item, BaseException):
                raise item
            if item is not None:
                yield item

    def _receive_loop(self, topic: str) -> None:
        interval_s = self._settings.pull_interval / 1_000
        while not self._has_ended():
            count = self._wait_until_free()
            if count <= 0:
                continue
            try:
                deliveries = self._receive(topic, count, _LONG_POLL_MS)
            except BaseException as error:  # whatever its class: in this thread none is meant for the process
                self._arrived.put(error)
                self._pause_receiving(_RETRY_MS / 1_000)
                continue
            if self._has_ended():
                self.deliveries.release(deliveries)
            elif deliveries:
                self._arrived.put(deliveries)
                if len(self._receivers) > 1 and self._free_count() <= 0:
                    self._pop.wake(self._settings.group)  # the other threads wait for free handlers again
                self._pause_receiving(interval_s)

    def _has_ended(self) -> bool:
        return not self.is_running

    def _wait_until_free(self) -> int:
        with self._free:
            self._waiting += 1
            try:
                count = self._free_count()
                if count <= 0 and not self._has_ended():
                    self._free.wait()
                    count = self._free_count()
            finally:
                self._waiting -= 1
        return count

    def _pause_receiving(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while seconds > 0 and not self._has_ended() and (left_s := until - time.monotonic()) > 0:
            with self._free:
                self._waiting += 1
                try:
                    self._free.wait(left_s)
                finally:
                    self._waiting -= 1
