"""The work of operators on any broker: topics, groups, offsets, messages, delayed messages and dead letters.

The command line, the console and other tools of operators use it. `BrokerAccess` is a broker that is open, and
`StoreAccess` a store directory.
"""

from mqtemplate.broker import (
    BrokerAdmin,
    GroupInfo,
    GroupSubscription,
    Member,
    OffsetChange,
    QueueProgress,
    QueueSpan,
    TopicInfo,
    TopicKind,
)
from mqtemplate.operations.access import BrokerAccess, StoreAccess
from mqtemplate.operations.dead_letters import DeadLetterMessage, DeadLetters, LetterEdit, LetterFilter, LetterState
from mqtemplate.operations.delayed import BulkChange, DelayedOperations, PendingAction, PendingChange
from mqtemplate.operations.messages import MessageSearch, Tail
from mqtemplate.operations.offsets import OffsetPosition, OffsetTarget, apply_reset, forget_group, plan_reset

__all__ = [
    "BrokerAccess",
    "BrokerAdmin",
    "BulkChange",
    "DeadLetterMessage",
    "DeadLetters",
    "DelayedOperations",
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
    "StoreAccess",
    "Tail",
    "TopicInfo",
    "TopicKind",
    "apply_reset",
    "forget_group",
    "plan_reset",
]
