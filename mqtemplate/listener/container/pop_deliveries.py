"""Messages that a member has received by POP: their invisible times, and the end of each of them.

The broker gives each message to one member of the group for an invisible time. `PopDeliveries` renews that time while
a message waits for a handler or is handled. Then it reports to the broker what became of the message.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from datetime import timedelta
from logging import ERROR, WARNING
from typing import Any, NamedTuple

from mqtemplate.broker import PopConsumers, ReceivedMessage
from mqtemplate.clock import Clock
from mqtemplate.durations import option_ms
from mqtemplate.errors import BrokerClosedError, ForkedError, InvalidReceiptHandleError
from mqtemplate.event_log import LimitedLog, get_logger
from mqtemplate.futures import AwaitableFuture, running_loop
from mqtemplate.listener.declaration.settings import ListenerSettings
from mqtemplate.listener.failures.failure import is_kind
from mqtemplate.message import MessageExt, Property
from mqtemplate.services import wall_time
from mqtemplate.user_code import safe_text

_log = get_logger("mqtemplate.listener")

_RETRY_MS = 1_000
_MOST_AT_ONCE = 512
_NEVER_MS = sys.maxsize


class _LaterDelivery(NamedTuple):
    """End of a delivery that is not acknowledged: the message is visible again after a time."""

    invisible_ms: int
    counts: bool


_RELEASE = _LaterDelivery(0, counts=False)


class PopDelivery:
    """One message that this member received, until it is settled. It is the `InvisibleTime` of its message.

    Attributes:
        receipt: The receipt handle to use now. Each change of the invisible time returns another one.
        ready_ms: Time (steady ms) from which it waits for a handler, and not for an earlier message.
        visible_ms: Time (steady ms) at which other members see the message, unless it is renewed.
        due_ms: Time (steady ms) of the next renewal, or of the next try to acknowledge.
        extended_ms: Time (steady ms) until which the handler does not count as hanging.
        has_ended: No handler has it any more. The broker knows that, or will soon.
        change: How it has ended; None: it is acknowledged.
        dropped: The invisible time was over: another member may have the message.
        order: Messages of one order are handled one after the other; None if the listener is not ordered.
    """

    __slots__ = (
        "change",
        "dropped",
        "due_ms",
        "extended_ms",
        "has_ended",
        "has_turn",
        "lock",
        "message",
        "order",
        "ready_ms",
        "receipt",
        "received",
        "superseded",
        "table",
        "visible_ms",
    )

    def __init__(self, table: PopDeliveries, received: ReceivedMessage, order: Hashable, now_ms: int) -> None:
        self.table = table
        self.received = received
        self.message = received.message
        self.receipt = received.receipt
        self.order = order
        self.lock = threading.Lock()  # held while a request changes the receipt handle
        self.dropped = self.has_ended = False
        self.has_turn = True
        self.change: _LaterDelivery | None = None
        self.superseded = True  # a failure of a dropped message still ends its turn in its order
        self.ready_ms = now_ms
        self.visible_ms = self.due_ms = self.extended_ms = 0
        received.message.invisible_time = self

    def __reduce__(self) -> tuple[Any, ...]:
        """Return None for a copy, and for a pickle: another process has no connection to the broker."""
        return type(None), ()

    def finish(self, _queue_offset: int) -> None:
        """Acknowledge the message soon."""
        self.table.acknowledge(self)

    def extend(self, duration: str | timedelta | float) -> AwaitableFuture[None]:
        """See `MessageExt.extend`."""
        return self.table.extend(self, option_ms("duration", duration, ValueError))


class PopDeliveries:
    """Messages that this member has received and not settled. A `Service` that settles them.

    - The threads of handlers only note how a message has ended. A step reports all that were noted, with few requests:
      many acknowledgements share one flush of the broker. On a virtual clock each one is reported at once.
    - A step renews the invisible times of which half is left.
    - If the broker does not answer, an acknowledgement or a renewal is repeated each second until the time is over.
      Then the message is dropped: another member may have it.

    Args:
        on_settled: Called once for each message of an order, when the broker has answered, with True if it is done.
        on_refused: Called with the error if the broker did not accept the end of a message that failed. The message is
            delivered again when its time is over.
        on_free: Called when this member has fewer messages.

    Attributes:
        finished: Number of messages that handlers have finished, about.
        renewed: Number of renewals.
        expired: Number of messages whose invisible time was over before they were settled.
    """

    def __init__(
        self,
        settings: ListenerSettings,
        pop: PopConsumers,
        clock: Clock,
        on_settled: Callable[[PopDelivery, bool], None],
        on_refused: Callable[[PopDelivery, Exception], None],
        on_free: Callable[[], None],
    ) -> None:
        self.name = f"messages of listener {settings.id}"
        self._pop = pop
        self._clock = clock
        self._is_virtual = clock.is_virtual
        self._group = settings.group
        self._invisible_ms = settings.invisible_duration
        self._is_ordered = settings.is_orderly
        self._on_settled = on_settled
        self._on_refused = on_refused
        self._on_free = on_free
        self._held: dict[PopDelivery, None] = {}
        self._unsettled: dict[PopDelivery, None] = {}  # those of _held that have ended
        self._ended: deque[PopDelivery] = deque()  # to be reported with the next step
        self._extensions: deque[tuple[PopDelivery, int, AwaitableFuture[None]]] = deque()  # for the next step
        self._settled = threading.Condition()
        self._wake: Callable[[], None] = lambda: None
        self._due_lock = threading.Lock()
        self._due_ms = _NEVER_MS
        self._log = LimitedLog(_log.bind(listener=settings.id, group=settings.group), clock.steady_ms, burst=1)
        self.finished = self.renewed = self.expired = 0

    def __len__(self) -> int:
        return len(self._held)

    @property
    def unsettled_count(self) -> int:
        """Number of messages that no handler has any more, and of whose end the broker does not know yet."""
        return len(self._unsettled)

    def on_wake(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def hold(self, received: Iterable[ReceivedMessage]) -> list[PopDelivery]:
        """Renew the invisible times of received messages from now on. Return their deliveries."""
        now_ms = self._clock.steady_ms()
        order_of: Callable[[MessageExt], Hashable] = _order_of if self._is_ordered else lambda _: None
        deliveries = [PopDelivery(self, each, order_of(each.message), now_ms) for each in received]
        for delivery in deliveries:
            self._is_visible_from(delivery, now_ms + self._invisible_ms)
            self._held[delivery] = None
        if deliveries:
            self._is_due(deliveries[0].due_ms)
        return deliveries

    def _is_visible_from(self, delivery: PopDelivery, visible_ms: int) -> None:
        delivery.visible_ms = visible_ms
        delivery.due_ms = visible_ms - self._invisible_ms // 2

    def _is_due(self, due_ms: int) -> None:
        """Look at the times of all messages at *due_ms*, or before."""
        with self._due_lock:
            if due_ms >= self._due_ms:
                return
            self._due_ms = due_ms
        self._wake()

    # --- the end of a message ----------------------------------------------------------------------

    def acknowledge(self, delivery: PopDelivery) -> None:
        """Acknowledge a message that is handled, soon. If the broker does not answer, it is tried again each second."""
        self._end(delivery, None)

    def hide(self, delivery: PopDelivery, invisible_ms: int) -> None:
        """End a message that failed, soon: it is delivered again after this time."""
        self._end(delivery, _LaterDelivery(invisible_ms, counts=True))

    def release(self, deliveries: Iterable[PopDelivery]) -> None:
        """Let other members have messages that no handler had, soon and with the same attempt."""
        is_empty = True
        for delivery in deliveries:
            is_empty = False
            self._note_end(delivery, _RELEASE)
        if not is_empty:
            self._report_soon()

    def _end(self, delivery: PopDelivery, change: _LaterDelivery | None) -> None:
        self.finished += 1
        self._note_end(delivery, change)
        self._report_soon()

    def _note_end(self, delivery: PopDelivery, change: _LaterDelivery | None) -> None:
        delivery.change = change
        delivery.has_ended = True
        delivery.due_ms = _NEVER_MS
        self._unsettled[delivery] = None
        self._ended.append(delivery)

    def _report_soon(self) -> None:
        if self._is_virtual:
            self.report()
        else:
            self._wake()
            self._on_free()

    def send_to_dead_letters(self, delivery: PopDelivery, properties: dict[str, str]) -> None:
        """End a message that is not retried.

        Raises:
            MQTemplateError: The broker did not accept it. The message is delivered again when its time is over.
        """
        try:
            with delivery.lock:
                if self._forget(delivery):
                    received = ReceivedMessage(delivery.message, delivery.receipt, delivery.received.attempt)
                    self._pop.dead_letter(self._group, delivery.message.topic, received, properties)
        except InvalidReceiptHandleError as error:
            self._drop(delivery, error)
        finally:
            self._end_turn(delivery, is_done=False)
            self._on_free()

    def let_expire(self, delivery: PopDelivery) -> None:
        """Forget a message that has not ended. It is delivered again when its time is over."""
        if not delivery.has_ended:
            self._forget(delivery)
            self._end_turn(delivery, is_done=False)
            self._on_free()

    def left_ms(self, delivery: PopDelivery) -> int:
        """Return the time until other members see a message."""
        return max(0, delivery.visible_ms - self._clock.steady_ms())

    def _forget(self, delivery: PopDelivery) -> bool:
        """Renew the time of a message no more. Return False if it was forgotten before."""
        self._unsettled.pop(delivery, None)
        return self._held.pop(delivery, delivery) is None

    def _end_turn(self, delivery: PopDelivery, *, is_done: bool) -> None:
        """Report once that the next message of an order may be handled."""
        if delivery.order is not None and delivery.has_turn:
            delivery.has_turn = False
            self._on_settled(delivery, is_done)

    def _drop(self, delivery: PopDelivery, error: Exception) -> None:
        self._forget(delivery)
        if delivery.dropped:
            return
        delivery.dropped = True
        self.expired += 1
        message = delivery.message
        _log.warning(
            "listener.message_expired",
            group=self._group,
            topic=message.topic,
            msg_id=message.msg_id,
            attempt=delivery.received.attempt,
            is_handled=delivery.has_ended and delivery.change is None,
            reason=str(error),
        )

    # --- reports to the broker ---------------------------------------------------------------------

    def report(self) -> None:
        """Report the ends of messages that were noted so far."""
        left = len(self._ended)  # further ones are for the next step, so that renewals are not late
        failures: list[Exception] = []
        while left > 0:
            of_request: dict[tuple[_LaterDelivery | None, str], list[PopDelivery]] = {}
            for _ in range(min(left, _MOST_AT_ONCE)):
                try:
                    delivery = self._ended.popleft()
                except IndexError:
                    break  # the end of another message has led to a report
                of_request.setdefault((delivery.change, delivery.message.topic), []).append(delivery)
            left -= _MOST_AT_ONCE
            for (change, topic), deliveries in of_request.items():
                failures += self._report(topic, change, deliveries)
            with self._settled:
                self._settled.notify_all()
            self._on_free()
        for failure in failures:
            raise failure

    def _report(
        self, topic: str, change: _LaterDelivery | None, deliveries: Sequence[PopDelivery]
    ) -> Sequence[Exception]:
        """Send a report, and take its results. Return the errors of logging."""
        held = [delivery for delivery in deliveries if delivery in self._held]
        failures: list[Exception] = []
        for delivery, error in zip(held, self._errors(topic, change, held), strict=True):
            try:
                self._take_result(delivery, change, error)
            except Exception as failure:  # of logging, which may call the application: the others are settled, too
                failures.append(failure)
        for delivery in deliveries:
            if delivery not in self._held:
                self._unsettled.pop(delivery, None)
            if change is not _RELEASE:
                self._end_turn(delivery, is_done=change is None and not delivery.dropped)
        return failures

    def _take_result(self, delivery: PopDelivery, change: _LaterDelivery | None, error: Exception | None) -> None:
        if error is None:
            self._forget(delivery)
        elif is_kind(error, InvalidReceiptHandleError):
            if change is _RELEASE:  # another member has it already
                self._forget(delivery)
            else:
                self._drop(delivery, error)
        elif change is None:
            self._try_later(delivery, error, "listener.ack_failed")
        else:
            self._forget(delivery)
            self._refused(delivery, error)

    def _errors(
        self, topic: str, change: _LaterDelivery | None, deliveries: Sequence[PopDelivery]
    ) -> Sequence[Exception | None]:
        """Send a report. Return the error for each message, or None."""
        receipts = [_last_receipt(delivery) for delivery in deliveries]
        if not receipts:
            return []
        try:
            if change is None:
                return self._pop.ack_all(self._group, topic, receipts)
            changed = self._pop.change_all(self._group, topic, receipts, change.invisible_ms, counts=change.counts)
        except Exception as error:  # no answer of the broker
            self._log.log(ERROR, "listener.report_failed", exc_info=error, messages=len(receipts))
            return [error] * len(receipts)
        return [None if isinstance(each, str) else each for each in changed]

    def _refused(self, delivery: PopDelivery, error: Exception) -> None:
        if delivery.change is _RELEASE:
            left_ms = self.left_ms(delivery)
            self._log.warning("listener.release_failed", reason=safe_text(error), visible_in_ms=left_ms)
        else:
            self._on_refused(delivery, error)

    def wait_until_settled(self, until_s: float) -> int:
        """Wait until the broker knows of all messages that have ended so far. Return of how many it does not.

        Args:
            until_s: End of the wait, on the monotonic clock. On a virtual clock there is no wait.
        """
        ended = list(self._unsettled)
        with self._settled:
            while (left := sum(delivery in self._unsettled for delivery in ended)) and not self._is_virtual:
                if (left_s := until_s - time.monotonic()) <= 0:
                    break
                self._settled.wait(left_s)
        return left

    # --- more time ---------------------------------------------------------------------------------

    def extend(self, delivery: PopDelivery, duration_ms: int) -> AwaitableFuture[None]:
        """See `MessageExt.extend`. From an event loop the request is sent by the next step."""
        extension: AwaitableFuture[None] = AwaitableFuture()
        if self._is_virtual or running_loop() is None:
            self._extend(delivery, duration_ms)
            extension.set_result(None)
        else:
            delivery.extended_ms = self._clock.steady_ms() + duration_ms
            self._extensions.append((delivery, duration_ms, extension))
            self._wake()
        return extension

    def _request_extensions(self) -> None:
        """Request more time for the messages of handlers on an event loop."""
        for _ in range(len(self._extensions)):
            delivery, duration_ms, extension = self._extensions.popleft()
            if not extension.set_running_or_notify_cancel():
                continue
            try:
                self._extend(delivery, duration_ms)
            except Exception as error:
                extension.set_exception(error)
                if not is_kind(error, InvalidReceiptHandleError):  # the handler need not await it
                    msg_id = delivery.message.msg_id
                    self._log.log(WARNING, "listener.extension_failed", reason=safe_text(error), msg_id=msg_id)
            else:
                extension.set_result(None)

    def _extend(self, delivery: PopDelivery, duration_ms: int) -> None:
        with delivery.lock:
            if delivery.has_ended or delivery not in self._held:
                state = "was delivered again" if delivery.dropped else "is settled"
                raise InvalidReceiptHandleError(
                    f"message {delivery.message.msg_id} {state}, so it gets no more time; call extend in its handler, "
                    "before its invisible time is over"
                )
            topic = delivery.message.topic
            try:
                delivery.receipt = self._pop.change_invisible(self._group, topic, delivery.receipt, duration_ms)
            except InvalidReceiptHandleError as error:
                self._drop(delivery, error)
                raise
            now_ms = self._clock.steady_ms()
            delivery.extended_ms = now_ms + duration_ms
            self._is_visible_from(delivery, now_ms + duration_ms)
            delivery.due_ms = max(delivery.due_ms, now_ms + duration_ms // 2)
        self._is_due(delivery.due_ms)

    def step(self) -> int | None:
        """Report what has ended, and renew the times of which half is left. Return the time of the next renewal."""
        self._request_extensions()
        self.report()
        now_ms = self._clock.steady_ms()
        if self._due_ms <= now_ms:
            self._look_at_times(now_ms)
        return None if self._due_ms == _NEVER_MS else wall_time(self._clock, self._due_ms)

    def _look_at_times(self, now_ms: int) -> None:
        with self._due_lock:
            self._due_ms = _NEVER_MS
        of_topic: dict[str, list[PopDelivery]] = {}
        for delivery in list(self._held):
            if delivery.due_ms <= now_ms:
                if delivery.has_ended:  # the broker has not answered the acknowledgement
                    delivery.due_ms = _NEVER_MS
                    self._ended.append(delivery)
                else:
                    of_topic.setdefault(delivery.message.topic, []).append(delivery)
        self.report()
        for topic, deliveries in of_topic.items():
            for start in range(0, len(deliveries), _MOST_AT_ONCE):
                self._renew(topic, deliveries[start : start + _MOST_AT_ONCE], now_ms)
        due_ms = min((delivery.due_ms for delivery in list(self._held)), default=_NEVER_MS)
        with self._due_lock:
            self._due_ms = min(self._due_ms, due_ms)  # another thread may have added a message meanwhile

    def _renew(self, topic: str, deliveries: Sequence[PopDelivery], now_ms: int) -> None:
        locked = [delivery for delivery in deliveries if self._locks_for_renewal(delivery, now_ms)]
        try:
            errors = self._renewal_errors(topic, locked)
        finally:
            for delivery in locked:
                delivery.lock.release()
        for delivery, error in zip(locked, errors, strict=True):
            if error is None:
                self.renewed += 1
                self._is_visible_from(delivery, now_ms + self._invisible_ms)
            elif is_kind(error, InvalidReceiptHandleError):
                self._drop(delivery, error)
            else:
                self._try_later(delivery, error, "listener.renewal_failed")
        self._on_free()  # some may have been dropped

    def _locks_for_renewal(self, delivery: PopDelivery, now_ms: int) -> bool:
        """Acquire the lock of a delivery that is to be renewed. Return False if it is not."""
        if not delivery.lock.acquire(blocking=False):  # a handler requests more time at this moment
            delivery.due_ms = now_ms + _RETRY_MS
            return False
        if delivery.has_ended or delivery not in self._held:
            delivery.lock.release()
            return False
        return True

    def _renewal_errors(self, topic: str, deliveries: Sequence[PopDelivery]) -> Sequence[Exception | None]:
        """Renew times. Set the new receipt handles, and return the error for each message, or None."""
        if not deliveries:
            return []
        receipts = [delivery.receipt for delivery in deliveries]
        try:
            changed = self._pop.change_all(self._group, topic, receipts, self._invisible_ms)
        except Exception as error:
            self._log.log(ERROR, "listener.report_failed", exc_info=error, messages=len(receipts))
            return [error] * len(receipts)
        for delivery, each in zip(deliveries, changed, strict=True):
            if isinstance(each, str):
                delivery.receipt = each
        return [None if isinstance(each, str) else each for each in changed]

    def _try_later(self, delivery: PopDelivery, error: Exception, event: str) -> None:
        """Try again in a second, until the invisible time is over or the broker is closed."""
        left_ms = self.left_ms(delivery)
        if left_ms == 0 or is_kind(error, (BrokerClosedError, ForkedError)):
            self._drop(delivery, error)
            return
        delivery.due_ms = self._clock.steady_ms() + min(_RETRY_MS, left_ms)
        self._is_due(delivery.due_ms)
        self._log.log(WARNING, event, reason=safe_text(error), msg_id=delivery.message.msg_id, visible_in_ms=left_ms)


def _last_receipt(delivery: PopDelivery) -> str:
    """Return the receipt handle of a message that has ended. A request for more time may run still."""
    with delivery.lock:
        return delivery.receipt


def _order_of(message: MessageExt) -> Hashable:
    """Return what the messages of one order have in common: the ``hash_key``, else the queue."""
    key = message.properties.get(Property.SHARDING_KEY)
    return (message.topic, key) if key else message.message_queue
