"""Requests of ``mqadmin`` about what this server has in another form or not at all: accounts, replicas, maintenance.
The mode in which a group gets messages (``mqadmin setConsumeMode``), and the assignments of queues that follow from it.
And the requests of a hand-over, which only clients of this library send.

Source: RocketMQ ``broker: AdminBrokerProcessor``, ``UserConverter``, ``AclConverter``, ``QueryAssignmentProcessor``,
``MessageRequestModeManager``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from mqtemplate.broker.hand_over import HandOverError, HandOverPhase, MovedMessage, ReserveFilter, TransitMessage
from mqtemplate.engine.clients import ClientRegistry
from mqtemplate.engine.engine import Engine
from mqtemplate.engine.group_rules import allocate_averagely, sort_client_ids
from mqtemplate.event_log import get_logger
from mqtemplate.message import MessageQueue
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.bodies import group as bodies
from mqtemplate.remoting.protocol.bodies.own_requests import HandOverRequestHeader
from mqtemplate.remoting.protocol.bodies.route import TopicRouteData
from mqtemplate.remoting.protocol.codes import Perm, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.server.acl.access import AccessControl
from mqtemplate.server.acl.settings import Account, Right
from mqtemplate.server.requests.refusal import RefusedError
from mqtemplate.server.requests.registration import answers
from mqtemplate.server.state.groups import RequestModes, SubscriptionGroupTable
from mqtemplate.server.state.remote_clients import RemoteClients
from mqtemplate.server.state.topics import TopicConfigs
from mqtemplate.topics import RETRY_TOPIC_PREFIX

_log = get_logger("mqtemplate.admin")

_ACCOUNTS = (
    "accounts and their rights are in the configuration: change mqtemplate.server.acl.accounts, and let the server "
    "read it with mqtemplate reload"
)
_POP_ROLLBACK = "this server stores the progress of POP consumption in one form; there is none to roll back to"
_LITE = "this server has no lite topics; use a topic for each, or the tags of messages"
_CONTROLLER = "this server is its only broker: it has no controller and no replicas"
_COLD_DATA = "this server does not limit the reads of old messages, and the operating system reads its files ahead"
_ROCKSDB = "this server stores nothing in RocksDB; mqadmin exportMetadata writes topics and groups as JSON"
_CONTAINER = "this server is no broker container; start a process for each broker"

REASONS: Mapping[int, str] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                RequestCode.UPDATE_AND_CREATE_ACL_CONFIG,
                RequestCode.DELETE_ACL_CONFIG,
                RequestCode.GET_BROKER_CLUSTER_ACL_INFO,
                RequestCode.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG,
                RequestCode.AUTH_CREATE_USER,
                RequestCode.AUTH_UPDATE_USER,
                RequestCode.AUTH_DELETE_USER,
                RequestCode.AUTH_CREATE_ACL,
                RequestCode.AUTH_UPDATE_ACL,
                RequestCode.AUTH_DELETE_ACL,
            ),
            _ACCOUNTS,
        ),
        RequestCode.UPDATE_NAMESRV_CONFIG: "the settings of this name server are constant",
        RequestCode.RESUME_CHECK_HALF_MESSAGE: "this server does not check a half message again after its last check; "
        "its content is in the topic TRANS_CHECK_MAX_TIME_TOPIC: send it again",
        RequestCode.DELETE_EXPIRED_COMMITLOG: "this server deletes expired files by itself, at the hours of "
        "mqtemplate.broker.delete-when or when the disk is full; to delete earlier change this setting, or "
        "mqtemplate.broker.file-reserved-time",
        RequestCode.UPDATE_AND_GET_GROUP_FORBIDDEN: "this server forbids a group no single topic; use the rights of "
        "its account, or consumeEnable of the group (mqadmin updateSubGroup -s false)",
        RequestCode.UPDATE_AND_CREATE_STATIC_TOPIC: "this server has no static topics; create an ordinary one (mqadmin "
        "updateTopic)",
        RequestCode.SWITCH_TIMER_ENGINE: "this server has one implementation of timers, in files",
        **dict.fromkeys(
            (RequestCode.CHECK_ROCKSDB_CQ_WRITE_PROGRESS, RequestCode.EXPORT_ROCKSDB_CONFIG_TO_JSON), _ROCKSDB
        ),
        **dict.fromkeys((RequestCode.ADD_BROKER, RequestCode.REMOVE_BROKER), _CONTAINER),
        **dict.fromkeys(
            (
                RequestCode.RESET_MASTER_FLUSH_OFFSET,
                RequestCode.CONTROLLER_ELECT_MASTER,
                RequestCode.CONTROLLER_GET_METADATA_INFO,
                RequestCode.CONTROLLER_GET_SYNC_STATE_DATA,
                RequestCode.GET_BROKER_EPOCH_CACHE,
                RequestCode.UPDATE_CONTROLLER_CONFIG,
                RequestCode.GET_CONTROLLER_CONFIG,
                RequestCode.CLEAN_BROKER_DATA,
            ),
            _CONTROLLER,
        ),
        **dict.fromkeys(
            (
                RequestCode.UPDATE_COLD_DATA_FLOW_CTR_CONFIG,
                RequestCode.REMOVE_COLD_DATA_FLOW_CTR_CONFIG,
                RequestCode.GET_COLD_DATA_FLOW_CTR_INFO,
                RequestCode.SET_COMMITLOG_READ_MODE,
            ),
            _COLD_DATA,
        ),
        RequestCode.POP_ROLLBACK: _POP_ROLLBACK,
        **dict.fromkeys(
            (
                RequestCode.GET_BROKER_LITE_INFO,
                RequestCode.GET_PARENT_TOPIC_INFO,
                RequestCode.GET_LITE_TOPIC_INFO,
                RequestCode.GET_LITE_CLIENT_INFO,
                RequestCode.GET_LITE_GROUP_INFO,
                RequestCode.TRIGGER_LITE_DISPATCH,
            ),
            _LITE,
        ),
    }
)
"""Request code -> why the server does not answer it. The response is REQUEST_CODE_NOT_SUPPORTED with this text."""


# --- maintenance and replicas ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MaintenanceProcessor:
    """Processors of requests for work that this server does by itself, and of the state of its replicas."""

    engine: Engine

    @answers(RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE, RequestCode.CLEAN_UNUSED_TOPIC)
    def _clean(self) -> None:
        """Do nothing: units are removed with their messages, and the offsets of a topic with the topic."""

    @answers(RequestCode.GET_BROKER_HA_STATUS)
    def _ha_status(self) -> bytes:
        """Return RocketMQ's ``HARuntimeInfo``: a master without replicas."""
        end = self.engine.store.end_offset
        info = {"haConnectionInfo": [], "inSyncSlaveNums": 0, "master": True, "masterCommitLogMaxOffset": end}
        return json.dumps(info).encode()


# --- accounts -------------------------------------------------------------------------------------

_SUBJECT = "User:"
_ACTIONS = {Right.PUB: "Pub", Right.SUB: "Sub"}
_KINDS = {"Topic": ("topic_perms", "default_topic_perm"), "Group": ("group_perms", "default_group_perm")}


@dataclass(frozen=True, slots=True)
class AccountProcessor:
    """Processors of queries for the users and ACLs of RocketMQ 5: the accounts of the configuration.

    No response has a secret key.
    """

    access: AccessControl

    @answers(RequestCode.AUTH_LIST_USER)
    def _users(self, request: RemotingCommand) -> bytes:
        return json.dumps([_user(each) for each in self._accounts(request.ext_fields.get("filter"))]).encode()

    @answers(RequestCode.AUTH_GET_USER)
    def _get_user(self, request: RemotingCommand) -> bytes:
        return json.dumps(_user(self._account(request.ext_fields.get("username", "")))).encode()

    @answers(RequestCode.AUTH_LIST_ACL)
    def _acls(self, request: RemotingCommand) -> bytes:
        fields = request.ext_fields
        name, resource = fields.get("subjectFilter"), fields.get("resourceFilter") or ""
        acls = [_acl(each, resource) for each in self._accounts(None if name is None else name.removeprefix(_SUBJECT))]
        return json.dumps([acl for acl in acls if acl["policies"] or not resource]).encode()

    @answers(RequestCode.AUTH_GET_ACL)
    def _get_acl(self, request: RemotingCommand) -> bytes:
        name = request.ext_fields.get("subject", "").removeprefix(_SUBJECT)
        return json.dumps(_acl(self._account(name))).encode()

    def _accounts(self, part: str | None = None) -> list[Account]:
        """Return the accounts whose access keys contain *part*, by access key.

        Raises:
            RefusedError: Access control is disabled.
        """
        if self.access.settings is None:
            raise RefusedError(
                ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
                "access control is disabled, so there are no accounts; set mqtemplate.server.acl.enabled to true",
            )
        accounts = sorted(self.access.accounts.values(), key=lambda account: account.access_key)
        return [account for account in accounts if not account.is_owner and (part or "") in account.access_key]

    def _account(self, access_key: str) -> Account:
        for account in self._accounts():
            if account.access_key == access_key:
                return account
        raise RefusedError(ResponseCode.QUERY_NOT_FOUND, f"there is no account {access_key!r:.64}; {_ACCOUNTS}")


def _user(account: Account) -> dict[str, str]:
    return {
        "username": account.access_key,
        "userType": "Super" if account.admin else "Normal",
        "userStatus": "enable",
    }


def _acl(account: Account, resource: str = "") -> dict[str, object]:
    """Return the rights of an account to the resources whose name contains *resource*."""
    kinds: dict[str, list[dict[str, object]]] = {"Custom": [], "Default": []}
    for policy, name, right in _rights(account):
        if resource in name:
            actions = [text for each, text in _ACTIONS.items() if each in right or not right]
            entry: dict[str, object] = {"resource": name, "actions": actions, "sourceIps": []}
            entry["decision"] = "Allow" if right else "Deny"
            kinds[policy].append(entry)
    policies = [{"policyType": policy, "entries": entries} for policy, entries in kinds.items() if entries]
    return {"subject": f"{_SUBJECT}{account.access_key}", "policies": policies}


def _rights(account: Account) -> Iterator[tuple[str, str, Right]]:
    """Yield the kind of policy, the resource, and the right to it."""
    for kind, (perms, default) in _KINDS.items():
        for name, right in sorted(getattr(account, perms).items()):
            yield "Custom", f"{kind}:{name}", right
        yield "Default", f"{kind}:*", Right.PUB | Right.SUB if account.admin else getattr(account, default)


# --- assignments of queues --------------------------------------------------------------------------

_Allocate = Callable[[str, Sequence[str], Sequence[MessageQueue]], list[MessageQueue]]


def _allocate_by_circle(member: str, members: Sequence[str], queues: Sequence[MessageQueue]) -> list[MessageQueue]:
    """Return each n-th queue, of n members. Source: ``AllocateMessageQueueAveragelyByCircle``."""
    return list(queues[members.index(member) :: len(members)]) if member in members else []


_STRATEGIES: dict[str, _Allocate] = {"AVG": allocate_averagely, "AVG_BY_CIRCLE": _allocate_by_circle}


@dataclass(frozen=True, slots=True)
class AssignmentProcessor:
    """Assigns queues to members that let the broker do it (``clientRebalance=false``), and stores the modes of groups.

    Attributes:
        route: Returns the route of a topic: its queues may be on several brokers.
    """

    modes: RequestModes
    topics: TopicConfigs
    groups: SubscriptionGroupTable
    clients: ClientRegistry
    remote_clients: RemoteClients
    route: Callable[[str], TopicRouteData | None]

    @answers(RequestCode.SET_MESSAGE_REQUEST_MODE, slow=True)
    def _set_mode(self, mode: bodies.SetMessageRequestModeRequestBody, connection: Connection) -> None:
        if mode.mode not in ("PULL", "POP"):
            raise RefusedError(ResponseCode.INVALID_PARAMETER, f"mode must be PULL or POP, got {mode.mode!r:.64}")
        if mode.topic.startswith(RETRY_TOPIC_PREFIX):
            raise RefusedError(
                ResponseCode.NO_PERMISSION, "members always pull from a retry topic; set the mode of the real topic"
            )
        self.topics.get(mode.topic)
        self.groups.ensure(mode.consumer_group)  # the mode is set before the first member starts
        self.modes.put(mode)
        _log.info(
            "admin.request_mode_set",
            group=mode.consumer_group,
            topic=mode.topic,
            mode=mode.mode,
            by=str(connection.remote),
        )
        info = self.clients.consumers.get(mode.consumer_group)
        if info is not None:  # the members query their assignments at once
            self.remote_clients.notify_members(info)

    @answers(RequestCode.QUERY_ASSIGNMENT)
    def _assignment(self, query: bodies.QueryAssignmentRequestBody) -> bodies.QueryAssignmentResponseBody:
        mode = self.modes.find(query.topic, query.consumer_group)
        queues = self._queues(query.topic)
        if queues is not None and query.message_model != "BROADCASTING":
            queues = self._share(query, mode, queues)
        if queues is None:
            return bodies.QueryAssignmentResponseBody()  # the member keeps what it has
        assigned = [
            bodies.MessageQueueAssignment(message_queue=queue, mode=mode.mode) for queue in dict.fromkeys(queues)
        ]
        return bodies.QueryAssignmentResponseBody(message_queue_assignments=assigned)

    def _queues(self, topic: str) -> list[MessageQueue] | None:
        """Return the readable queues of a topic in the order of all clients; None if there is no such topic."""
        route = self.route(topic)
        if route is None:
            return None
        return [
            MessageQueue(topic, data.broker_name, queue_id)
            for data in sorted(route.queue_datas, key=lambda data: data.broker_name)
            if data.perm & Perm.READ
            for queue_id in range(data.read_queue_nums)
        ]

    def _share(
        self,
        query: bodies.QueryAssignmentRequestBody,
        mode: bodies.SetMessageRequestModeRequestBody,
        queues: list[MessageQueue],
    ) -> list[MessageQueue] | None:
        """Return the part of a member; None if the group has no connected member."""
        allocate = _STRATEGIES.get(query.strategy_name)
        if allocate is None:
            raise RefusedError(
                ResponseCode.INVALID_PARAMETER,
                f"the broker assigns queues by {' or '.join(_STRATEGIES)}, got {query.strategy_name!r:.64}; set "
                "clientRebalance to true for other strategies",
            )
        info = self.clients.consumers.get(query.consumer_group)
        if info is None:
            return None
        members = sort_client_ids(info.client_ids())
        if mode.mode == "POP":
            return _pop_shares(allocate, query.client_id, members, queues, mode.pop_share_queue_num)
        return allocate(query.client_id, members, queues)


def _pop_shares(
    allocate: _Allocate, member: str, members: Sequence[str], queues: Sequence[MessageQueue], share_count: int
) -> list[MessageQueue]:
    """Return the queues that a member pops from: its own, and those of the *share_count* members after it.

    Source: ``QueryAssignmentProcessor.allocate4Pop``.
    """
    if share_count <= 0 or share_count >= len(members) - 1:
        return [MessageQueue(queue.topic, queue.broker_name, -1) for queue in queues]
    if member not in members:
        return []
    index = members.index(member)
    if len(members) > len(queues):  # each member needs a queue
        return [queues[index % len(queues)]]
    sharing = [members[(index + step) % len(members)] for step in range(share_count + 1)]
    return [queue for each in sharing for queue in allocate(each, members, queues)]


# --- hand-over -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HandOverProcessor:
    """The part of this broker in a hand-over, for other processes."""

    engine: Engine

    @answers(RequestCode.GET_HAND_OVER, slow=True)
    def _get(self, header: HandOverRequestHeader) -> bytes:
        part, msg_id, topic = self.engine.hand_over, header.msg_id or "", header.topic or None
        with _refusing():
            match header.action:
                case "state":
                    state = part.state()
                    return _json(None if state is None else state.to_json())
                case "counts":
                    return _json(asdict(part.counts()))
                case "remaining":
                    return _json(part.remaining())
                case "moved":
                    ended = part.moved(msg_id, topic)
                    return _json(None if ended is None else ended.to_json())
                case "is_reserved":
                    return _json(part.is_reserved(msg_id, topic))
        raise _unknown(header)

    @answers(RequestCode.CHANGE_HAND_OVER, slow=True)
    def _change(self, header: HandOverRequestHeader, request: RemotingCommand) -> bytes:
        part, owner = self.engine.hand_over, header.owner or ""
        with _refusing():
            values: Any = json.loads(request.body or b"null")
            match header.action:
                case "begin":
                    state = part.begin(str(values["target"]), _texts(values["topics"]), _texts(values["groups"]))
                    return _json(state.to_json())
                case "change":
                    return _json(part.change(HandOverPhase(values)).to_json())
                case "note_error":
                    part.note_error(owner, None if values is None else str(values))
                case "note_brokers":
                    part.note_brokers(owner, _texts(values))
                case "lock":
                    return _json(part.lock(owner, int(values)))
                case "unlock":
                    part.unlock(owner)
                case "reserve":
                    return _json(part.reserve(owner, int(values["count"]), ReserveFilter.from_json(values["filter"])))
                case "transit":
                    return _json([each.to_json() for each in part.transit(int(values))])
                case "take_back":
                    messages = [TransitMessage.from_json(each).message for each in _texts(values)]
                    part.take_back(owner, messages)
                case "settle":
                    part.settle(owner, [MovedMessage.from_json(each) for each in _texts(values)])
                case _:
                    raise _unknown(header)
        return _json(None)


def _json(value: object) -> bytes:
    return json.dumps(value).encode()


def _texts(values: Any) -> list[str]:
    if not isinstance(values, list) or not all(isinstance(each, str) for each in values):
        raise ValueError("a list of texts is expected")
    return values


def _unknown(header: HandOverRequestHeader) -> RefusedError:
    return RefusedError(ResponseCode.INVALID_PARAMETER, f"{header.action!r:.40} is no action of a hand-over")


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except HandOverError as exc:
        raise RefusedError(ResponseCode.ILLEGAL_OPERATION, str(exc)) from exc
    except (ValueError, KeyError, TypeError, OverflowError) as exc:
        raise RefusedError(ResponseCode.INVALID_PARAMETER, f"the request is not valid: {exc!r:.200}") from exc
