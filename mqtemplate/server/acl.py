"""Access control: each request is signed by an account, and the account has the right to it.

Which right a request needs is a table. A request that is not in it is for administrators only, so nothing new is open
by mistake. Source: RocketMQ ``acl: PlainAccessValidator`` (1.0), ``auth`` (2.0); section 19 of the specification.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator
from typing import NamedTuple

import structlog

from mqtemplate.errors import RemoteProtocolError
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode, Version
from mqtemplate.remoting.protocol.acl import ACCESS_KEY, is_signed_with
from mqtemplate.remoting.protocol.bodies.group import CheckClientRequestBody, HeartbeatData, LockBatchRequestBody
from mqtemplate.server.acl_settings import Account, AclSettings, Right
from mqtemplate.topics import DLQ_TOPIC_PREFIX, RETRY_TOPIC_PREFIX

_log = structlog.stdlib.get_logger("mqtemplate.acl")


class _Need(NamedTuple):
    """A right on one topic or group; any of several will do."""

    kind: str
    name: str
    right: Right


_Needs = Callable[[RemotingCommand], Iterator[_Need]]
_EITHER = Right.PUB | Right.SUB
_REMEMBERED = 1_000
_NOBODYS_SECRET = secrets.token_hex()


class AclGuard:
    """Looks at each request before it is served.

    - Who does not say who it is, or signs with another secret, is refused; the answer does not tell which of the two.
    - Clients of 5.0 and newer are told NO_PERMISSION, as ACL 2.0 does; older ones SYSTEM_ERROR, as 1.0 does: theirs
      would take the other code for a topic that cannot be written, and try the next broker.
    - It runs in the I/O thread: it computes one signature, and asks nobody.
    """

    def __init__(self, settings: AclSettings) -> None:
        self._accounts = {account.access_key: account for account in settings.accounts}
        self._told: set[tuple[int, str]] = set()

    def __call__(self, connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
        """The refusal; None for a request that may be served.

        Raises:
            RemoteProtocolError: The request cannot be read.
        """
        reason = self._reason(request)
        if reason is None:
            return None
        self._tell(connection, request, reason)
        knows_code = request.version >= Version.V5_0_0
        return request.response(ResponseCode.NO_PERMISSION if knows_code else ResponseCode.SYSTEM_ERROR, remark=reason)

    def _tell(self, connection: Connection, request: RemotingCommand, reason: str) -> None:
        """Once for each connection and reason: a client that is refused goes on asking, and may do so for days."""
        told = (connection.id, reason)
        level = logging.DEBUG if told in self._told else logging.WARNING
        _log.log(level, "acl.refused", request=str(request), remote=str(connection.remote), reason=reason)
        if len(self._told) >= _REMEMBERED:
            self._told.clear()
        self._told.add(told)

    def _reason(self, request: RemotingCommand) -> str | None:
        access_key = request.ext_fields.get(ACCESS_KEY)
        if access_key is None:
            return "access is controlled here: give the client an access key and its secret key"
        account = self._accounts.get(access_key)
        secret_key = _NOBODYS_SECRET if account is None else account.secret_key
        if not is_signed_with(request, secret_key) or account is None:  # in this order, so that both take as long
            return f"access key {access_key[:64]!r} is not known here, or its secret key is another"
        return None if account.admin else _missing_right(account, request)


def _missing_right(account: Account, request: RemotingCommand) -> str | None:
    code = RequestCode.of(request.code)
    name = code.name if isinstance(code, RequestCode) else str(code)
    if request.code in _FREE:
        return None
    needs = _NEEDS.get(request.code)
    if needs is None:
        return f"access key {account.access_key!r} may not ask {name}: that is for accounts with admin: true"
    for need in needs(request):
        if not account.may(*need):
            return f"access key {account.access_key!r} has no right {need.right} on {need.kind} {need.name!r} ({name})"
    return None


# --- which rights a request needs -------------------------------------------------------------------


def _read_topic(topic: str) -> Iterator[_Need]:
    """A group's own topics go with the group."""
    for prefix in (RETRY_TOPIC_PREFIX, DLQ_TOPIC_PREFIX):
        if topic.startswith(prefix):
            yield _Need("group", topic.removeprefix(prefix), Right.SUB)
            return
    yield _Need("topic", topic, Right.SUB)


def _write_topic(topic: str) -> Iterator[_Need]:
    """Into a retry topic consumers write, who have the right to read for the group."""
    if topic.startswith((RETRY_TOPIC_PREFIX, DLQ_TOPIC_PREFIX)):
        yield from _read_topic(topic)
    else:
        yield _Need("topic", topic, Right.PUB)


def _field(request: RemotingCommand, name: str) -> str:
    value = request.ext_fields.get(name)
    if value is None:
        raise RemoteProtocolError(f"{request} needs the field {name}")
    return value


def _send(name: str) -> _Needs:
    return lambda request: _write_topic(_field(request, name))


def _group(name: str) -> _Needs:
    return lambda request: iter([_Need("group", _field(request, name), Right.SUB)])


def _consume(request: RemotingCommand) -> Iterator[_Need]:
    yield _Need("group", _field(request, "consumerGroup"), Right.SUB)
    yield from _read_topic(_field(request, "topic"))


def _look(request: RemotingCommand) -> Iterator[_Need]:
    topic = _field(request, "topic")
    if topic.startswith((RETRY_TOPIC_PREFIX, DLQ_TOPIC_PREFIX)):
        yield from _read_topic(topic)
    else:
        yield _Need("topic", topic, _EITHER)


def _query(request: RemotingCommand) -> Iterator[_Need]:
    yield from _read_topic(_field(request, "topic"))


def _end_transaction(request: RemotingCommand) -> Iterator[_Need]:
    """A client of 4.9 does not say which topic it was; it could not have begun without the right to it."""
    topic = request.ext_fields.get("topic")
    if topic:
        yield from _write_topic(topic)


def _unregister(request: RemotingCommand) -> Iterator[_Need]:
    group = request.ext_fields.get("consumerGroup")
    if group:
        yield _Need("group", group, Right.SUB)


def _heartbeat(request: RemotingCommand) -> Iterator[_Need]:
    for consumer in HeartbeatData.decode(request.body).consumer_data_set:
        yield _Need("group", consumer.group_name, Right.SUB)
        for subscription in consumer.subscription_data_set:
            yield from _read_topic(subscription.topic)


def _lock(request: RemotingCommand) -> Iterator[_Need]:
    yield _Need("group", LockBatchRequestBody.decode(request.body).consumer_group, Right.SUB)


def _check_client(request: RemotingCommand) -> Iterator[_Need]:
    asked = CheckClientRequestBody.decode(request.body)
    yield _Need("group", asked.group, Right.SUB)
    yield from _read_topic(asked.subscription_data.topic)


_FREE = frozenset(
    {
        # for whoever has an account: clients ask these before they know what they will do
        RequestCode.GET_ROUTEINFO_BY_TOPIC,
        RequestCode.GET_BROKER_CLUSTER_INFO,
        # a reply goes to whoever asked for it, and nowhere else
        RequestCode.SEND_REPLY_MESSAGE,
        RequestCode.SEND_REPLY_MESSAGE_V2,
    }
)

_NEEDS: dict[int, _Needs] = {
    RequestCode.SEND_MESSAGE: _send("topic"),
    RequestCode.SEND_MESSAGE_V2: _send("b"),
    RequestCode.SEND_BATCH_MESSAGE: _send("b"),
    RequestCode.RECALL_MESSAGE: _send("topic"),
    RequestCode.END_TRANSACTION: _end_transaction,
    RequestCode.PULL_MESSAGE: _consume,
    RequestCode.LITE_PULL_MESSAGE: _consume,
    RequestCode.QUERY_CONSUMER_OFFSET: _consume,
    RequestCode.UPDATE_CONSUMER_OFFSET: _consume,
    RequestCode.CONSUMER_SEND_MSG_BACK: _group("group"),
    RequestCode.GET_CONSUMER_LIST_BY_GROUP: _group("consumerGroup"),
    RequestCode.LOCK_BATCH_MQ: _lock,
    RequestCode.UNLOCK_BATCH_MQ: _lock,
    RequestCode.HEART_BEAT: _heartbeat,
    RequestCode.UNREGISTER_CLIENT: _unregister,
    RequestCode.CHECK_CLIENT_CONFIG: _check_client,
    RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: _look,
    RequestCode.GET_MAX_OFFSET: _look,
    RequestCode.GET_MIN_OFFSET: _look,
    RequestCode.GET_EARLIEST_MSG_STORETIME: _look,
    RequestCode.QUERY_MESSAGE: _query,
}
