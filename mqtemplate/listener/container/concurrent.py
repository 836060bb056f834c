"""Consume service for ``CONCURRENTLY``: messages are handled side by side; a failed one is sent back to the broker."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from mqtemplate.durations import format_ms
from mqtemplate.listener.container.consume_service import ConsumeService, ReplaceThread, RunningCall
from mqtemplate.listener.container.process_queue import ProcessQueue
from mqtemplate.listener.failures.failure import Decision, Failure, NextStep, raise_if_not_of_handler
from mqtemplate.message import MessageExt

_Delivery = tuple[ProcessQueue, MessageExt]

_SEND_BACK_RETRY_MS = 5_000
_COMMIT_EVERY = 32


class ConcurrentConsumeService(ConsumeService[_Delivery, _Delivery]):
    """One queue of messages, from which every consume thread takes the next.

    - A failed message is sent back with the delay that the failure policy decides, or to the dead letter topic. If the
      broker does not take it, it is handled here again after 5 s.
    - In a broadcasting group a failed message is reported and dropped, as RocketMQ does.
    - A queue is committed up to its first unfinished message, after about 32 messages or when no message is ready.

    Source: RocketMQ ``client: ConsumeMessageConcurrentlyService``.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._uncommitted = 0  # messages finished since the last commit; roughly, since threads share it

    def accept(self, messages: Sequence[MessageExt]) -> None:
        of, ready = self.queues.of, self._ready
        for message in messages:
            process = of(message)
            if process.add(message):
                ready.append((process, message))

    def check_hanging(self, replace_thread: ReplaceThread) -> None:
        """Report hanging handlers, send back their messages, and replace their threads."""
        for running in self._watchdog.hanging():
            if not running.take_away(replace_thread):
                continue
            messages = [message for _, message in running.work]
            blocked_ms, stack = self.clock.steady_ms() - running.since_ms, self._stack_of(running)
            decisions = [self.policy.decide(message, None) for message in messages]
            error = TimeoutError(f"the handler has not returned after {format_ms(blocked_ms)}")
            for (process, message), decision in zip(running.work, decisions, strict=True):
                self._finish_failed(process, message, decision, error)
            self.failures.blocked(messages, blocked_ms, stack, decisions[0].next_step.value)

    def discard_dropped(self) -> None:
        with self._delayed_lock:
            self._delayed = [each for each in self._delayed if not each[2][0].dropped]
            heapq.heapify(self._delayed)

    def run_next(self) -> bool:
        work = self._take()
        if not work:
            return False
        self.taken += 1
        if not self._handle(work):
            self.queues.commit()  # the listener pauses, perhaps for long
            return False
        self._uncommitted += len(work)
        if not self._ready or self._uncommitted >= _COMMIT_EVERY:
            self._commit()
        return True

    def _commit(self) -> None:
        self._uncommitted = 0
        self.queues.commit()

    def begin_next(self) -> RunningCall[_Delivery] | None:
        """Take the next message, for a task on an event loop. Return None if none is ready, or the listener pauses."""
        work = self._take()
        if not work:
            return None
        running = self._watchdog.start(work, -next(self._numbers) - 1)
        if not self.is_paused:
            return running
        if self._watchdog.finish(running):
            self._ready.extendleft(work)
        return None

    def give_back(self, running: RunningCall[_Delivery]) -> None:
        """Make a message of `begin_next` ready again that was not handled."""
        if self._watchdog.finish(running):
            self._ready.extendleft(running.work)

    def end(self, running: RunningCall[_Delivery], failure: Failure | None) -> None:
        """Settle a message of `begin_next`. It waits for the broker only if there is a failure."""
        if not self._watchdog.finish(running):
            return  # the message was sent back while the handler hung
        [(process, message)] = running.work
        if failure is None:
            process.finish(message.queue_offset)
        else:
            self._settle_failed(list(running.work), [failure])
        self._uncommitted += 1
        if not self._ready or self._uncommitted >= _COMMIT_EVERY:
            self._commit()

    def _take(self) -> list[_Delivery]:
        ready, missing = self._ready, self._take_size
        work: list[_Delivery] = []
        try:
            while missing:
                delivery = ready.popleft()
                if not delivery[0].dropped:
                    work.append(delivery)
                    missing -= 1
        except IndexError:
            pass  # another thread took the last one
        return work

    def _handle(self, work: list[_Delivery]) -> bool:
        """Call the handler. Return False if the listener was paused instead."""
        running = self._watchdog.start(work)
        if self.is_paused:
            if self._watchdog.finish(running):
                self._ready.extendleft(reversed(work))
            return False
        try:
            if self._is_batch:
                failures = self.invocation.handle([message for _, message in work])
            else:
                failure = self.invocation.handle_one(work[0][1])
                failures = [] if failure is None else [failure]
        except BaseException as error:
            try:
                failures = self._failed_around(running, [message for _, message in work], error)
            except BaseException:
                self._ready.extendleft(reversed(work))  # nothing is settled: they are handled again
                raise
        if not self._watchdog.finish(running):
            return True  # the messages were sent back while the handler hung
        if failures:
            return self._settle_failed(work, failures)
        for process, message in work:
            process.finish(message.queue_offset)
        return True

    def _settle_failed(self, work: list[_Delivery], failures: Sequence[Failure]) -> bool:
        """Send back the messages that failed; the others are done. Return False if the listener pauses instead."""
        if self._pauses(failures):
            self._ready.extendleft(reversed(work))
            return False
        try:
            failed = self._send_back_failed(work, failures)
        except BaseException:  # an error of this library, or Ctrl-C
            for process, message in work:
                if message.queue_offset in process:
                    self._delay((process, message), _SEND_BACK_RETRY_MS)
            raise
        for process, message in work:
            if id(message) not in failed:
                process.finish(message.queue_offset)
        return True

    def _send_back_failed(self, work: list[_Delivery], failures: Sequence[Failure]) -> frozenset[int]:
        """Send back the messages that failed, and then report them. Return their `id`s."""
        processes = {id(message): process for process, message in work}
        for failure in failures:
            decisions = [self.policy.decide(message, failure.error) for message in failure.messages]
            for message, decision in zip(failure.messages, decisions, strict=True):
                process = processes[id(message)]
                # A reassigned queue is read by its new owner. Sending back would duplicate the message.
                if not process.dropped or process.superseded:
                    self._finish_failed(process, message, decision, failure.error)
            self.failures.failed(failure, decisions[0])
        return frozenset(id(message) for failure in failures for message in failure.messages)

    def _finish_failed(
        self, process: ProcessQueue, message: MessageExt, decision: Decision, error: BaseException | None
    ) -> None:
        """Send a message back; if the broker does not take it, delay it here and handle it again."""
        if decision.next_step is not NextStep.DROPPED:
            try:
                self._send_back.send(message, decision, error)
            except BaseException as refusal:
                raise_if_not_of_handler(refusal)
                self.failures.send_back_failed(message, refusal, _SEND_BACK_RETRY_MS)
                message.reconsume_times += 1
                self._delay((process, message), _SEND_BACK_RETRY_MS)
                return
        process.finish(message.queue_offset)
