"""Consumption by POP from the two brokers of a hand-over."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

from mqtemplate.broker import Broker, ConsumerSpec, PopConsumers, ReceivedMessage, Registration
from mqtemplate.errors import BrokerClosedError, BrokerError, MQTemplateError
from mqtemplate.event_log import LimitedLog, get_logger
from mqtemplate.handover.old_broker import (
    OLD_PREFIX,
    WAKE_S,
    Limits,
    PollThread,
    QueueOrder,
    SendDirection,
    has_topic,
    inner_message,
    is_old,
    register_at_both,
    shown_messages,
    spec_at_old,
)
from mqtemplate.message import MessageQueue
from mqtemplate.selectors.tags import Selector
from mqtemplate.user_code import safe_text

_log = get_logger("mqtemplate.handover")
_T = TypeVar("_T")

_GATE_MS = 50
_AWAY_MS = 5_000


class _ReceiveSome(Protocol):
    """Receives up to a number of messages from one broker."""

    def __call__(self, count: int, wait_ms: int = 0) -> list[ReceivedMessage]: ...


class _ReceiveOne(Protocol):
    """Receives from one broker."""

    def __call__(self, wait_ms: int) -> list[ReceivedMessage]: ...


class HandOverPop(PopConsumers):
    """POP over both brokers. A receipt handle of the old one has the prefix ``old:``.

    While neither has messages, a second thread waits for the old one.
    """

    def __init__(self, old: Broker, new: Broker, direction: SendDirection, *, waits_for_pending: bool) -> None:
        self._old, self._new = old, new
        self._direction = direction
        self._waits_for_pending = waits_for_pending
        self._orders: dict[str, QueueOrder] = {}
        self._wakes: Counter[str] = Counter()
        self._at_old: dict[str, bool] = {}
        self._away_until_ms: dict[Broker, int] = {}  # steady
        self._log = LimitedLog(_log, new.clock.steady_ms, burst=1)
        self._new_is_first = False

    def join(self, spec: ConsumerSpec) -> Registration:
        if spec.group not in self._orders:
            self._orders[spec.group] = QueueOrder(
                self._old, self._new, spec.group, self._direction, waits_for_pending=self._waits_for_pending
            )
        of_old = spec_at_old(self._old, spec)
        if of_old is None:
            return self._new.pop.join(spec)
        return register_at_both(lambda: self._old.pop.join(of_old), lambda: self._new.pop.join(spec))

    def _is_at_old(self, topic: str) -> bool:
        known = self._at_old.get(topic)
        if known is None:
            known = self._at_old[topic] = has_topic(self._old, topic)  # nothing adds topics to an embedded old broker
        return known

    def receive(
        self,
        group: str,
        topic: str,
        max_count: int,
        invisible_ms: int,
        wait_ms: int,
        selector: Selector | None,
        *,
        is_ordered: bool = False,
        attempt_id: str = "",
        auto_renew: bool = False,
    ) -> list[ReceivedMessage]:
        options: dict[str, Any] = {"is_ordered": is_ordered, "attempt_id": attempt_id, "auto_renew": auto_renew}

        def receive_from(broker: Broker, count: int, wait_ms: int) -> list[ReceivedMessage]:
            def receive(wait_ms: int) -> list[ReceivedMessage]:
                return broker.pop.receive(group, topic, count, invisible_ms, wait_ms, selector, **options)

            return self._in_order(broker, group, topic, receive, wait_ms) if is_ordered else receive(wait_ms)

        def receive_old(count: int, wait_ms: int = 0) -> list[ReceivedMessage]:
            found = receive_from(self._old, count, wait_ms)
            shown_messages([each.message for each in found])
            return [replace(each, receipt=OLD_PREFIX + each.receipt) for each in found]

        def receive_new(count: int, wait_ms: int = 0) -> list[ReceivedMessage]:
            return receive_from(self._new, count, wait_ms)

        if not self._is_at_old(topic):  # nothing is sent to the old one for it either
            return receive_new(max_count, wait_ms)
        of_old, of_new = self._while_away(self._old, receive_old), self._while_away(self._new, receive_new)
        messages: list[ReceivedMessage] = []
        self._new_is_first = not self._new_is_first
        for receive in (of_new, of_old) if self._new_is_first else (of_old, of_new):
            if len(messages) < max_count:
                messages += receive(max_count - len(messages))
        if messages or wait_ms <= 0 or self._new.clock.is_virtual:
            return messages
        found_old, found_new = self._wait_for_both(
            group, topic, partial(of_old, max_count), partial(of_new, max_count), wait_ms
        )
        excess = found_old[max(0, max_count - len(found_new)) :]
        if excess:
            self.change_all(group, topic, [each.receipt for each in excess], 0, counts=False)
        return found_new + found_old[: len(found_old) - len(excess)]

    def _in_order(
        self, broker: Broker, group: str, topic: str, receive: _ReceiveOne, wait_ms: int
    ) -> list[ReceivedMessage]:
        """Receive what may be read now of the messages of one broker, see `QueueOrder`; let the others come later."""
        order, index = self._orders[group], 0 if broker is self._old else 1
        limits = order.limits(topic)[index]
        if limits.by_queue is not None:
            if order.is_consumed(broker, limits):
                time.sleep(min(wait_ms, _GATE_MS) / 1_000)
                return []
            wait_ms = min(wait_ms, order.interval_ms)
        found = receive(wait_ms)
        limits = order.limits(topic)[index]  # the sends may have changed since
        allowed = [each for each in found if _may_be_read(limits, each)]
        if len(allowed) < len(found):
            later = [each.receipt for each in found if not _may_be_read(limits, each)]
            broker.pop.change_all(group, topic, later, 0, counts=False)
        return allowed

    def _while_away(self, broker: Broker, receive: _ReceiveSome) -> _ReceiveSome:
        """Return a function that receives nothing for some seconds after a broker could not be reached.

        So the messages of the other one do not wait for it. If both are away, the error is raised.
        """
        other = self._new if broker is self._old else self._old

        def receive_if_there(count: int, wait_ms: int = 0) -> list[ReceivedMessage]:
            now_ms = self._new.clock.steady_ms()
            if now_ms < self._away_until_ms.get(broker, now_ms):
                time.sleep(min(wait_ms, _GATE_MS) / 1_000)
                return []
            try:
                return receive(count, wait_ms)
            except BrokerClosedError:
                raise
            except BrokerError as exc:
                if now_ms < self._away_until_ms.get(other, now_ms):
                    raise
                self._away_until_ms[broker] = now_ms + _AWAY_MS
                self._log.warning("hand_over.receive_failed", broker=broker.name, reason=str(exc))
                return []

        return receive_if_there

    def _wait_for_both(
        self, group: str, topic: str, of_old: _ReceiveOne, of_new: _ReceiveOne, wait_ms: int
    ) -> tuple[list[ReceivedMessage], list[ReceivedMessage]]:
        """Wait for the first messages of either broker. Return those of the old one, and those of the new one.

        A wake is for calls that wait already. So it is repeated until the other call has ended.
        """
        wakes, deadline = self._wakes[group], time.monotonic() + wait_ms / 1_000
        is_found, has_ended = threading.Event(), threading.Event()

        def wait(receive: _ReceiveOne) -> list[ReceivedMessage]:
            while not is_found.is_set() and self._wakes[group] == wakes and (left := deadline - time.monotonic()) > 0:
                if found := receive(round(left * 1_000)):
                    return found
            return []

        def wait_for_old() -> list[ReceivedMessage]:
            try:
                return wait(of_old)
            finally:
                is_found.set()
                while not has_ended.is_set():
                    self._new.pop.wake(group)
                    has_ended.wait(WAKE_S)

        thread = PollThread(group, wait_for_old)
        found_new: list[ReceivedMessage] = []
        try:
            found_new = wait(of_new)
        finally:
            is_found.set()
            has_ended.set()
            found_old = thread.end(lambda: self._old.pop.wake(group))
        if isinstance(found_old, BaseException):
            if not found_new:
                raise found_old
            _log.warning("hand_over.receive_failed", group=group, topic=topic, reason=safe_text(found_old))
            found_old = []
        return found_old, found_new

    def wake(self, group: str) -> None:
        self._wakes[group] += 1
        self._old.pop.wake(group)
        self._new.pop.wake(group)

    def ack_all(self, group: str, topic: str, receipts: Sequence[str]) -> list[MQTemplateError | None]:
        return self._at_both(receipts, lambda broker, inner: broker.pop.ack_all(group, topic, inner))

    def change_all(
        self, group: str, topic: str, receipts: Sequence[str], invisible_ms: int, *, counts: bool = True
    ) -> list[str | MQTemplateError]:
        def change(broker: Broker, inner: Sequence[str]) -> list[str | MQTemplateError]:
            changed = broker.pop.change_all(group, topic, inner, invisible_ms, counts=counts)
            return [OLD_PREFIX + each if broker is self._old and isinstance(each, str) else each for each in changed]

        return self._at_both(receipts, change)

    def _at_both(self, receipts: Sequence[str], call: Callable[[Broker, Sequence[str]], Sequence[_T]]) -> list[_T]:
        """Call each broker with its receipt handles. Return the results in the order of *receipts*."""
        results: dict[str, _T] = {}
        for broker, mine in (
            (self._old, [each for each in receipts if is_old(each)]),
            (self._new, [each for each in receipts if not is_old(each)]),
        ):
            if mine:
                results |= zip(mine, call(broker, [each.removeprefix(OLD_PREFIX) for each in mine]), strict=True)
        return [results[each] for each in receipts]

    def dead_letter(
        self, group: str, topic: str, received: ReceivedMessage, properties: Mapping[str, str] | None = None
    ) -> None:
        if is_old(received.receipt):
            inner = ReceivedMessage(
                inner_message(received.message), received.receipt.removeprefix(OLD_PREFIX), received.attempt
            )
            self._old.pop.dead_letter(group, topic, inner, properties)
        else:
            self._new.pop.dead_letter(group, topic, received, properties)


def _may_be_read(limits: Limits, received: ReceivedMessage) -> bool:
    message = received.message
    limit = limits.of(MessageQueue(message.topic, message.broker_name, message.queue_id))
    return limit is None or message.queue_offset < limit
