"""Who may do what: accounts with their keys, and their rights on topics and groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Flag

from mqtemplate.errors import ConfigurationError

_SHORTEST_KEY = 7
"""Source: ``PlainPermissionManager``: names and secrets that are shorter are refused."""


class Right(Flag):
    """What an account may do with a topic or a group: send to it, read from it."""

    DENY = 0
    PUB = 1
    SUB = 2

    @classmethod
    def parse(cls, text: str) -> Right:
        """Read ``PUB``, ``SUB``, ``PUB|SUB`` or ``DENY``.

        Raises:
            ValueError: It is none of these.
        """
        right = cls.DENY
        for word in text.upper().split("|"):
            try:
                right |= cls[word.strip()]
            except KeyError:
                raise ValueError(f"{text!r} is no right; allowed are PUB, SUB, PUB|SUB and DENY") from None
        return right

    def __str__(self) -> str:
        return "|".join(right.name or "" for right in Right if right in self) if self else "DENY"


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """One access key. The names are those of RocketMQ's ``plain_acl.yml``.

    Attributes:
        secret_key: Never sent and never shown; requests are signed with it.
        admin: May do everything, also what administrators do.
        default_topic_perm: For topics that *topic_perms* does not name.
        default_group_perm: Alike.

    Raises:
        ConfigurationError: A key is too short.
    """

    access_key: str
    secret_key: str = field(repr=False)
    admin: bool = False
    default_topic_perm: Right = Right.DENY
    default_group_perm: Right = Right.DENY
    topic_perms: Mapping[str, Right] = field(default_factory=dict)
    group_perms: Mapping[str, Right] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in (("access-key", self.access_key), ("secret-key", self.secret_key)):
            if len(value) < _SHORTEST_KEY:
                raise ConfigurationError(
                    f"the {name} of an account has {len(value)} characters, at least {_SHORTEST_KEY} are needed"
                )

    def may(self, kind: str, name: str, wanted: Right) -> bool:
        """Whether it has the right *wanted* (any of several) on the topic or group *name*; *kind* tells which."""
        if kind == "group":
            return bool(self.group_perms.get(name, self.default_group_perm) & wanted)
        return bool(self.topic_perms.get(name, self.default_topic_perm) & wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class AclSettings:
    """Access control.

    Attributes:
        accounts: Who may come in. None at all: nobody.

    Raises:
        ConfigurationError: Two accounts have one access key.
    """

    accounts: tuple[Account, ...] = ()

    def __post_init__(self) -> None:
        names = [account.access_key for account in self.accounts]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigurationError(f"access-key {twice[0]!r} is given twice; keep one account")
