"""Administration of any broker: topics, groups, offsets, messages, delayed messages and dead letters.

The command line and other tools of operators use it. `BrokerAdmin` is the interface; `EmbeddedAdmin`, `FolderAdmin` and
`RemoteAdmin` implement it.
"""

from mqtemplate.admin.broker_admin import BrokerAdmin
from mqtemplate.admin.dead_letters.dead_letters import DeadLetters, LetterFilter
from mqtemplate.admin.dead_letters.letter import DeadLetter, LetterEdit, LetterState
from mqtemplate.admin.delayed import BulkChange, PendingMessages
from mqtemplate.admin.embedded import EmbeddedAdmin
from mqtemplate.admin.folder import FolderAdmin
from mqtemplate.admin.messages import MessageSearch, Tail
from mqtemplate.admin.offsets import OffsetPosition, OffsetTarget, apply_reset, plan_reset
from mqtemplate.admin.remote import RemoteAdmin
from mqtemplate.admin.values import (
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
    "DeadLetter",
    "DeadLetters",
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
    "PendingMessages",
    "QueueProgress",
    "QueueSpan",
    "RemoteAdmin",
    "Tail",
    "TopicInfo",
    "TopicKind",
    "apply_reset",
    "plan_reset",
]
