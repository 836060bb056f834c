"""Options that every sending verb has."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import TypedDict

from mqtemplate.durations import Duration
from mqtemplate.message import MessageQueue


class SendOptions(TypedDict, total=False):
    """Options of the sending verbs, by name. Each has one meaning on every verb, for one message and for a list."""

    delay: Duration | None
    """Time to wait before the delivery, of any length: ``"3h"``, a timedelta, or seconds. The broker's clock
    counts it."""

    deliver_at: datetime | int | None
    """Time of the delivery: an aware datetime, or epoch milliseconds."""

    hash_key: str | int | None
    """Messages with equal keys go to one queue, in the order in which they were sent."""

    keys: str | int | Sequence[str]
    """Business keys by which the message can be found. A text is one key, or several separated by blanks; a number is
    one key."""

    headers: Mapping[str, object] | None
    """``KEYS``, ``TAGS``, ``FLAG``, ``WAIT_STORE_MSG_OK``, ``DELAY`` and ``TIMER_…``, with or without the prefix
    ``rocketmq_``. Any other name becomes a user property of the message."""

    queue: MessageQueue | None
    """A queue of the topic. Without it, and without *hash_key*, the queues take turns."""


SEND_OPTIONS = frozenset(SendOptions.__annotations__)
QUEUE_OPTIONS = frozenset({"hash_key", "queue"})
"""Options that select the queue."""


def unknown_option(verb: Callable[..., object], given: Iterable[str], known: Iterable[str]) -> TypeError:
    """Return the error for a call with an option that the verb does not have; it names the nearest known option.

    Args:
        known: Names that the verb takes as ``**options``; those of its own parameters are added.
    """
    parameters = inspect.signature(verb).parameters.values()
    names = [each.name for each in parameters if each.name != "self" and each.kind is not each.VAR_KEYWORD]
    names += sorted(known)
    name = min(set(given) - set(names))
    close = difflib.get_close_matches(name, names, 1)
    hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(names)}"
    return TypeError(f"{verb.__name__}() has no option {name!r}; {hint}")
