"""Dead letters of a broker: list, compare, send again, purge."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from mqtemplate.admin.broker_admin import BrokerAdmin, unknown
from mqtemplate.admin.dead_letters.letter import DeadLetter, LetterEdit, LetterState, resent_message
from mqtemplate.admin.dead_letters.marks import Marks
from mqtemplate.admin.messages import MessageSearch
from mqtemplate.admin.pace import OnProgress, no_progress, paced
from mqtemplate.admin.values import TopicKind
from mqtemplate.errors import MessageError, UnknownNameError
from mqtemplate.message import MessageExt, key_text, split_keys
from mqtemplate.results import SendResult
from mqtemplate.topics import DLQ_TOPIC_PREFIX

_MARK_AFTER = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterFilter:
    """Filter for dead letters. A dead letter must match all values that are given.

    Attributes:
        state: By default only dead letters that were neither sent again nor purged; None for all.
        after_ms: Stored at this time (epoch ms) or later.
        before_ms: Stored before this time.
        cause: Part of the exception or its text, in any case.
        topic: The topic that the message was sent to.
    """

    state: LetterState | None = LetterState.OPEN
    after_ms: int | None = None
    before_ms: int | None = None
    cause: str | None = None
    topic: str | None = None
    key: str | None = None
    tag: str | None = None

    def __post_init__(self) -> None:
        if self.key is not None:
            object.__setattr__(self, "key", key_text(self.key))

    def matches(self, letter: DeadLetter) -> bool:
        """Return True if the dead letter matches."""
        message = letter.message
        return (
            self.state in (None, letter.state)
            and (self.after_ms is None or message.store_timestamp >= self.after_ms)
            and (self.before_ms is None or message.store_timestamp < self.before_ms)
            and (self.cause is None or self.cause.lower() in letter.cause.lower())
            and self.topic in (None, letter.origin_topic)
            and (self.key is None or self.key in split_keys(message.keys))
            and self.tag in (None, message.tags)
        )


@dataclass(frozen=True, slots=True)
class DeadLetters:
    """Dead letters of one broker or cluster."""

    admin: BrokerAdmin

    # --- reading -------------------------------------------------------------------------------

    def groups(self) -> dict[str, int]:
        """Return the number of dead letters by group, whatever was done with them."""
        topics = [name for name, kind in self.admin.topic_kinds().items() if kind is TopicKind.DEAD_LETTER]
        counts = {name: sum(span.message_count for span in self.admin.queue_spans(name)) for name in topics}
        return {name.removeprefix(DLQ_TOPIC_PREFIX): count for name, count in counts.items()}

    def find(self, group: str, letter_filter: LetterFilter | None = None) -> Iterator[DeadLetter]:
        """Yield the dead letters of *group* that match, the oldest first.

        Raises:
            UnknownNameError: The group has no dead-letter topic.
        """
        wanted = letter_filter or LetterFilter()
        self._check(group)
        marks = Marks(self.admin).of(group)
        search = MessageSearch(self.admin)
        for message in search.by_time(DLQ_TOPIC_PREFIX + group, wanted.after_ms or 0, wanted.before_ms):
            mark = marks.get(message.offset_msg_id)
            letter = (
                DeadLetter(group, message) if mark is None else DeadLetter(group, message, mark.state, mark.time_ms)
            )
            if wanted.matches(letter):
                yield letter

    def get(self, group: str, letter_id: str) -> DeadLetter:
        """Return one dead letter.

        Args:
            letter_id: Its id, or the id of its message; of several dead letters of one message the last one is meant.

        Raises:
            UnknownNameError: There is no such dead letter.
        """
        found = self.get_all(group, [letter_id])
        return found[0]

    def get_all(self, group: str, ids: Sequence[str]) -> list[DeadLetter]:
        """Return dead letters by their ids, or by those of their messages.

        Raises:
            UnknownNameError: One of them does not exist.
        """
        by_id: dict[str, DeadLetter] = {}
        for letter in self.find(group, LetterFilter(state=None)):
            by_id[letter.message.msg_id] = by_id[letter.id] = letter
        missing = [each for each in ids if each not in by_id]
        if missing:
            raise UnknownNameError(f"group {group!r} has no dead letter {missing[0]!r}; list them with: dlq ls {group}")
        return [by_id[each] for each in ids]

    def original(self, letter: DeadLetter) -> MessageExt | None:
        """Return the message that failed, as it was sent; None if it was deleted."""
        topic, msg_id = letter.origin_topic, letter.origin_msg_id
        if topic is None or msg_id is None:
            return None
        try:
            return MessageSearch(self.admin).by_id(msg_id)
        except UnknownNameError:
            return None

    def _check(self, group: str) -> None:
        groups = self.groups()
        if group not in groups:
            raise unknown("dead-letter topic of group", group, groups)

    # --- changes -------------------------------------------------------------------------------

    def resend(
        self,
        letters: Iterable[DeadLetter],
        edit: LetterEdit | None = None,
        *,
        only_group: bool = False,
        rate: float | None = None,
        on_progress: OnProgress = no_progress,
    ) -> list[SendResult]:
        """Send the messages of dead letters to their original topics again, and mark the dead letters.

        If a send fails, or the program is interrupted, those that were sent are marked.

        Args:
            only_group: Send to the retry topic of the group: other groups of the topic do not get the message again.
            rate: Most messages per second; None for no limit.

        Raises:
            MessageError: The original topic of a dead letter is unknown, or only claimed by a client.
        """
        broker, results = self.admin.open_for_changes(), []
        with _Marking(Marks(self.admin), LetterState.RESENT) as marking:
            for letter in paced(letters, rate, broker.clock):
                _check_origin(letter, only_group=only_group)
                results.append(broker.send(resent_message(letter, edit, only_group=only_group)))
                marking.add(letter)
                on_progress(1)
        return results

    def purge(self, letters: Iterable[DeadLetter], on_progress: OnProgress = no_progress) -> int:
        """Mark dead letters as purged: lists leave them out. Retention deletes the messages. Return their number."""
        count = 0
        with _Marking(Marks(self.admin), LetterState.PURGED) as marking:
            for letter in letters:
                marking.add(letter)
                count += 1
                on_progress(1)
        return count


def _check_origin(letter: DeadLetter, *, only_group: bool) -> None:
    if letter.origin_topic is None:
        raise MessageError(
            f"dead letter {letter.id} does not name the topic that it was sent to; its client wrote "
            "neither DLQ_ORIGIN_TOPIC nor RETRY_TOPIC, so send its body with: send"
        )
    if not only_group and not letter.is_origin_known:
        raise MessageError(
            f"dead letter {letter.id} names topic {letter.origin_topic!r}, but without the id of a message there "
            "(ORIGIN_MESSAGE_ID): the client that wrote it may not send to that topic; check its body, then send it to "
            "the group only (--only-group), or with: send"
        )


class _Marking:
    """Marks dead letters in batches, the last one at the end of the ``with`` block."""

    def __init__(self, marks: Marks, state: LetterState) -> None:
        self._marks = marks
        self._state = state
        self._ids: dict[str, list[str]] = {}

    def add(self, letter: DeadLetter) -> None:
        """Mark a dead letter with the next batch."""
        ids = self._ids.setdefault(letter.group, [])
        ids.append(letter.id)
        if len(ids) == _MARK_AFTER:
            self._marks.add(letter.group, self._state, self._ids.pop(letter.group))

    def __enter__(self) -> _Marking:
        return self

    def __exit__(self, *error: object) -> None:
        for group, ids in self._ids.items():
            self._marks.add(group, self._state, ids)
