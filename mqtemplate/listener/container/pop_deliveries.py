"""Messages that a member has received by POP: their invisible times, and the end of each of them.

The broker gives each message to one member of the group for an invisible time. `PopDeliveries` renews that time while
a message waits for a handler or is handled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from datetime import timedelta
from logging import WARNING
from typing import Any

from mqtemplate.broker import PopConsumers, ReceivedMessage
from mqtemplate.clock import Clock
from mqtemplate.durations import option_ms
from mqtemplate.errors import BrokerClosedError, ForkedError, InvalidReceiptHandleError, MQTemplateError
from mqtemplate.event_log import LimitedLog, get_logger
from mqtemplate.listener.declaration.settings import ListenerSettings
from mqtemplate.listener.failures.failure import is_kind
from mqtemplate.message import MessageExt, Property
from mqtemplate.services import wall_time
from mqtemplate.user_code import safe_text

_log = get_logger("mqtemplate.listener")

_RETRY_MS = 1_000


class PopDelivery:
    """One message that this member received, until it is settled. It is the `InvisibleTime` of its message.

    Attributes:
        receipt: The receipt handle to use now. Each change of the invisible time returns another one.
        visible_ms: Time (steady ms) at which other members see the message, unless it is renewed.
        due_ms: Time (steady ms) of the next renewal, or of the next try to acknowledge.
        extended_ms: Time (steady ms) until which the handler does not count as hanging.
        is_handled: The message is to be acknowledged only: the broker did not answer the first time.
        dropped: The invisible time was over: another member may have the message.
        order: Messages of one order are handled one after the other; None if the listener is not ordered.
    """

    def __init__(self, table: PopDeliveries, received: ReceivedMessage, order: Hashable) -> None:
        self.table = table
        self.received = received
        self.message = received.message
        self.receipt = received.receipt
        self.order = order
        self.lock = threading.Lock()
        self.dropped = self.is_handled = False
        self.superseded = True  # a failure of a dropped message still ends its turn in its order
        self.visible_ms = self.due_ms = self.extended_ms = 0
        received.message.invisible_time = self

    def __reduce__(self) -> tuple[Any, ...]:
        """Return None for a copy, and for a pickle: another process has no connection to the broker."""
        return type(None), ()

    def finish(self, _queue_offset: int) -> None:
        """Acknowledge the message."""
        self.table.acknowledge(self)

    def extend(self, duration: str | timedelta | float) -> None:
        """See `MessageExt.extend`."""
        self.table.extend(self, option_ms("duration", duration, ValueError))


class PopDeliveries:
    """Messages that this member has received and not settled. A `Service` that renews their invisible times.

    A time is renewed when half of it is left. If the broker does not answer, the renewal is repeated each second until
    the time is over. Then the message is dropped: another member may have it.

    Args:
        on_settled: Called after the call of the handler for each message, with True if the message is done.
        on_free: Called when there is one message less.

    Attributes:
        renewed: Number of renewals.
        expired: Number of messages whose invisible time was over before they were settled.
    """

    def __init__(
        self,
        settings: ListenerSettings,
        pop: PopConsumers,
        clock: Clock,
        on_settled: Callable[[PopDelivery, bool], None],
        on_free: Callable[[], None],
    ) -> None:
        self.name = f"invisible times of listener {settings.id}"
        self._pop = pop
        self._clock = clock
        self._group = settings.group
        self._invisible_ms = settings.invisible_duration
        self._is_ordered = settings.is_orderly
        self._on_settled = on_settled
        self._on_free = on_free
        self._held: dict[PopDelivery, None] = {}
        self._wake: Callable[[], None] = lambda: None
        self._due_ms: int | None = None
        self._log = LimitedLog(_log.bind(listener=settings.id, group=settings.group), clock.steady_ms, burst=1)
        self.renewed = self.expired = 0

    def __len__(self) -> int:
        return len(self._held)

    def on_wake(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def hold(self, received: Iterable[ReceivedMessage]) -> list[PopDelivery]:
        """Renew the invisible times of received messages from now on. Return their deliveries."""
        now_ms = self._clock.steady_ms()
        order_of: Callable[[MessageExt], Hashable] = _order_of if self._is_ordered else lambda _: None
        deliveries = [PopDelivery(self, each, order_of(each.message)) for each in received]
        for delivery in deliveries:
            self._is_visible_from(delivery, now_ms + self._invisible_ms)
            self._held[delivery] = None
        if deliveries and (self._due_ms is None or deliveries[0].due_ms < self._due_ms):
            self._wake()
        return deliveries

    def _is_visible_from(self, delivery: PopDelivery, visible_ms: int) -> None:
        delivery.visible_ms = visible_ms
        delivery.due_ms = visible_ms - self._invisible_ms // 2

    # --- the end of a message ----------------------------------------------------------------------

    def acknowledge(self, delivery: PopDelivery) -> None:
        """Acknowledge a message that is handled. If the broker does not answer, it is tried again each second."""
        with delivery.lock:
            if delivery in self._held:
                delivery.is_handled = True
                self._acknowledge(delivery)
        self._on_settled(delivery, not delivery.dropped)

    def _acknowledge(self, delivery: PopDelivery) -> None:
        try:
            self._pop.ack(self._group, delivery.message.topic, delivery.receipt)
        except InvalidReceiptHandleError as error:
            self._drop(delivery, error)
        except MQTemplateError as error:
            self._try_later(delivery, error, "listener.ack_failed")
        else:
            self._forget(delivery)

    def _forget(self, delivery: PopDelivery) -> bool:
        """Renew the time of a message no more. Return False if it was forgotten before."""
        if self._held.pop(delivery, delivery) is delivery:
            return False
        self._on_free()
        return True

    def hide(self, delivery: PopDelivery, invisible_ms: int) -> None:
        """End a message that failed: it is delivered again after this time.

        Raises:
            MQTemplateError: The broker did not accept it. The message is delivered again when its time is over.
        """
        self._end(delivery, lambda: self._change(delivery, invisible_ms))

    def send_to_dead_letters(self, delivery: PopDelivery, properties: dict[str, str]) -> None:
        """End a message that is not retried. Errors as in `hide`."""

        def send() -> None:
            received = ReceivedMessage(delivery.message, delivery.receipt, delivery.received.attempt)
            self._pop.dead_letter(self._group, delivery.message.topic, received, properties)

        self._end(delivery, send)

    def _end(self, delivery: PopDelivery, act: Callable[[], object]) -> None:
        try:
            with delivery.lock:
                if self._forget(delivery):
                    act()
        except InvalidReceiptHandleError as error:
            self._drop(delivery, error)
        finally:
            self._on_settled(delivery, False)

    def release(self, deliveries: Iterable[PopDelivery]) -> None:
        """Let other members have messages that no handler had, at once and with the same attempt."""
        for delivery in deliveries:
            with delivery.lock:
                if not self._forget(delivery):
                    continue
                try:
                    self._change(delivery, 0, counts=False)
                except InvalidReceiptHandleError:
                    pass  # another member has it already
                except MQTemplateError as error:
                    self._log.warning(
                        "listener.release_failed", reason=str(error), visible_in_ms=self.left_ms(delivery)
                    )

    def let_expire(self, delivery: PopDelivery) -> None:
        """Forget a message. It is delivered again when its time is over."""
        self._forget(delivery)
        self._on_settled(delivery, False)

    def left_ms(self, delivery: PopDelivery) -> int:
        """Return the time until other members see a message."""
        return max(0, delivery.visible_ms - self._clock.steady_ms())

    def _drop(self, delivery: PopDelivery, error: MQTemplateError) -> None:
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
            is_handled=delivery.is_handled,
            reason=str(error),
        )

    # --- more time ---------------------------------------------------------------------------------

    def extend(self, delivery: PopDelivery, duration_ms: int) -> None:
        """See `MessageExt.extend`."""
        with delivery.lock:
            if delivery not in self._held:
                state = "was delivered again" if delivery.dropped else "is settled"
                raise InvalidReceiptHandleError(
                    f"message {delivery.message.msg_id} {state}, so it gets no more time; call extend in its handler, "
                    "before its invisible time is over"
                )
            try:
                self._change(delivery, duration_ms)
            except InvalidReceiptHandleError as error:
                self._drop(delivery, error)
                raise
            now_ms = self._clock.steady_ms()
            delivery.extended_ms = now_ms + duration_ms
            self._is_visible_from(delivery, now_ms + duration_ms)
            delivery.due_ms = max(delivery.due_ms, now_ms + duration_ms // 2)
        self._wake()

    def _change(self, delivery: PopDelivery, invisible_ms: int, *, counts: bool = True) -> None:
        topic = delivery.message.topic
        delivery.receipt = self._pop.change_invisible(self._group, topic, delivery.receipt, invisible_ms, counts=counts)

    def step(self) -> int | None:
        """Renew the times of which half is left. Return the time of the next renewal."""
        now_ms = self._clock.steady_ms()
        for delivery in list(self._held):
            if delivery.due_ms <= now_ms:
                with delivery.lock:
                    if delivery in self._held:
                        self._renew(delivery, now_ms)
        self._due_ms = min((delivery.due_ms for delivery in list(self._held)), default=None)
        return wall_time(self._clock, self._due_ms)

    def _renew(self, delivery: PopDelivery, now_ms: int) -> None:
        if delivery.is_handled:
            self._acknowledge(delivery)
            return
        try:
            self._change(delivery, self._invisible_ms)
        except InvalidReceiptHandleError as error:
            self._drop(delivery, error)
        except MQTemplateError as error:
            self._try_later(delivery, error, "listener.renewal_failed")
        else:
            self.renewed += 1
            self._is_visible_from(delivery, now_ms + self._invisible_ms)

    def _try_later(self, delivery: PopDelivery, error: MQTemplateError, event: str) -> None:
        """Try again in a second, until the invisible time is over or the broker is closed."""
        left_ms = self.left_ms(delivery)
        if left_ms == 0 or is_kind(error, (BrokerClosedError, ForkedError)):
            self._drop(delivery, error)
            return
        self._log.log(WARNING, event, reason=safe_text(error), msg_id=delivery.message.msg_id, visible_in_ms=left_ms)
        delivery.due_ms = self._clock.steady_ms() + min(_RETRY_MS, left_ms)
        self._wake()


def _order_of(message: MessageExt) -> Hashable:
    """Return what the messages of one order have in common: the ``hash_key``, else the queue."""
    key = message.properties.get(Property.SHARDING_KEY)
    return (message.topic, key) if key else message.message_queue
