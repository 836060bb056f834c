"""Settings of the access control: accounts with their keys, and their rights to topics and groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, Flag
from typing import NamedTuple

from mqtemplate.errors import ConfigurationError
from mqtemplate.topics import DLQ_TOPIC_PREFIX, RETRY_TOPIC_PREFIX, TRACE_TOPIC, is_broker_topic, needs_own_right

_MIN_KEY_LENGTH = 7
"""RocketMQ: ``PlainPermissionManager`` refuses shorter access keys and secret keys."""


class Right(Flag):
    """Rights of an account to a topic or a group: to send to it (PUB), to read from it (SUB)."""

    DENY = 0
    PUB = 1
    SUB = 2

    @classmethod
    def parse(cls, text: str) -> Right:
        """Parse ``PUB``, ``SUB``, ``PUB|SUB`` or ``DENY``.

        Raises:
            ValueError: The text is something else.
        """
        right = cls.DENY
        for word in text.upper().split("|"):
            try:
                right |= cls[word.strip()]
            except KeyError:
                raise ValueError(f"{text!r} is not a right; allowed are PUB, SUB, PUB|SUB and DENY") from None
        return right

    def __str__(self) -> str:
        return "|".join(right.name or "" for right in Right if right in self) if self else "DENY"


class AccountRole(Enum):
    """AccountRole of an account in the dashboard. Each has the rights of the ones before it.

    A viewer reads what its rights to topics and groups allow, an operator also changes messages and offsets there, and
    an admin does everything, on all topics and groups.
    """

    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"


class Need(NamedTuple):
    """The right to one topic or group. If *right* has several bits, each of them suffices.

    Attributes:
        kind: ``topic`` or ``group``.
        name: None: the right to all topics or groups.
        is_retry: *name* is of a retry topic: a group, or a group and a topic that it receives by POP.
    """

    kind: str
    name: str | None
    right: Right
    is_retry: bool = False

    def __str__(self) -> str:
        return (
            f"{self.right} on all {self.kind}s" if self.name is None else f"{self.right} on {self.kind} {self.name!r}"
        )


def topic_need(topic: str, right: Right) -> Need:
    """Return the need of *right* on a topic. The retry and dead letter topics of a group need a right on the group."""
    if not is_broker_topic(topic):
        if topic.startswith(RETRY_TOPIC_PREFIX):
            return group_need(topic.removeprefix(RETRY_TOPIC_PREFIX))._replace(is_retry=True)
        if topic.startswith(DLQ_TOPIC_PREFIX):
            return group_need(topic.removeprefix(DLQ_TOPIC_PREFIX))
    return Need("topic", topic, right)


def pop_pairs(name: str) -> list[tuple[str, str]]:
    """Return each group and topic that the retry topic ``%RETRY%`` + *name* may belong to, the longest group first."""
    return [(name[:at], name[at + 1 :]) for at in range(len(name) - 2, 0, -1) if name[at] in "_+"]


def group_need(group: str) -> Need:
    """Return the need of the right on a group, which is the right to read."""
    return Need("group", group, Right.SUB)


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """One access key and its rights. The names are the ones in RocketMQ's ``plain_acl.yml``.

    Attributes:
        secret_key: Key that requests are signed with. It is neither sent nor shown.
        admin: True if the account has all rights, administration included.
        role: AccountRole in the dashboard; of an account with *admin* it is always ``AccountRole.ADMIN``.
        default_topic_perm: Rights to topics that are not in *topic_perms*. They do not include the topics in which the
            broker stores messages of other topics: delayed messages, half messages. Of the trace topic they include PUB
            only: clients with tracing send to it, and it has the ids and keys of all topics.
        default_group_perm: Rights to groups that are not in *group_perms*.
        is_owner: True for the account that the owner of a store folder creates for its other processes, at each start
            with another key. What they send counts as sent by the owner.

    Raises:
        ConfigurationError: A key is too short, or the role is admin without *admin*.
    """

    access_key: str
    secret_key: str = field(repr=False)
    admin: bool = False
    default_topic_perm: Right = Right.DENY
    default_group_perm: Right = Right.DENY
    topic_perms: Mapping[str, Right] = field(default_factory=dict)
    group_perms: Mapping[str, Right] = field(default_factory=dict)
    is_owner: bool = False
    role: AccountRole = AccountRole.VIEWER

    def __post_init__(self) -> None:
        if self.admin:
            object.__setattr__(self, "role", AccountRole.ADMIN)
        elif self.role is AccountRole.ADMIN:
            raise ConfigurationError(
                f"account {self.access_key!r} has role admin, and admin is false; set admin: true, or give the role "
                "viewer or operator"
            )
        for name, value in (("access-key", self.access_key), ("secret-key", self.secret_key)):
            if len(value) < _MIN_KEY_LENGTH:
                raise ConfigurationError(
                    f"the {name} of an account must have at least {_MIN_KEY_LENGTH} characters, it has {len(value)}"
                )

    def may(self, kind: str, name: str | None, needed: Right, is_retry: bool = False) -> bool:
        """Return True if the account has one of the rights in *needed* to a topic or group.

        Args:
            kind: ``topic`` or ``group``.
            name: None: to all of them.
            is_retry: See `Need`. A group of *group_perms* without the right may be in the name, so it is refused.
                `AccessControl.permits` knows the groups and topics of the broker.
        """
        if is_retry and name is not None:
            groups = [group for group, _ in pop_pairs(name) if group in self.group_perms]
            if not all(self.group_perms[group] & needed for group in groups):
                return False
        is_group = kind == "group"
        perms = self.group_perms if is_group else self.topic_perms
        default = self.default_group_perm if is_group else self.default_topic_perm
        if name is None:
            return all(right & needed for right in (default, *perms.values()))
        if not is_group and needs_own_right(name):
            default = default & Right.PUB if name == TRACE_TOPIC else Right.DENY
        return bool(perms.get(name, default) & needed)


@dataclass(frozen=True, slots=True, kw_only=True)
class AclSettings:
    """Settings of the access control.

    Attributes:
        accounts: All accounts. Without accounts every request is refused.
        replay_window_ms: Time in which a signature may not be used again by a request that changes something. 0: it may
            be used again at any time.
        sign_routes: True: requests for routes need a signature too.
        is_private: True: the process created the only account, for processes that it starts itself.

    Raises:
        ConfigurationError: Two accounts have the same access key, or the window is negative.
    """

    accounts: tuple[Account, ...] = ()
    replay_window_ms: int = 0
    sign_routes: bool = False
    is_private: bool = False

    def __post_init__(self) -> None:
        if self.replay_window_ms < 0:
            raise ConfigurationError(
                f"replay-window-ms must be 0 or more, got {self.replay_window_ms}; 0 permits repeated signatures"
            )
        names = [account.access_key for account in self.accounts]
        duplicates = sorted({name for name in names if names.count(name) > 1})
        if duplicates:
            raise ConfigurationError(f"access-key {duplicates[0]!r} has two accounts; keep one")
