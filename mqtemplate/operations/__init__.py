"""The work of operators on any broker: topics, groups, offsets, messages, delayed messages and dead letters.

The command line, the console and other tools of operators use it. `BrokerAdmin` is the interface; `EmbeddedAdmin`,
`FolderAdmin` and `RemoteAdmin` implement it, and `admin_of` returns the one for a broker.
"""

from mqtemplate.operations.broker_admin import BrokerAdmin, OffsetPosition, OffsetTarget, apply_reset, plan_reset
from mqtemplate.operations.choice import admin_of
from mqtemplate.operations.dead_letters import DeadLetterMessage, DeadLetters, LetterEdit, LetterFilter, LetterState
from mqtemplate.operations.delayed import BulkChange, DelayedOperations, PendingAction, PendingChange
from mqtemplate.operations.embedded import EmbeddedAdmin, FolderAdmin
from mqtemplate.operations.messages import MessageSearch, Tail
from mqtemplate.operations.remote import RemoteAdmin
from mqtemplate.operations.values import (
    GroupInfo,
    GroupSubscription,
    Member,
    OffsetChange,
    QueueProgress,
    QueueSpan,
    TopicInfo,
    TopicKind,
)

__all__ = [
    "BrokerAdmin",
    "BulkChange",
    "DeadLetterMessage",
    "DeadLetters",
    "DelayedOperations",
    "EmbeddedAdmin",
    "FolderAdmin",
    "GroupInfo",
    "GroupSubscription",
    "LetterEdit",
    "LetterFilter",
    "LetterState",
    "Member",
    "MessageSearch",
    "OffsetChange",
    "OffsetPosition",
    "OffsetTarget",
    "PendingAction",
    "PendingChange",
    "QueueProgress",
    "QueueSpan",
    "RemoteAdmin",
    "Tail",
    "TopicInfo",
    "TopicKind",
    "admin_of",
    "apply_reset",
    "plan_reset",
]
