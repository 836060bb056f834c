"""Resend, edit and purge of dead letters of one group: changes with a preview."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from functools import cached_property

from mqtemplate.operations.access import BrokerAccess
from mqtemplate.operations.audit import OldValue
from mqtemplate.operations.bulk import OnProgress
from mqtemplate.operations.changes import Change, ChangePreview, ChangeResult, PreviewCounter
from mqtemplate.operations.dead_letters import DeadLetterMessage, DeadLetters, LetterEdit


class LetterAction(Enum):
    """Action of a change of dead letters."""

    RESEND = "resend"
    EDIT = "edit"
    PURGE = "purge"


_RESEND_UNDO = "It cannot be undone: the messages are sent, and listeners may handle them at once."
_PURGE_UNDO = "It can be undone: the dead letters are open again, until retention deletes them."


class LettersChange(Change):
    """Resend or purge of dead letters of one group.

    Args:
        letters: The dead letters. A resend that fails again would be found too, so they are a list.
        edit: For `LetterAction.EDIT`: changes of the one dead letter.
        target: Fields of the audit log: the filter.
        is_named: They were named by their ids.
    """

    def __init__(
        self,
        access: BrokerAccess,
        group: str,
        letters: Sequence[DeadLetterMessage],
        action: LetterAction,
        *,
        edit: LetterEdit | None = None,
        only_group: bool = False,
        rate: float | None = None,
        target: Mapping[str, object] | None = None,
        is_named: bool = False,
    ) -> None:
        can_be_undone = action is LetterAction.PURGE
        fields = {"group": group, **(target or {})}
        super().__init__(f"dead_letters.{action.value}", fields, is_named=is_named, can_be_undone=can_be_undone)
        self.group = group
        self.letters = letters
        self._access = access
        self._kind = action
        self._edit = edit
        self._only_group = only_group
        self._rate = rate

    @property
    def title(self) -> str:
        amount = self.preview.amount
        if self._kind is LetterAction.PURGE:
            return f"Purge {amount}"
        where = "the retry topic of the group" if self._only_group else "their original topics"
        return f"Send {amount} to {where} again"

    @cached_property
    def preview(self) -> ChangePreview:
        counter = PreviewCounter()
        for each in self.letters:
            counter.add(each.origin_topic or "(unknown)", each.message.tags, each.message.store_timestamp)
        undo = _PURGE_UNDO if self._kind is LetterAction.PURGE else _RESEND_UNDO
        return counter.preview("dead letter", "stored", undo=undo)

    def old_values(self) -> Iterator[OldValue]:
        for each in self.letters:
            yield {"group": each.group, "id": each.id, "state": each.state.value}

    def make(self, old: Callable[[], Iterator[OldValue]], on_progress: OnProgress) -> ChangeResult:
        letters = DeadLetters(self._access)
        if self._kind is LetterAction.PURGE:
            count = letters.purge(self.letters, on_progress)
            return ChangeResult(f"purged {count:,} dead letters", {"count": count})
        results = letters.resend(
            self.letters, self._edit, only_group=self._only_group, rate=self._rate, on_progress=on_progress
        )
        topics = ", ".join(sorted({each.message_queue.topic for each in results}))
        return ChangeResult(f"sent {len(results):,} messages to {topics}", {"count": len(results)}, results)
