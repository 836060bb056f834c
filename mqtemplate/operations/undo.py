"""Undoing of a change of the audit log, as far as that is possible."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

from mqtemplate.errors import MessageError
from mqtemplate.operations.access import BrokerAccess
from mqtemplate.operations.audit import LoggedChange, OldValue
from mqtemplate.operations.bulk import OnProgress
from mqtemplate.operations.changes import LISTENER_SEEK, Change, ChangePreview, ChangeResult, PreviewCounter
from mqtemplate.operations.creation import TopicCreated, TopicDeleted
from mqtemplate.operations.dead_letters import DeadLetterMessage, DeadLetters, LetterFilter, LetterMarks, LetterState
from mqtemplate.operations.delayed import (
    CancelUndone,
    DelayedOperations,
    DueTimesRestored,
    PendingAction,
    PendingChange,
    PendingMessagesChange,
)
from mqtemplate.operations.offsets import GroupForgotten, restored_offsets

_RESET = ("offsets.reset", "offsets.forget")
_MOVED = ("delayed.deliver", "delayed.shift", "delayed.move")
_REASONS = {
    "dead_letters.resend": "the messages were sent, and listeners may have handled them",
    "dead_letters.edit": "the message was sent, and listeners may have handled it",
    "delayed.restore": "copies were sent: cancel them by their keys or ids, with: mqtemplate delayed cancel",
    "dead_letters.restore": "purge the dead letters again, with: mqtemplate dlq purge",
    LISTENER_SEEK: "the application moves its listeners itself: name its actuator with --url, or use its dashboard",
}


def why_not_undone(change: LoggedChange) -> str | None:
    """Return the reason why a change cannot be undone at the broker; None if it can be."""
    if change.undone_by is not None:
        return f"it was undone already, by change {change.undone_by}"
    if change.action in _BY_FACTS and change.state == "succeeded":
        return _BY_FACTS[change.action](change)
    if change.action not in (*_RESET, *_MOVED, "delayed.cancel", "dead_letters.purge"):
        return _REASONS.get(change.action, f"{change.action} has no undo; make the opposite change")
    return None if change.old.exists else "its values of before were not kept, or there were none"


def _why_not_cancelled(change: LoggedChange) -> str | None:
    is_pending = change.facts.get("due") is not None and change.facts.get("handle") is not None
    return None if is_pending else "the message was sent, and listeners may have handled it"


def _why_not_deleted(change: LoggedChange) -> str | None:
    return "queues of a topic cannot be removed" if change.facts.get("queues_before") else None


_BY_FACTS: Mapping[str, Callable[[LoggedChange], str | None]] = {
    # action -> the reason why it cannot be undone; without old values
    "messages.send": _why_not_cancelled,
    "topics.create": _why_not_deleted,
    "topics.delete": lambda _: None,
    "groups.create": lambda _: None,
}


def _undo_by_facts(access: BrokerAccess, change: LoggedChange) -> Change:
    facts = change.facts
    target: dict[str, Any] = {"undo_of": change.id}
    if change.action == "topics.create":
        return TopicDeleted(access, str(facts["topic"]), **target)
    if change.action == "topics.delete":
        return TopicCreated(access, str(facts["topic"]), int(facts["queues"]), **target)
    if change.action == "groups.create":
        return GroupForgotten(access, str(facts["group"]), **target)
    handle, cancel = str(facts["handle"]), PendingChange(PendingAction.CANCEL)
    return PendingMessagesChange(access, lambda each: DelayedOperations(each).chosen([handle]), cancel, target)


def undo_change(access: BrokerAccess, change: LoggedChange) -> Change:
    """Return the change that undoes another one: with a preview, a confirmation and an audit line of its own.

    Raises:
        MessageError: It cannot be undone.
    """
    if (reason := why_not_undone(change)) is not None:
        raise MessageError(f"change {change.id} ({change.action}) cannot be undone: {reason}")
    target = {"undo_of": change.id}
    if change.action in _BY_FACTS:
        return _undo_by_facts(access, change)
    if change.action in _RESET:
        group, topic = str(change.facts["group"]), change.facts.get("topic")
        return restored_offsets(access, group, change.old(), topic=topic, **target)
    if change.action in _MOVED:
        return DueTimesRestored(access, change.old, target)
    if change.action == "delayed.cancel":
        return CancelUndone(access, change.old, target)
    return PurgeUndone(access, change.old, {"group": change.facts.get("group"), **target})


class PurgeUndone(Change):
    """Undoing of a purge: the dead letters have their state of before again.

    Args:
        values: Returns the old values of the purge.
    """

    def __init__(
        self, access: BrokerAccess, values: Callable[[], Iterable[OldValue]], target: Mapping[str, object]
    ) -> None:
        super().__init__("dead_letters.restore", target, can_be_undone=False)
        self._access = access
        self._values = values

    @property
    def title(self) -> str:
        return f"Give {self.preview.amount} the state of before the purge"

    @cached_property
    def preview(self) -> ChangePreview:
        counter, lost = PreviewCounter(), 0
        for _, letter in self._letters():
            if letter is None:
                lost += 1
            else:
                counter.add(letter.origin_topic or "(unknown)", letter.message.tags, letter.message.store_timestamp)
        notes = (f"{lost:,} of them are gone: retention has deleted them.",) if lost else ()
        return counter.preview("dead letter", "stored", notes=notes, undo="Purge them again to undo it.")

    def _letters(self) -> Iterator[tuple[OldValue, DeadLetterMessage | None]]:
        by_group: dict[str, dict[str, DeadLetterMessage]] = {}
        for value in self._values():
            group = value["group"]
            if group not in by_group:
                found = DeadLetters(self._access).find(group, LetterFilter(state=None))
                by_group[group] = {each.id: each for each in found}
            yield value, by_group[group].get(value["id"])

    def old_values(self) -> Iterator[OldValue]:
        for value, letter in self._letters():
            if letter is not None:
                yield {"group": letter.group, "id": letter.id, "state": letter.state.value, "new": value["state"]}

    def make(self, old: Callable[[], Iterator[OldValue]], on_progress: OnProgress) -> ChangeResult:
        ids: dict[tuple[str, str], list[str]] = {}
        for value in old():
            ids.setdefault((value["group"], value["new"]), []).append(value["id"])
        for (group, state), some in ids.items():
            LetterMarks(self._access).add(group, LetterState(state), some)
            on_progress(len(some))
        count = sum(map(len, ids.values()))
        return ChangeResult(f"{count:,} dead letters are as before", {"count": count})
