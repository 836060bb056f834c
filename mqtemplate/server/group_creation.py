"""Groups that are made by the first request that names them."""

from __future__ import annotations

from mqtemplate.errors import DestinationError
from mqtemplate.remoting.protocol import ResponseCode
from mqtemplate.remoting.protocol.bodies.group import SubscriptionGroupConfig
from mqtemplate.server.group_table import SubscriptionGroupTable
from mqtemplate.server.response import RefusedError
from mqtemplate.topics import RETRY_TOPIC_PREFIX, check_topic


def ensure_group(groups: SubscriptionGroupTable, group: str) -> SubscriptionGroupConfig:
    """The settings of *group*, which is made if it is missing and may be made.

    Raises:
        RefusedError: It may not; or its name is illegal: there would be no retry topic of that name.
        StoreError: The table of groups could not be written.
    """
    found = groups.find(group)
    if found is not None:
        return found
    try:
        check_topic(RETRY_TOPIC_PREFIX + group)
    except DestinationError as exc:
        raise RefusedError(
            ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
            f"{group[:40]!r} is no name of a group; use at most 248 letters, digits, '_', '-', '%', '|'",
        ) from exc
    made = groups.ensure(group)
    if made is None:
        raise RefusedError(
            ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
            f"there is no group {group!r}; create it first, or set auto-create-subscription-group to true",
        )
    return made
