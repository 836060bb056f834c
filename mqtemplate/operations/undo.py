"""Undoing of a change of the audit log, as far as that is possible."""

from __future__ import annotations

from mqtemplate.errors import MessageError
from mqtemplate.operations.access import BrokerAccess
from mqtemplate.operations.audit import LoggedChange
from mqtemplate.operations.changes import LISTENER_SEEK, Change
from mqtemplate.operations.dead_letters import PurgeUndone
from mqtemplate.operations.delayed import CancelUndone, DueTimesRestored
from mqtemplate.operations.offsets import restored_offsets

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
    if change.action not in (*_RESET, *_MOVED, "delayed.cancel", "dead_letters.purge"):
        return _REASONS.get(change.action, f"{change.action} has no undo; make the opposite change")
    return None if change.old.exists else "its values of before were not kept, or there were none"


def undo_change(access: BrokerAccess, change: LoggedChange) -> Change:
    """Return the change that undoes another one: with a preview, a confirmation and an audit line of its own.

    Raises:
        MessageError: It cannot be undone.
    """
    if (reason := why_not_undone(change)) is not None:
        raise MessageError(f"change {change.id} ({change.action}) cannot be undone: {reason}")
    target = {"undo_of": change.id}
    if change.action in _RESET:
        group, topic = str(change.facts["group"]), change.facts.get("topic")
        return restored_offsets(access, group, change.old(), topic=topic, **target)
    if change.action in _MOVED:
        return DueTimesRestored(access, change.old, target)
    if change.action == "delayed.cancel":
        return CancelUndone(access, change.old, target)
    return PurgeUndone(access, change.old, {"group": change.facts.get("group"), **target})
