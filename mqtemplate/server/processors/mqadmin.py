"""Requests of ``mqadmin`` about what this server has in another form or not at all: accounts, replicas, maintenance.

Source: RocketMQ ``broker: AdminBrokerProcessor``, ``UserConverter``, ``AclConverter``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from mqtemplate.engine.engine import Engine
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.server.acl.access import AccessControl
from mqtemplate.server.acl.settings import Account, Right
from mqtemplate.server.requests.refusal import RefusedError
from mqtemplate.server.requests.registration import answers

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
