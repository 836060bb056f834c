"""What clients of a killed gRPC server know: each answer that they received, and the rules that follow from it.

`bench.grpc_kill` writes it. A message has one body, is sent once, and belongs to one consumer group. A request without
an answer may have had its effect or not: the rules allow both, and nothing else.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from mqtemplate.engine.pop.receipt_handle import ReceiptHandle


class Answer(Enum):
    """State of a request."""

    NONE = "none"
    """It was not sent, or it was refused."""
    UNKNOWN = "unknown"
    """No answer has arrived."""
    OK = "ok"


class Kind(Enum):
    """Faults that the rules find, in words of the report."""

    LOST = "messages lost though the send was answered"
    AGAIN = "delivered again though the acknowledgement was answered"
    TWICE = "stored twice though sent once"
    ORDER = "delivered out of the order of their message group"
    EARLY = "delivered again before the invisible time was over"
    DELAYED_EARLY = "delivered before their delivery time"
    ATTEMPT = "wrong delivery attempts"
    ROLLED_BACK = "delivered though rolled back or recalled"
    CHECKED = "checked after the end of the transaction was answered"
    REFUSED = "refused though the receipt handle was valid"
    DEAD = "dead letters without a reason"
    RENEWED = "renewed for hours though no client has them"
    UNEXPECTED = "unexpected answers, hangs and exits"


class Delivery(NamedTuple):
    """A delivery as its client received it.

    Attributes:
        started_ms: Time at which the receive was sent.
        stored_ms: Store timestamp of the record: of its copy, if it is from a retry topic. 0 if the client hides it.
        number: Number of the receive. Messages of one receive have the same.
    """

    body: str
    handle: ReceiptHandle
    attempt: int
    started_ms: int
    stored_ms: int
    number: int


@dataclass(slots=True)
class Entry:
    """One message.

    Attributes:
        series: Message group, and number in it; None without one.
        due_ms: Delivery time of a delayed message.
        sent: The send.
        end: The end of a transaction, or the recall of a delayed message. An open transaction is checked.
        is_wanted: False: a transaction that is rolled back.
        done: The acknowledgement, or the move to the dead letters by the client.
        before: The same before the last request: it is so again if that is refused. An earlier request without an
            answer may have ended the message, and its handle is not valid for ever.
        position: Queue and queue offset at which it was delivered first.
        last: The last delivery that a client received.
        counts: The last delivery counts as an attempt; None if it may.
        is_first: When it was delivered last, no earlier message of its message group was open.
        earliest_ms: Time before which no further delivery is allowed.
        latest_ms: Time at which it is due again; None if a request without an answer may have changed it.
        failed: Number of receives of the group without an answer when the last delivery arrived.
        is_dead: It was found among the dead letters.
    """

    body: str
    topic: str
    series: tuple[str, int] | None = None
    due_ms: int = 0
    sent: Answer = Answer.UNKNOWN
    end: Answer = Answer.NONE
    end_ms: int = 0
    is_wanted: bool = True
    done: Answer = Answer.NONE
    before: Answer = Answer.NONE
    is_forwarded: bool = False
    position: tuple[int, int] | None = None
    last: Delivery | None = None
    counts: bool | None = True
    is_first: bool = True
    earliest_ms: int = 0
    latest_ms: int | None = None
    failed: int = 0
    is_dead: bool = False

    @property
    def must_come(self) -> bool:
        """True if the message is not lost only if it is delivered again, or is a dead letter."""
        is_there = self.sent is Answer.OK or self.last is not None
        return is_there and self.is_wanted and self.done is Answer.NONE and not self.is_dead


class Ledger:
    """All messages, and the faults. Thread-safe.

    Args:
        max_attempts: Topic -> deliveries that count before a message is a dead letter.

    Attributes:
        counts: Actions that were answered, by name.
        late_ms: How long each further delivery was late.
        latest: The one that was late the longest.
        ready_ms: Time at which the last start of the server ended.
    """

    def __init__(self, max_attempts: dict[str, int]) -> None:
        self.max_attempts = max_attempts
        self.counts: Counter[str] = Counter()
        self.late_ms: list[int] = []
        self.latest = ""
        self.ready_ms = 0
        self._lock = threading.Lock()
        self._entries: dict[str, Entry] = {}
        self._series: dict[tuple[str, str], list[Entry]] = {}
        self._failed: Counter[str] = Counter()
        self._faults: dict[Kind, list[str]] = {kind: [] for kind in Kind}

    # --- faults --------------------------------------------------------------------------------

    def faults(self) -> dict[Kind, list[str]]:
        """Return the faults by kind."""
        with self._lock:
            return {kind: list(found) for kind, found in self._faults.items()}

    def fault(self, kind: Kind, text: str) -> None:
        """Note a fault."""
        with self._lock:
            self._faults[kind].append(text)

    def _fault(self, kind: Kind, entry: Entry, text: str) -> None:
        self._faults[kind].append(f"{entry.body}: {text}; {entry}")

    # --- producers -----------------------------------------------------------------------------

    def sending(self, entry: Entry) -> None:
        """Note a message before it is sent."""
        with self._lock:
            self._entries[entry.body] = entry
            if entry.series is not None:
                self._series.setdefault((entry.topic, entry.series[0]), []).append(entry)

    def sent(self, body: str) -> None:
        """Note the answer to a send."""
        with self._lock:
            self._entries[body].sent = Answer.OK
            self.counts["sent"] += 1

    def ending(self, body: str, *, is_wanted: bool) -> None:
        """Note the end of a transaction, or a recall, before it is requested."""
        with self._lock:
            entry = self._entries[body]
            if entry.end is Answer.NONE:
                entry.end, entry.is_wanted = Answer.UNKNOWN, is_wanted

    def ended(self, body: str, now_ms: int, action: str) -> None:
        """Note that an end is answered."""
        with self._lock:
            entry = self._entries[body]
            if entry.end is not Answer.OK:
                entry.end, entry.end_ms = Answer.OK, now_ms
            self.counts[action] += 1

    def not_recalled(self, body: str) -> None:
        """Note that a recall was refused: the message was delivered before."""
        with self._lock:
            entry = self._entries[body]
            entry.end, entry.is_wanted = Answer.NONE, True

    def checked(self, body: str, stored_ms: int) -> bool:
        """Note a transaction check, and return True if the transaction is to be committed.

        Args:
            stored_ms: Store timestamp of the half message: the server stores it again with each check.
        """
        with self._lock:
            entry = self._entries[body]
            self.counts["checks"] += 1
            if entry.end is Answer.OK and stored_ms > entry.end_ms:
                self._fault(Kind.CHECKED, entry, f"checked at {stored_ms}")
            return entry.is_wanted

    # --- deliveries ----------------------------------------------------------------------------

    def receive_failed(self, topic: str) -> None:
        """Note a receive without an answer: it may have delivered messages."""
        with self._lock:
            self._failed[topic] += 1

    def delivered(self, topic: str, delivery: Delivery, *, is_renewed: bool = False) -> None:
        """Note a delivery, and apply the rules to it.

        Args:
            is_renewed: The server renews it while its client lives: it is never late.
        """
        with self._lock:
            entry = self._entries[delivery.body]
            self.counts["deliveries" if entry.last is None else "further deliveries"] += 1
            self._check_allowed(entry, delivery)
            if entry.last is not None:
                self._check_again(entry, entry.last, delivery)
            self._check_order(entry, delivery)
            if entry.done is not Answer.OK:
                entry.done = Answer.NONE
            handle = delivery.handle
            entry.last, entry.counts, entry.failed = delivery, True, self._failed[topic]
            entry.earliest_ms, entry.latest_ms = handle.expires_ms, None if is_renewed else handle.expires_ms

    def _check_allowed(self, entry: Entry, delivery: Delivery) -> None:
        handle = delivery.handle
        if entry.done is Answer.OK:
            self._fault(Kind.AGAIN, entry, f"delivered by {delivery}")
        if not entry.is_wanted and (entry.end is Answer.OK or entry.topic == "transactions"):
            self._fault(Kind.ROLLED_BACK, entry, f"delivered by {delivery}")
        if handle.pop_ms < entry.due_ms:
            self._fault(Kind.DELAYED_EARLY, entry, f"delivered by {delivery}")
        if not handle.topic_type:
            position = (handle.queue_id, handle.queue_offset)
            if entry.position not in (None, position):
                self._fault(Kind.TWICE, entry, f"delivered from {position}")
            entry.position = position

    def _check_order(self, entry: Entry, delivery: Delivery) -> None:
        """Check that no earlier message of the message group is open, but for those of the same receive.

        And that no later one was delivered since the last delivery of this one, which was not acknowledged.
        """
        entry.is_first = True
        if entry.series is None:
            return
        name, number = entry.series
        series = self._series[entry.topic, name]
        since_ms = -1 if entry.last is None else entry.last.handle.pop_ms
        for later in series[number + 1 :]:
            if later.last is not None and later.last.handle.pop_ms > since_ms:
                if later.last.number != delivery.number:
                    self._fault(Kind.ORDER, entry, f"delivered by {delivery} after {later}")
                break
        for earlier in reversed(series[:number]):
            of_same = earlier.last is not None and earlier.last.number == delivery.number
            if earlier.must_come:
                entry.is_first = False
                if not of_same:
                    self._fault(Kind.ORDER, entry, f"delivered by {delivery} before {earlier}")
                    return
            if earlier.done is Answer.OK and entry.last is not None:
                return  # those before it were checked when it was delivered

    def _check_again(self, entry: Entry, last: Delivery, delivery: Delivery) -> None:
        is_copy = bool(delivery.handle.topic_type) and delivery.stored_ms >= last.handle.pop_ms
        visible_ms = delivery.stored_ms if is_copy else delivery.handle.pop_ms
        if visible_ms < entry.earliest_ms:
            self._fault(Kind.EARLY, entry, f"delivered by {delivery}, {entry.earliest_ms - visible_ms} ms early")
        least = last.attempt + (1 if entry.counts else 0)
        most = least + self._failed[entry.topic] - entry.failed + (entry.counts is None)
        if not least <= delivery.attempt <= most:
            self._fault(Kind.ATTEMPT, entry, f"attempt {delivery.attempt}, expected {least}..{most}: {delivery}")
        if entry.latest_ms is not None and entry.is_first and self._failed[entry.topic] == entry.failed:
            begin_ms = max(entry.latest_ms, self.ready_ms) if is_copy else max(entry.latest_ms, delivery.started_ms)
            late_ms = max(visible_ms - begin_ms, 0)
            if late_ms > max(self.late_ms, default=0):
                self.latest = f"{delivery} was {late_ms} ms late; {entry}"
            self.late_ms.append(late_ms)

    # --- requests for deliveries ---------------------------------------------------------------

    def acking(self, body: str, handle: ReceiptHandle, *, is_forwarded: bool = False) -> None:
        """Note an acknowledgement, or a move to the dead letters, before it is requested."""
        with self._lock:
            entry = self._entries[body]
            if entry.last is not None and entry.last.handle == handle and entry.done is not Answer.OK:
                entry.before, entry.done = entry.done, Answer.UNKNOWN
            entry.is_forwarded = entry.is_forwarded or is_forwarded

    def acked(self, body: str, action: str) -> None:
        """Note that it was answered."""
        with self._lock:
            self._entries[body].done = Answer.OK
            self.counts[action] += 1

    def changing(self, body: str, visible_ms: int, *, counts: bool) -> None:
        """Note a change of the invisible time before it is requested."""
        with self._lock:
            entry = self._entries[body]
            entry.before = entry.done
            entry.earliest_ms, entry.latest_ms = min(entry.earliest_ms, visible_ms), None
            entry.counts = entry.counts if entry.counts == counts else None

    def changed(self, body: str, old: ReceiptHandle, handle: ReceiptHandle, action: str, *, counts: bool) -> None:
        """Note that it was answered: *handle* has the new time."""
        with self._lock:
            entry = self._entries[body]
            self.counts[action] += 1
            if entry.last is None or entry.last.handle != old:
                return  # another receive has the next delivery already
            entry.last = entry.last._replace(handle=handle)
            entry.earliest_ms = entry.latest_ms = handle.expires_ms
            entry.counts = counts

    def refused(self, body: str, handle: ReceiptHandle, now_ms: int) -> None:
        """Note that a request was refused, since the time of the delivery is over."""
        with self._lock:
            entry = self._entries[body]
            self.counts["refused"] += 1
            if entry.last is not None and entry.last.handle == handle:
                entry.done = entry.before if entry.done is Answer.UNKNOWN else entry.done
                if now_ms < min(handle.expires_ms, entry.earliest_ms):
                    self._fault(Kind.REFUSED, entry, f"at {now_ms}")

    def dead_letter(self, body: str) -> None:
        """Note a dead letter, and check that its client asked for it, or that its attempts are used up.

        It may be noted again: it was delivered again, since its acknowledgement had no answer.
        """
        with self._lock:
            entry = self._entries[body]
            if entry.is_dead:
                return
            entry.is_dead = True
            self.counts["dead letters"] += 1
            attempts = 0 if entry.last is None else entry.last.attempt
            attempts += self._failed[entry.topic] - entry.failed
            if not entry.is_forwarded and attempts < self.max_attempts.get(entry.topic, 17):
                self._fault(Kind.DEAD, entry, f"dead after {attempts} attempts")

    # --- the end -------------------------------------------------------------------------------

    def open(self) -> list[Entry]:
        """Return the messages that must still be delivered."""
        with self._lock:
            return [entry for entry in self._entries.values() if entry.must_come]

    def entries(self) -> list[Entry]:
        """Return all messages."""
        with self._lock:
            return list(self._entries.values())

    def compare_dead_letters(self, stored: list[str]) -> None:
        """Note the dead letters that a group has, and check that each is there once."""
        for body, count in Counter(stored).items():
            self.dead_letter(body)
            if count > 1:
                self.fault(Kind.TWICE, f"{body}: {count} dead letters")

    def compare(self, topic: str, stored: list[str]) -> None:
        """Compare the messages that a topic has with those that it must have."""
        found = Counter(stored)
        for entry in self.entries():
            if entry.topic != topic:
                continue
            count = found.pop(entry.body, 0)
            if count > 1:
                self.fault(Kind.TWICE, f"{entry.body}: {count} times in {topic}")
            is_needed = entry.sent is Answer.OK and entry.is_wanted
            is_forbidden = not entry.is_wanted and (entry.end is Answer.OK or topic == "transactions")
            if not count and is_needed:
                self.fault(Kind.LOST, f"{entry.body}: not in {topic}; {entry}")
            if count and is_forbidden:
                self.fault(Kind.ROLLED_BACK, f"{entry.body}: in {topic}; {entry}")
        if found:
            self.fault(Kind.UNEXPECTED, f"{topic} has messages that were not sent: {list(found)[:5]}")
