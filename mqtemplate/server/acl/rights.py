"""The right that each request needs, by request code.

The needs follow from the names in a request. What else a request reaches (the topic of a record, the owner of a
transaction) the core checks with `AccessControl`. A code that is in no table needs an administrator, so a new
request is never open by mistake. ``docs/request-rights.md`` shows the same table.

Source: RocketMQ ``acl: PlainAccessValidator`` (ACL 1.0), ``auth`` (ACL 2.0).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from mqtemplate.errors import RemoteProtocolError
from mqtemplate.remoting.protocol.bodies import group as bodies
from mqtemplate.remoting.protocol.codes import RequestCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.pop import popped_topic
from mqtemplate.remoting.protocol.sequenced import read_queue_batches
from mqtemplate.server.acl.settings import Need, Right, group_need, topic_need
from mqtemplate.server.requests.refusal import decode_handles


class RequestRights(NamedTuple):
    """The rights that requests with one code need.

    Attributes:
        text: The rights in words, as the documentation shows them.
        needs: Returns the rights that a request needs by the names in it.
    """

    text: str
    needs: Callable[[RemotingCommand], list[Need]]


def _field(request: RemotingCommand, name: str) -> str:
    value = request.ext_fields.get(name)
    if value is None:
        raise RemoteProtocolError(f"{request} needs the field {name}")
    return value


# --- needs of single requests ---------------------------------------------------------------------


def _topic_field(name: str, right: Right) -> RequestRights:
    return RequestRights(
        f"{str(right).replace('|', ' or ')} on the topic", lambda request: [topic_need(_field(request, name), right)]
    )


def _sequenced(request: RemotingCommand) -> list[Need]:
    return [topic_need(topic, Right.PUB) for topic in sorted({run.topic for run in read_queue_batches(request.body)})]


def _group_field(name: str, text: str = "SUB on the group") -> RequestRights:
    return RequestRights(text, lambda request: [group_need(_field(request, name))])


def _consumed(request: RemotingCommand) -> list[Need]:
    return [group_need(_field(request, "consumerGroup")), topic_need(_field(request, "topic"), Right.SUB)]


def _ended(request: RemotingCommand) -> list[Need]:
    """Clients of 4.9 do not name the topic. `ClientTransactionEnds` checks the topic of the half message."""
    topic = request.ext_fields.get("topic")
    return [topic_need(topic, Right.PUB)] if topic else []


def _unregistered(request: RemotingCommand) -> list[Need]:
    group = request.ext_fields.get("consumerGroup")
    return [group_need(group)] if group else []


def _registered(request: RemotingCommand) -> list[Need]:
    needs = []
    for consumer in bodies.HeartbeatData.decode(request.body).consumer_data_set:
        needs.append(group_need(consumer.group_name))
        needs += [topic_need(subscription.topic, Right.SUB) for subscription in consumer.subscription_data_set]
    return needs


def _locked(request: RemotingCommand) -> list[Need]:
    return [group_need(bodies.LockBatchRequestBody.decode(request.body).consumer_group)]


def _checked(request: RemotingCommand) -> list[Need]:
    body = bodies.CheckClientRequestBody.decode(request.body)
    return [group_need(body.group), topic_need(body.subscription_data.topic, Right.SUB)]


def _assigned(request: RemotingCommand) -> list[Need]:
    body = bodies.QueryAssignmentRequestBody.decode(request.body)
    return [group_need(body.consumer_group), topic_need(body.topic, Right.SUB)]


def _acknowledged(request: RemotingCommand) -> list[Need]:
    return _delivered(_field(request, "consumerGroup"), _field(request, "topic"))


def _acknowledged_all(request: RemotingCommand) -> list[Need]:
    acks = bodies.BatchAckMessageRequestBody.decode(request.body).acks
    return [need for pair in sorted({(ack.consumer_group, ack.topic) for ack in acks}) for need in _delivered(*pair)]


def _delivered(group: str, topic: str) -> list[Need]:
    """A message may be in the retry topic of the group for one topic: the account needs the right to that one."""
    return [group_need(group), topic_need(popped_topic(topic, group)[0], Right.SUB)]


def _changed(request: RemotingCommand) -> list[Need]:
    """A handle names its topic, and changes no message of another one. A key without a topic reaches all topics."""
    handles = decode_handles(request.ext_fields.get("handle"))
    if handles:
        return [topic_need(topic, Right.PUB) for topic in sorted({handle.topic for handle in handles})]
    topic = request.ext_fields.get("topic")
    return [Need("topic", None, Right.PUB)] if topic is None else [topic_need(topic, Right.PUB)]


def _changed_and_sent(request: RemotingCommand) -> list[Need]:
    return [*_changed(request), *_sequenced(request)]


def _pending(request: RemotingCommand) -> list[Need]:
    """A query without a topic reaches all topics, and the retries of all groups."""
    topic = request.ext_fields.get("topic")
    if topic is not None:
        return [topic_need(topic, Right.SUB)]
    return [Need("topic", None, Right.SUB), Need("group", None, Right.SUB)]


def _moved(request: RemotingCommand) -> list[Need]:
    """Each process of an application looks up its moved messages. The state names no messages."""
    topic = request.ext_fields.get("topic")
    if topic is not None:
        return [topic_need(topic, Right.PUB)]
    return [] if request.ext_fields.get("msgId") is None else [Need("topic", None, Right.PUB)]


# --- needs of calls of the gRPC protocol ----------------------------------------------------------


class GrpcRights(NamedTuple):
    """The rights that calls of one method of RocketMQ's gRPC protocol need.

    Attributes:
        text: The rights in words, as the documentation shows them.
        needs: Returns the rights that a call needs by the names in its message.
    """

    text: str
    needs: Callable[[Any], list[Need]]


def _grpc_topic(right: Right) -> GrpcRights:
    words = str(right).replace("|", " or ")
    return GrpcRights(f"{words} on the topic", lambda call: [topic_need(call.topic.name, right)])


def _grpc_sent(call: Any) -> list[Need]:
    return [topic_need(topic, Right.PUB) for topic in sorted({message.topic.name for message in call.messages})]


def _grpc_received(call: Any) -> list[Need]:
    return [group_need(call.group.name), topic_need(call.message_queue.topic.name, Right.SUB)]


def _grpc_consumed(call: Any) -> list[Need]:
    return [group_need(call.group.name), topic_need(call.topic.name, Right.SUB)]


def _grpc_group(call: Any) -> list[Need]:
    return [group_need(call.group.name)] if call.group.name else []


def _grpc_settings(call: Any) -> list[Need]:
    settings = call.settings
    kind = settings.WhichOneof("pub_sub")
    if kind == "publishing":
        return [topic_need(topic.name, Right.PUB) for topic in settings.publishing.topics]
    if kind == "subscription":
        subscriptions = settings.subscription.subscriptions
        topics = [topic_need(each.topic.name, Right.SUB) for each in subscriptions]
        return [group_need(settings.subscription.group.name), *topics]
    return []


# --- the tables -----------------------------------------------------------------------------------

ANY_ACCOUNT: Mapping[int, str] = MappingProxyType(
    {
        # A client requests routes before it sends or subscribes.
        RequestCode.GET_ROUTEINFO_BY_TOPIC: "without an account too; with `sign-routes` any account",
        RequestCode.GET_BROKER_CLUSTER_INFO: "without an account too; with `sign-routes` any account",
        # A reply is only forwarded to the producer of the request. It is bound to its account: see `ClientIds`.
        RequestCode.SEND_REPLY_MESSAGE: "any account",
        RequestCode.SEND_REPLY_MESSAGE_V2: "any account",
    }
)
"""Codes that each account may request."""

ROUTES = frozenset({RequestCode.GET_ROUTEINFO_BY_TOPIC, RequestCode.GET_BROKER_CLUSTER_INFO})
"""Codes that need no signature, unless `AclSettings.sign_routes` is set. RocketMQ's name server checks none, and pull
consumers of the Go client v2 never sign them."""

_CONSUMED = RequestRights("SUB on the group and SUB on the topic", _consumed)
_DELIVERED = RequestRights("SUB on the group and SUB on the topic, of a retry on the real topic", _acknowledged)
_LOCKED = RequestRights("SUB on the group", _locked)
_CHANGED = RequestRights("PUB on the topic that will receive the message; without a topic on all topics", _changed)
_PENDING = RequestRights("SUB on the topic; without a topic on all topics and groups", _pending)
_HAND_OVER = RequestRights(
    "PUB on the topic of a message; without a topic on all topics; without a message any account", _moved
)
_EITHER = _topic_field("topic", Right.PUB | Right.SUB)

RIGHTS: Mapping[int, RequestRights] = MappingProxyType(
    {
        RequestCode.SEND_MESSAGE: _topic_field("topic", Right.PUB),
        RequestCode.SEND_MESSAGE_V2: _topic_field("b", Right.PUB),
        RequestCode.SEND_BATCH_MESSAGE: _topic_field("b", Right.PUB),
        RequestCode.SEND_SEQUENCED_MESSAGES: RequestRights("PUB on each topic", _sequenced),
        RequestCode.RECALL_MESSAGE: _topic_field("topic", Right.PUB),
        RequestCode.END_TRANSACTION: RequestRights("PUB on the topic of the half message", _ended),
        RequestCode.PULL_MESSAGE: _CONSUMED,
        RequestCode.LITE_PULL_MESSAGE: _CONSUMED,
        RequestCode.QUERY_CONSUMER_OFFSET: _CONSUMED,
        RequestCode.UPDATE_CONSUMER_OFFSET: _CONSUMED,
        RequestCode.POP_MESSAGE: _CONSUMED,
        RequestCode.PEEK_MESSAGE: _CONSUMED,
        RequestCode.NOTIFICATION: _CONSUMED,
        RequestCode.POLLING_INFO: _CONSUMED,
        RequestCode.ACK_MESSAGE: _DELIVERED,
        RequestCode.CHANGE_MESSAGE_INVISIBLETIME: _DELIVERED,
        RequestCode.BATCH_ACK_MESSAGE: RequestRights("SUB on each group and SUB on each topic", _acknowledged_all),
        RequestCode.QUERY_ASSIGNMENT: RequestRights("SUB on the group and SUB on the topic", _assigned),
        RequestCode.CONSUMER_SEND_MSG_BACK: _group_field(
            "group", "SUB on the group and SUB on the topic of the stored message"
        ),
        RequestCode.GET_CONSUMER_LIST_BY_GROUP: _group_field("consumerGroup"),
        RequestCode.LOCK_BATCH_MQ: _LOCKED,
        RequestCode.UNLOCK_BATCH_MQ: _LOCKED,
        RequestCode.HEART_BEAT: RequestRights(
            "SUB on each consumer group and on each subscribed topic; the client ID is not in use by another account",
            _registered,
        ),
        RequestCode.UNREGISTER_CLIENT: RequestRights("SUB on the consumer group, if there is one", _unregistered),
        RequestCode.CHECK_CLIENT_CONFIG: RequestRights("SUB on the group and SUB on the topic", _checked),
        RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: _EITHER,
        RequestCode.GET_MAX_OFFSET: _EITHER,
        RequestCode.GET_MIN_OFFSET: _EITHER,
        RequestCode.GET_EARLIEST_MSG_STORETIME: _EITHER,
        RequestCode.QUERY_MESSAGE: _topic_field("topic", Right.SUB),
        RequestCode.QUERY_TOPIC_CONSUME_BY_WHO: _topic_field("topic", Right.SUB),
        RequestCode.CANCEL_DELAYED_MESSAGE: _CHANGED,
        RequestCode.RESCHEDULE_DELAYED_MESSAGE: _CHANGED,
        RequestCode.CHANGE_AND_SEND: RequestRights(f"{_CHANGED.text}; and PUB on each topic", _changed_and_sent),
        RequestCode.GET_PENDING_MESSAGES: _PENDING,
        RequestCode.COUNT_PENDING_MESSAGES: _PENDING,
        RequestCode.GET_HAND_OVER: _HAND_OVER,
        RequestCode.GET_RECORD_BLOCK: _topic_field("topic", Right.SUB),
    }
)
"""Codes that need rights to topics or groups. All other codes need an administrator."""

_GRPC_CONSUMED = GrpcRights("SUB on the group and SUB on the topic", _grpc_consumed)
_GRPC_GROUP = GrpcRights("SUB on the consumer group, if there is one", _grpc_group)

GRPC_RIGHTS: Mapping[str, GrpcRights] = MappingProxyType(
    {
        "QueryRoute": _grpc_topic(Right.PUB | Right.SUB),
        "Heartbeat": _GRPC_GROUP,
        "SendMessage": GrpcRights("PUB on the topic", _grpc_sent),
        "QueryAssignment": _GRPC_CONSUMED,
        "ReceiveMessage": GrpcRights("SUB on the group and SUB on the topic", _grpc_received),
        "AckMessage": _GRPC_CONSUMED,
        "ForwardMessageToDeadLetterQueue": _GRPC_CONSUMED,
        "EndTransaction": _grpc_topic(Right.PUB),
        "Telemetry": GrpcRights(
            "PUB on each topic of a producer; SUB on the group and on each topic of a consumer; the client ID is not "
            "in use by another account",
            _grpc_settings,
        ),
        "NotifyClientTermination": _GRPC_GROUP,
        "ChangeInvisibleDuration": GrpcRights("SUB on the group", _grpc_group),
        "RecallMessage": _grpc_topic(Right.PUB),
        "SyncLiteSubscription": _GRPC_CONSUMED,
    }
)
"""Methods of RocketMQ's gRPC protocol. A method that is not in the table is not served."""

CHANGES = frozenset(
    {
        RequestCode.SEND_MESSAGE,
        RequestCode.SEND_MESSAGE_V2,
        RequestCode.SEND_BATCH_MESSAGE,
        RequestCode.SEND_SEQUENCED_MESSAGES,
        RequestCode.SEND_REPLY_MESSAGE,
        RequestCode.SEND_REPLY_MESSAGE_V2,
        RequestCode.CONSUMER_SEND_MSG_BACK,
        RequestCode.END_TRANSACTION,
        RequestCode.RECALL_MESSAGE,
        RequestCode.CANCEL_DELAYED_MESSAGE,
        RequestCode.RESCHEDULE_DELAYED_MESSAGE,
        RequestCode.CHANGE_AND_SEND,
        RequestCode.CONSUME_MESSAGE_DIRECTLY,
        RequestCode.UPDATE_AND_CREATE_TOPIC,
        RequestCode.UPDATE_AND_CREATE_TOPIC_LIST,
        RequestCode.DELETE_TOPIC_IN_BROKER,
        RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
        RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST,
        RequestCode.DELETE_SUBSCRIPTIONGROUP,
        RequestCode.INVOKE_BROKER_TO_RESET_OFFSET,
        RequestCode.CLONE_GROUP_OFFSET,
        RequestCode.UPDATE_BROKER_CONFIG,
        RequestCode.PUT_KV_CONFIG,
        RequestCode.DELETE_KV_CONFIG,
        RequestCode.WIPE_WRITE_PERM_OF_BROKER,
        RequestCode.ADD_WRITE_PERM_OF_BROKER,
    }
)
"""Codes that change something and that no client repeats unchanged. Clients repeat all others: heartbeats, pulls,
pops, acknowledgements, commits of offsets, locks, registrations of brokers, reloads. ``mqadmin deleteTopic`` sends
DELETE_TOPIC_IN_NAMESRV with the fields of DELETE_TOPIC_IN_BROKER, so with the same signature. It is left out: a broker
registers its topics again."""
