"""Delayed messages of a broker: their services, changes, and queries, and the level table that was changed live."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from mqtemplate.broker import BrokerLifecycle, QueuedMessage
from mqtemplate.delay.control import DelayController
from mqtemplate.delay.delay_store import DelayStore
from mqtemplate.delay.pending import NO_LIMIT, PendingView, ScanLimit
from mqtemplate.delay.pending_rows import LatenessCauses
from mqtemplate.delay.recall_handle import decode_handle, new_handle
from mqtemplate.delay.schedule_message_service import ClockCorrection, ScheduleMessageService
from mqtemplate.delay.settings import DelayLevels, TimerSettings
from mqtemplate.delay.timers.timer_message_store import TimerMessageStore
from mqtemplate.engine.drafts import DraftMaker
from mqtemplate.engine.settings import EmbeddedSettings
from mqtemplate.engine.topics import TopicRoutes
from mqtemplate.errors import ConfigurationError, MessageError, SendError, StoreError, StoreFormatError
from mqtemplate.event_log import get_logger
from mqtemplate.message import MessageQueue, offset_msg_id
from mqtemplate.pending import (
    ConditionalSend,
    PendingCounts,
    PendingPage,
    PendingQuery,
    PendingState,
    ScheduleChange,
    ScheduleChangeStatus,
)
from mqtemplate.record.appends import PutBatch
from mqtemplate.record.codec import RecordDraft
from mqtemplate.results import SendResult, SendStatus
from mqtemplate.services import Service
from mqtemplate.store.checkpoint import LogFollower
from mqtemplate.store.files.store_files import StoreFiles
from mqtemplate.store.message_store import MessageStore
from mqtemplate.store.tables import format_errors, read_table, write_table

_log = get_logger("mqtemplate.broker")


class ChangedDelayLevels:
    """The level table of a change at run time, in the store directory: it survives a restart.

    It is in force as long as the configuration has the table that it had at the time of the change. So the later change
    wins, of this one and of an edit of the configuration. RocketMQ writes a change into its property file, which a
    broker here leaves to its author.

    Args:
        configured: The table of the configuration.
    """

    FILE = "config/delayLevels.json"

    def __init__(self, store_files: StoreFiles, configured: DelayLevels) -> None:
        self._store_files = store_files
        self._configured = configured

    def in_force(self) -> DelayLevels:
        """Return the level table for a start.

        Raises:
            StoreFormatError: The file cannot be read.
        """
        table, configured = read_table(self._store_files, self.FILE), self._configured
        if not table:
            return configured
        with format_errors(self.FILE):
            changed, before = str(table["messageDelayLevel"]), str(table["configuredDelayLevel"])
        if before != configured.text:
            _log.info("delay_levels.change_ignored", levels=configured.text, changed=changed, configured_then=before)
            return configured
        try:
            levels = DelayLevels.parse(changed, is_clamping=configured.is_clamping)
        except ConfigurationError as exc:
            raise StoreFormatError(f"{self.FILE}: {exc}; correct it, or delete the file and its .bak") from exc
        _log.info(
            "delay_levels.change_restored",
            levels=levels.text,
            configured=configured.text,
            hint="they were changed while the broker ran; an edit of mqtemplate.broker.message-delay-level wins again",
        )
        return levels

    def keep(self, levels: DelayLevels) -> None:
        """Store a change at run time."""
        if levels.text == self._configured.text:
            self._forget()
            return
        table = {"messageDelayLevel": levels.text, "configuredDelayLevel": self._configured.text}
        write_table(self._store_files, self.FILE, table)

    def configure(self, levels: DelayLevels, *, is_open: bool) -> None:
        """Take the table that the configuration has now. It replaces a change at run time.

        Args:
            is_open: The broker runs, so the files are its own.
        """
        self._configured = levels
        if is_open:
            self._forget()

    def _forget(self) -> None:
        for name in (self.FILE, f"{self.FILE}.bak"):
            self._store_files.delete(name)


class NotRecallableError(MessageError):
    """A message cannot be recalled: the handle is for another broker or topic, or the message was delivered already."""


class _QueuedDraft(NamedTuple):
    """The record of a message that is stored together with a change."""

    draft: RecordDraft
    msg_id: str
    queue: MessageQueue


class LocalDelayedMessages:
    """The delayed messages of one broker: those with a level, and timers.

    Each method raises `BrokerClosedError` if the broker is not running.

    Attributes:
        release_causes: Explains why messages were released late.
        control: Changes pending messages.
        timers: The messages without a level. The engine closes their files.
        followers: The parts whose state is derived from the log.
    """

    def __init__(
        self,
        store: MessageStore,
        settings: EmbeddedSettings,
        topic_names: Callable[[], Sequence[str]],
        lifecycle: BrokerLifecycle,
        routes: TopicRoutes,
        drafts: DraftMaker,
    ) -> None:
        self._lifecycle = lifecycle
        self._store, self._routes, self._drafts, self._host = store, routes, drafts, settings.listen_host
        self._broker_name = settings.broker_name
        limits = settings.timer_limits()
        self.release_causes = causes = LatenessCauses(store.metrics)
        self._schedule = ScheduleMessageService(store, limits.precision_ms, causes)
        self.timers = TimerMessageStore(
            store,
            TimerSettings(
                precision_ms=limits.precision_ms,
                roll_window_slots=settings.timer_roll_window_slot,
                log_file_size=settings.mapped_file_size_timer_log,
            ),
            causes,
            settings.topic_shapes,
        )
        self.followers: list[LogFollower] = [self._schedule, self.timers]
        delay_stores: list[DelayStore] = [self._schedule, self.timers]
        self.control = DelayController(store, delay_stores, limits, settings.broker_name)
        self._clock_correction = ClockCorrection(store, delay_stores, self.control.release_now)
        self._pending = PendingView(store, delay_stores, topic_names, settings.broker_name)
        store.cleaning.on_cleaned.append(self.timers.delete_before)

    # --- life ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start both delay stores, after the message store was loaded."""
        self._schedule.start()
        self.timers.start()

    def services(self) -> list[Service]:
        """Return the services that release messages."""
        return [self._schedule, self.timers, self._clock_correction]

    # --- changes and queries -------------------------------------------------------------------

    def waiting_count(self) -> int:
        """Return the number of pending messages. It is kept for each slot and level, so no message is read."""
        return self._schedule.count_pending() + self.timers.count_pending()

    def level_positions(self) -> dict[int, int]:
        """Return the queue offset of the first pending message of each delay level that was used."""
        with self._schedule.lock:
            return self._schedule.positions

    def cancel(
        self,
        handle: str | None = None,
        *,
        key: str | None = None,
        topic: str | None = None,
        then: Sequence[QueuedMessage] = (),
        namespace: str | None = None,
    ) -> ScheduleChange:
        """See `DelayedMessages.cancel`.

        Args:
            namespace: With *key*: only messages for topics of this namespace of remote clients.
        """
        self._lifecycle.check()
        if then:
            return self._change_together(handle, key, topic, namespace, then, None)
        return self.control.cancel(handle, key, topic, namespace)

    def reschedule(
        self,
        handle: str | None = None,
        deliver_ms: int = 0,
        *,
        key: str | None = None,
        topic: str | None = None,
        then: Sequence[QueuedMessage] = (),
        namespace: str | None = None,
    ) -> ScheduleChange:
        """See `DelayedMessages.reschedule`; *namespace* as in `cancel`."""
        self._lifecycle.check()
        if then:
            return self._change_together(handle, key, topic, namespace, then, deliver_ms)
        return self.control.reschedule(handle, deliver_ms, key, topic, namespace)

    def _change_together(
        self,
        handle: str | None,
        key: str | None,
        topic: str | None,
        namespace: str | None,
        then: Sequence[QueuedMessage],
        deliver_ms: int | None,
    ) -> ScheduleChange:
        made = self._made(then)
        drafts = [each.draft for each in made]
        try:
            change, puts, topics = self.control.change_together(handle, key, topic, namespace, drafts, deliver_ms)
        except StoreError as exc:
            raise SendError(f"nothing was changed or stored: {exc}") from exc
        return change if puts is None else replace(change, sent=self._results(made, puts, topics))

    def send_if(
        self,
        messages: Sequence[QueuedMessage],
        state: PendingState,
        handle: str | None = None,
        *,
        key: str | None = None,
        topic: str | None = None,
        namespace: str | None = None,
    ) -> ConditionalSend:
        """See `DelayedMessages.send_if`; *namespace* as in `cancel`."""
        self._lifecycle.check()
        made = self._made(messages)
        drafts = [each.draft for each in made]
        try:
            found, puts = self.control.put_if(drafts, state, handle, key, topic, namespace)
        except StoreError as exc:
            raise SendError(f"not stored: {exc}") from exc
        topics = {draft.topic for draft in drafts}
        return ConditionalSend(found, () if puts is None else self._results(made, puts, topics))

    def _made(self, messages: Sequence[QueuedMessage]) -> list[_QueuedDraft]:
        """Return the records of messages that are stored together with a change."""
        made = []
        for message, queue in messages:
            target = self._routes.select(message.topic, queue)
            draft, msg_id = self._drafts.make(message, target.queue_id, self._store.clock.now_ms())
            if draft.pending is not None:
                raise MessageError(
                    f"the message for {message.topic!r} has the pending key {draft.pending.key!r}; a message that is "
                    "stored together with a change cannot have one, remove it"
                )
            if draft.topic != message.topic:
                self._store.prepare(message.topic, target.queue_id)
            made.append(_QueuedDraft(draft, msg_id, target))
        return made

    def _results(self, made: Sequence[_QueuedDraft], puts: PutBatch, topics: Collection[str]) -> tuple[SendResult, ...]:
        """Wait until an append is durable, and return the results of its first records.

        Raises:
            SendError: The flush failed: all of it is stored, and may be lost with the power.
        """
        try:
            is_safe = self._store.confirm(puts.end, topics)
        except StoreError as exc:
            raise SendError(f"changed and stored, but not durable: {exc}") from exc
        return tuple(
            SendResult(
                SendStatus.SEND_OK if is_safe else SendStatus.FLUSH_DISK_TIMEOUT,
                msg_id,
                offset_msg_id(self._host, put.physical_offset),
                target,
                put.queue_offset,
                handle=new_handle(target.topic, self._broker_name, draft, put),
            )
            for (draft, msg_id, target), put in zip(made, puts, strict=False)
        )

    def recall(self, topic: str, handle_text: str) -> str:
        """Cancel a message for *topic*, as its producer requests. Unlike RocketMQ, refuse it for a delivered message.

        Returns:
            The message id.

        Raises:
            NotRecallableError: The message is not pending here.
        """
        try:
            handle = decode_handle(handle_text)
        except MessageError as exc:
            raise NotRecallableError(str(exc)) from exc
        if (handle.topic, handle.broker_name) != (topic, self._broker_name):
            raise NotRecallableError(
                f"the handle is for topic {handle.topic!r} of broker {handle.broker_name!r}, not for {topic!r} of "
                f"{self._broker_name!r}"
            )
        status = self.cancel(handle_text).status
        if status is not ScheduleChangeStatus.CANCELLED:
            reason = {
                ScheduleChangeStatus.ALREADY_DELIVERED: "it was delivered already",
                ScheduleChangeStatus.MOVED: "a hand-over moves it to another broker; recall it there",
            }.get(status, "this broker has no such delayed message")
            raise NotRecallableError(f"message {handle.msg_id} cannot be recalled: {reason}")
        return handle.msg_id

    def pending(
        self,
        query: PendingQuery,
        max_count: int = 100,
        cursor: str | None = None,
        *,
        on_compared: Callable[[int], None] | None = None,
    ) -> PendingPage:
        """See `DelayedMessages.pending`."""
        return self.pending_step(query, max_count, cursor, _reported_to(on_compared))

    def pending_step(self, query: PendingQuery, max_count: int, cursor: str | None, limit: ScanLimit) -> PendingPage:
        """Return the pending messages after *cursor*, up to *limit*; see `PendingView.page`."""
        self._lifecycle.check()
        return self._pending.page(query, max_count, cursor, limit)

    def count_pending(
        self,
        query: PendingQuery,
        bucket_ms: int = 60_000,
        *,
        on_compared: Callable[[int], None] | None = None,
    ) -> PendingCounts:
        """See `DelayedMessages.count_pending`."""
        self._lifecycle.check()
        return self._pending.count(query, bucket_ms, _reported_to(on_compared))

    def count_pending_step(
        self, query: PendingQuery, bucket_ms: int, cursor: str | None, limit: ScanLimit, max_buckets: int
    ) -> tuple[PendingCounts, str | None]:
        """Count the pending messages after *cursor*, up to *limit*; see `PendingView.count_step`.

        Args:
            max_buckets: Most time spans in the result.

        Raises:
            MessageError: There are more spans, or *bucket_ms* is below 1.
        """
        self._lifecycle.check()
        return self._pending.count_step(query, bucket_ms, cursor, limit, max_buckets=max_buckets)

    def pending_positions(self, query: PendingQuery, after: tuple[int, int], max_count: int) -> bytes:
        """Return where the records of pending messages are, for readers of the files; see `PendingView.positions`."""
        return self.positions(query, after, max_count).tobytes()

    def positions(self, query: PendingQuery, after: tuple[int, int], max_count: int) -> np.ndarray:
        """Return the same as an array of `PENDING_DTYPE`."""
        self._lifecycle.check()
        return self._pending.positions(query, after, max_count)


def _reported_to(on_compared: Callable[[int], None] | None) -> ScanLimit:
    return NO_LIMIT if on_compared is None else ScanLimit(on_read=on_compared)
