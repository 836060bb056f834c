"""Memberships of the two request modes: pulling from assigned queues, and receiving by POP."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from mqtemplate.broker import Broker
from mqtemplate.errors import BrokerClosedError, CorruptRecordError, ForkedError, ListenerError, UnsupportedError
from mqtemplate.listener.container.consume_modes import OrderlyConsumeService, PopConsumeService, PullConcurrentService
from mqtemplate.listener.container.consume_service import ConsumeService
from mqtemplate.listener.container.membership import Membership
from mqtemplate.listener.container.pop_deliveries import PopDelivery
from mqtemplate.listener.container.process_queue import ProcessQueues, Repositioning
from mqtemplate.message import MessageExt, MessageQueue, create_unique_id
from mqtemplate.services import Service, ServiceRunner

_LONG_POLL_MS = 20_000
_RETRY_MS = 1_000
_JOIN_S = 10.0


class PullMembership(Membership):
    """Membership that pulls from the queues that are assigned to it, and commits offsets.

    Attributes:
        consumer: The member of the group at the broker.
        queues: Messages that were fetched and are not finished.
    """

    def _join(self, broker: Broker) -> ConsumeService[Any, Any]:
        settings = self.endpoint.settings
        self.consumer = broker.groups.subscribe(settings.consumer_spec(self._clock.now_ms()))
        self.queues = ProcessQueues(self.consumer)
        kind = OrderlyConsumeService if settings.is_orderly else PullConcurrentService
        service = kind(consumer=self.consumer, queues=self.queues, **self._service_arguments())
        self._take: Callable[[Sequence[MessageExt]], None] = service.accept
        self._excluded = service.excluded
        self.wake_fetch = self.consumer.wake
        self._repositioning = Repositioning(broker, self.consumer, self.queues, service.discard_dropped)
        return service

    @property
    def in_flight(self) -> int:
        return self.queues.in_flight

    def positions(self) -> dict[MessageQueue, int | None]:
        return {queue: self.consumer.committed(queue) for queue in self.consumer.assignment()}

    def reposition(self, move: Callable[[Repositioning], None]) -> None:
        self.run_when_polling(lambda: move(self._repositioning))

    def _fetch(self, wait_ms: int) -> bool:
        self.queues.refresh()
        if resets := self.consumer.take_resets():
            self._repositioning.by_administrator(resets)
        without = self._excluded()
        settings = self.endpoint.settings
        try:
            messages = self.consumer.poll(settings.pull_batch_size, wait_ms, without=without)
        except CorruptRecordError as error:
            self._log.error(
                "listener.record_corrupt", file=str(error.path), offset=error.physical_offset, reason=error.reason
            )
            return True
        if not messages:
            self.queues.commit_positions(without)
            return False
        self._take(messages)
        if settings.pull_interval:
            self._next_poll_ms = self._clock.steady_ms() + settings.pull_interval
        return True

    def _leave(self) -> None:
        try:
            self.queues.commit()
        except (BrokerClosedError, ForkedError):
            self._log.warning("listener.commit_failed", reason="the broker was closed first")
        finally:
            self.consumer.close()


class PopMembership(Membership):
    """Membership that receives by POP. A message is received only while a handler is free for it.

    On a real clock one thread for each topic waits at the broker. A stop, or a pause by `pause`, lets other members
    have the messages that no handler has.
    """

    def _join(self, broker: Broker) -> ConsumeService[Any, Any]:
        settings = self.endpoint.settings
        try:
            self._pop = broker.pop
        except UnsupportedError as error:
            raise UnsupportedError(f"listener {settings.id}: request_mode=POP cannot be honoured: {error}") from error
        self._settings = settings
        self._number = settings.thread_number
        self._attempt_ids: dict[str, str] = {}
        self._free = threading.Condition()
        self._waiting = 0
        self._arrived: SimpleQueue[list[PopDelivery] | BaseException | None] = SimpleQueue()
        self._receivers: list[threading.Thread] = []
        self.wake_fetch = self._wake_receivers
        self._registration = self._pop.join(settings.consumer_spec(self._clock.now_ms()))
        service = PopConsumeService(pop=self._pop, on_free=self._notify_free, **self._service_arguments())
        self._service, self.deliveries = service, service.deliveries
        self._renewal = ServiceRunner(
            self.deliveries, self._clock, f"mqtemplate-{settings.id}-renewal", self._renewal_failed
        )
        return service

    @property
    def in_flight(self) -> int:
        return len(self.deliveries)

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
        self._renewal.start()
        if self._clock.is_virtual:
            return
        for topic in self._settings.topics:
            name = f"mqtemplate-{self._settings.id}-receive-{topic}"
            self._receivers.append(threading.Thread(target=self._receive_loop, args=(topic,), name=name, daemon=True))
        for thread in self._receivers:
            thread.start()

    def stop(self) -> int:
        for thread in self._receivers:
            if thread is not threading.current_thread():
                thread.join(_JOIN_S)
        return super().stop()

    def resize(self, number: int, maximum: int) -> None:
        self._number = number
        super().resize(number, maximum)
        self._notify_free()

    def _leave(self) -> None:
        self._renewal.stop()
        self._registration.close()

    def _give_back(self) -> None:
        while True:
            try:
                item = self._arrived.get_nowait()
            except Empty:
                break
            if isinstance(item, list):  # an error of a receiving thread means nothing for a member that stops
                self.deliveries.release(item)
        self.deliveries.release(self._service.unstarted())

    def _renewal_failed(self, service: Service, error: Exception, repeated: int) -> None:
        self._log.error("listener.renewal_failed", exc_info=error, repeated=repeated)

    # --- receiving ---------------------------------------------------------------------------------

    def _free_count(self) -> int:
        """Return how many messages may be received now: those that handlers are free for."""
        if not self._may_fetch:
            return 0
        if self._settings.is_orderly:
            return self._settings.pull_batch_size if self._service.order_count < self._number else 0
        size = self.endpoint.take_size if self.endpoint.plan.is_batch else 1
        return min(self._settings.pull_batch_size, self._number * size - len(self.deliveries))

    def _notify_free(self) -> None:
        if self._waiting:
            with self._free:
                self._free.notify_all()

    def _wake_receivers(self) -> None:
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
        return self.deliveries.hold(received)

    def _fetch(self, wait_ms: int) -> bool:
        if self._clock.is_virtual:
            arrived = self._receive_each()
            if arrived and self._settings.pull_interval:
                self._next_poll_ms = self._clock.steady_ms() + self._settings.pull_interval
        else:
            arrived = list(self._take_arrived(wait_ms / 1_000))
        for deliveries in arrived:
            self._service.accept(deliveries)
        return bool(arrived)

    def _receive_each(self) -> list[list[PopDelivery]]:
        return [
            deliveries
            for topic in self._settings.topics
            if (count := self._free_count()) > 0 and (deliveries := self._receive(topic, count, 0))
        ]

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
