"""Access control: an account signs each request and needs the right to it.

A table holds the rights that a request needs. A request that is not in the table needs an administrator, so a new
request code is never open by mistake. Source: RocketMQ ``acl: PlainAccessValidator`` (ACL 1.0), ``auth`` (ACL 2.0).
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from typing import NamedTuple

from mqtemplate.errors import RemoteProtocolError
from mqtemplate.event_log import get_logger
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.acl import ACCESS_KEY, is_signed_with
from mqtemplate.remoting.protocol.bodies.group import CheckClientRequestBody, HeartbeatData, LockBatchRequestBody
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode, Version
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.sequenced import read_runs
from mqtemplate.server.acl_settings import Account, AclSettings, Right
from mqtemplate.server.processors.delayed import decode_handles
from mqtemplate.topics import DLQ_TOPIC_PREFIX, RETRY_TOPIC_PREFIX

_log = get_logger("mqtemplate.acl")

_MAX_LOGGED = 1_000
_UNKNOWN_SECRET = secrets.token_hex()


class AclGuard:
    """Checks each request before its processor runs.

    - A request with an unknown access key or a wrong signature is refused. The response does not tell which it was.
    - Clients from 5.0.0 on receive NO_PERMISSION, as from ACL 2.0; older clients receive SYSTEM_ERROR, as from ACL 1.0.
      An older client would take NO_PERMISSION for a topic that is not writable, and retry with the next broker.
    - The check runs in the I/O thread: it computes one signature and does no I/O.
    """

    def __init__(self, settings: AclSettings) -> None:
        self._accounts = {account.access_key: account for account in settings.accounts}
        self._logged: set[tuple[int, str]] = set()

    def __call__(self, connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
        """Return the response to a request that is refused, or None if the request is permitted.

        Raises:
            RemoteProtocolError: The request cannot be decoded.
        """
        reason = self._refusal(request)
        if reason is None:
            return None
        self._log_refusal(connection, request, reason)
        code = ResponseCode.NO_PERMISSION if request.version >= Version.V5_0_0 else ResponseCode.SYSTEM_ERROR
        return request.response(code, remark=reason)

    def _log_refusal(self, connection: Connection, request: RemotingCommand, reason: str) -> None:
        """Log a warning once for each connection and reason: a refused client may retry for days."""
        key = (connection.id, reason)
        level = logging.DEBUG if key in self._logged else logging.WARNING
        _log.log(level, "acl.refused", request=str(request), remote=str(connection.remote), reason=reason)
        if len(self._logged) >= _MAX_LOGGED:
            self._logged.clear()
        self._logged.add(key)

    def _refusal(self, request: RemotingCommand) -> str | None:
        access_key = request.ext_fields.get(ACCESS_KEY)
        if access_key is None:
            return "access control is enabled: configure the client with an access key and a secret key"
        account = self._accounts.get(access_key)
        secret_key = _UNKNOWN_SECRET if account is None else account.secret_key
        # Compute the signature for an unknown account too: the response time must not reveal which accounts exist.
        if not is_signed_with(request, secret_key) or account is None:
            return f"access key {access_key[:64]!r} is unknown, or its secret key is wrong"
        return None if account.admin else _missing_right(account, request)


def _missing_right(account: Account, request: RemotingCommand) -> str | None:
    if request.code in _FREE:
        return None
    code = RequestCode.of(request.code)
    name = code.name if isinstance(code, RequestCode) else str(code)
    if request.code not in _NEEDS:
        return f"access key {account.access_key!r} may not request {name}: only an account with admin: true may"
    for need in _NEEDS[request.code](request):
        if not account.may(*need):
            advice = "; name a topic" if need.name is None else ""
            return f"access key {account.access_key!r} has no right {need} ({name}){advice}"
    return None


# --- rights that a request needs --------------------------------------------------------------------


class _Need(NamedTuple):
    """The right to one topic or group. If *right* has several bits, each of them suffices.

    Attributes:
        name: None: the right to all topics or groups.
    """

    kind: str
    name: str | None
    right: Right

    def __str__(self) -> str:
        return (
            f"{self.right} on all {self.kind}s" if self.name is None else f"{self.right} on {self.kind} {self.name!r}"
        )


_Needs = Callable[[RemotingCommand], list[_Need]]


def _topic(topic: str, right: Right) -> _Need:
    """Return the need of *right* on a topic. The retry and dead letter topics of a group need a right on the group."""
    for prefix in (RETRY_TOPIC_PREFIX, DLQ_TOPIC_PREFIX):
        if topic.startswith(prefix):
            return _group(topic.removeprefix(prefix))
    return _Need("topic", topic, right)


def _group(group: str) -> _Need:
    return _Need("group", group, Right.SUB)


def _field(request: RemotingCommand, name: str) -> str:
    value = request.ext_fields.get(name)
    if value is None:
        raise RemoteProtocolError(f"{request} needs the field {name}")
    return value


def _topic_field(name: str, right: Right) -> _Needs:
    return lambda request: [_topic(_field(request, name), right)]


def _group_field(name: str) -> _Needs:
    return lambda request: [_group(_field(request, name))]


def _consume(request: RemotingCommand) -> list[_Need]:
    return [_group(_field(request, "consumerGroup")), _topic(_field(request, "topic"), Right.SUB)]


def _end_transaction(request: RemotingCommand) -> list[_Need]:
    """Clients of 4.9 do not name the topic. They needed the right to it for the half message."""
    topic = request.ext_fields.get("topic")
    return [_topic(topic, Right.PUB)] if topic else []


def _unregister(request: RemotingCommand) -> list[_Need]:
    group = request.ext_fields.get("consumerGroup")
    return [_group(group)] if group else []


def _heartbeat(request: RemotingCommand) -> list[_Need]:
    needs = []
    for consumer in HeartbeatData.decode(request.body).consumer_data_set:
        needs.append(_group(consumer.group_name))
        needs += [_topic(subscription.topic, Right.SUB) for subscription in consumer.subscription_data_set]
    return needs


def _lock(request: RemotingCommand) -> list[_Need]:
    return [_group(LockBatchRequestBody.decode(request.body).consumer_group)]


def _check_client(request: RemotingCommand) -> list[_Need]:
    body = CheckClientRequestBody.decode(request.body)
    return [_group(body.group), _topic(body.subscription_data.topic, Right.SUB)]


def _change_delayed(request: RemotingCommand) -> list[_Need]:
    """A handle names its topic, and changes no message of another one. A key without a topic reaches all topics."""
    handles = decode_handles(request.ext_fields.get("handle"))
    if handles:
        return [_topic(topic, Right.PUB) for topic in sorted({handle.topic for handle in handles})]
    topic = request.ext_fields.get("topic")
    return [_Need("topic", None, Right.PUB)] if topic is None else [_topic(topic, Right.PUB)]


def _send_sequenced(request: RemotingCommand) -> list[_Need]:
    return [_topic(topic, Right.PUB) for topic in sorted({run.topic for run in read_runs(request.body)})]


def _query_delayed(request: RemotingCommand) -> list[_Need]:
    """A query without a topic reaches all topics, and the retries of all groups."""
    topic = request.ext_fields.get("topic")
    if topic is not None:
        return [_topic(topic, Right.SUB)]
    return [_Need("topic", None, Right.SUB), _Need("group", None, Right.SUB)]


_FREE = frozenset(
    {
        # Any account may send these: a client requests routes before it sends or subscribes.
        RequestCode.GET_ROUTEINFO_BY_TOPIC,
        RequestCode.GET_BROKER_CLUSTER_INFO,
        # A reply is only forwarded to the producer of the request.
        RequestCode.SEND_REPLY_MESSAGE,
        RequestCode.SEND_REPLY_MESSAGE_V2,
    }
)

_NEEDS: dict[int, _Needs] = {
    RequestCode.SEND_MESSAGE: _topic_field("topic", Right.PUB),
    RequestCode.SEND_MESSAGE_V2: _topic_field("b", Right.PUB),
    RequestCode.SEND_BATCH_MESSAGE: _topic_field("b", Right.PUB),
    RequestCode.SEND_SEQUENCED_MESSAGES: _send_sequenced,
    RequestCode.RECALL_MESSAGE: _topic_field("topic", Right.PUB),
    RequestCode.END_TRANSACTION: _end_transaction,
    RequestCode.PULL_MESSAGE: _consume,
    RequestCode.LITE_PULL_MESSAGE: _consume,
    RequestCode.QUERY_CONSUMER_OFFSET: _consume,
    RequestCode.UPDATE_CONSUMER_OFFSET: _consume,
    RequestCode.CONSUMER_SEND_MSG_BACK: _group_field("group"),
    RequestCode.GET_CONSUMER_LIST_BY_GROUP: _group_field("consumerGroup"),
    RequestCode.LOCK_BATCH_MQ: _lock,
    RequestCode.UNLOCK_BATCH_MQ: _lock,
    RequestCode.HEART_BEAT: _heartbeat,
    RequestCode.UNREGISTER_CLIENT: _unregister,
    RequestCode.CHECK_CLIENT_CONFIG: _check_client,
    RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: _topic_field("topic", Right.PUB | Right.SUB),
    RequestCode.GET_MAX_OFFSET: _topic_field("topic", Right.PUB | Right.SUB),
    RequestCode.GET_MIN_OFFSET: _topic_field("topic", Right.PUB | Right.SUB),
    RequestCode.GET_EARLIEST_MSG_STORETIME: _topic_field("topic", Right.PUB | Right.SUB),
    RequestCode.QUERY_MESSAGE: _topic_field("topic", Right.SUB),
    RequestCode.CANCEL_DELAYED_MESSAGE: _change_delayed,
    RequestCode.RESCHEDULE_DELAYED_MESSAGE: _change_delayed,
    RequestCode.GET_PENDING_MESSAGES: _query_delayed,
    RequestCode.COUNT_PENDING_MESSAGES: _query_delayed,
}
