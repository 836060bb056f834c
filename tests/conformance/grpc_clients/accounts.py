"""Accounts of ordinary users, with the same rights on this project's server and on RocketMQ's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mqtemplate.remoting import Credentials
from tests.conformance.servers import ACCOUNT

RIGHTS_CASE = "rights"
"""Case of the client programs, and end of the names of its topics."""


@dataclass(frozen=True, slots=True)
class User:
    """An account with its rights, or credentials of none.

    Attributes:
        topics: Rights to all topics: "PUB", "SUB", "PUB|SUB", or None if there is no such account.
        groups: "SUB" or "DENY", for all groups.
        is_denied: True if it has no right to the topics of `RIGHTS_CASE`.
        sends: True if it may send to these topics.
        receives: True if it may receive from them.
    """

    credentials: Credentials
    topics: str | None
    groups: str = "SUB"
    is_denied: bool = False

    @property
    def sends(self) -> bool:
        return "PUB" in (self.topics or "") and not self.is_denied

    @property
    def receives(self) -> bool:
        return "SUB" in (self.topics or "") and self.groups == "SUB" and not self.is_denied


def _credentials(name: str) -> Credentials:
    return Credentials(access_key=name, secret_key=f"secret-of-{name}")


USERS = {
    "PUB and SUB": User(_credentials("both-rights"), "PUB|SUB"),
    "PUB only": User(_credentials("only-sends"), "PUB", groups="DENY"),
    "SUB only": User(_credentials("only-receives"), "SUB"),
    "DENY on the topic": User(_credentials("denied-user"), "PUB|SUB", is_denied=True),
    "a wrong secret": User(Credentials(access_key=ACCOUNT.access_key, secret_key="another-secret"), None),
    "an unknown user": User(_credentials("unknown-user"), None),
}
"""Name of a cell of the matrix -> user."""


def own_accounts(denied_topics: Sequence[str]) -> list[Mapping[str, object]]:
    """Return the accounts of `USERS` for the section ``acl`` of this project's server."""
    return [
        {
            "access-key": user.credentials.access_key,
            "secret-key": user.credentials.secret_key,
            "default-topic-perm": user.topics,
            "default-group-perm": user.groups,
            "topic-perms": dict.fromkeys(denied_topics, "DENY") if user.is_denied else {},
        }
        for user in USERS.values()
        if user.topics
    ]


def rocketmq_user(user: User) -> dict[str, object]:
    """Return the body of RocketMQ's request to create the account of a user."""
    keys = {"username": user.credentials.access_key, "password": user.credentials.secret_key}
    return {**keys, "userType": "Normal", "userStatus": "enable"}


def rocketmq_acl(user: User, denied_topics: Sequence[str]) -> dict[str, object]:
    """Return the body of RocketMQ's request to give a user its rights."""
    entries = [_entry("Topic:*", (user.topics or "").split("|"), "Allow")]
    if user.groups == "SUB":
        entries.append(_entry("Group:*", ["SUB"], "Allow"))
    if user.is_denied:
        entries.extend(_entry(f"Topic:{topic}", ["PUB", "SUB"], "Deny") for topic in denied_topics)
    return {
        "subject": f"User:{user.credentials.access_key}",
        "policies": [{"policyType": "Custom", "entries": entries}],
    }


def _entry(resource: str, rights: Sequence[str], decision: str) -> dict[str, object]:
    actions = [right.capitalize() for right in rights]
    return {"resource": resource, "actions": actions, "sourceIps": [], "decision": decision}
