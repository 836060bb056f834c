"""Requests of ``mqadmin`` that have no counterpart here: a success, or an answer that says why not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mqtemplate.message import Message
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.acl import sign_command
from mqtemplate.server import Account, AclSettings, Right
from mqtemplate.server.processors.mqadmin import REASONS
from tests.server.serving import SECRET, RecordingConnection, Serving
from tests.server.tool import Tool

PAGE = Path(__file__).parents[3] / "docs" / "server.md"
ACCOUNTS = (
    Account(access_key="administrator", secret_key=SECRET, admin=True),
    Account(
        access_key="shop-owner",
        secret_key=SECRET,
        topic_perms={"orders": Right.PUB | Right.SUB, "secrets": Right.DENY},
        group_perms={"billing": Right.SUB},
        default_topic_perm=Right.PUB,
    ),
    Account(access_key="internal-owner", secret_key=SECRET, is_owner=True),
)
ANSWERED = (
    RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE,
    RequestCode.CLEAN_UNUSED_TOPIC,
    RequestCode.GET_UNIT_TOPIC_LIST,
    RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST,
    RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST,
    RequestCode.GET_BROKER_HA_STATUS,
    RequestCode.AUTH_GET_USER,
    RequestCode.AUTH_LIST_USER,
    RequestCode.AUTH_GET_ACL,
    RequestCode.AUTH_LIST_ACL,
)


# --- the reasons ----------------------------------------------------------------------------------


@pytest.mark.parametrize("code", REASONS, ids=lambda code: code.name)
def test_a_request_that_is_not_served_is_answered_with_the_reason(tool: Tool, code: RequestCode) -> None:
    response = tool.request(code)

    assert response.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
    assert response.remark == f"request code {int(code)} {code.name} is not supported here: {REASONS[code]}"


def test_a_reason_says_what_to_do(tool: Tool) -> None:
    assert str(tool.request(RequestCode.AUTH_CREATE_USER).remark).endswith(
        "not supported here: accounts and their rights are in the configuration: change "
        "mqtemplate.server.acl.accounts, and let the server read it with mqtemplate reload"
    )


def test_the_page_lists_each_of_these_requests() -> None:
    rows = re.findall(r"^\| (`.+?`.*?|none) \| ([\d, ]+) \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    listed = [int(code) for _, codes, _ in rows for code in codes.split(", ")]

    assert sorted(listed) == sorted([*REASONS, *ANSWERED])


# --- maintenance and replicas ---------------------------------------------------------------------


@pytest.mark.parametrize("code", ANSWERED[:5], ids=lambda code: code.name)
def test_work_that_the_server_does_by_itself_is_a_success(serving: Serving, code: RequestCode) -> None:
    response = serving.request(code)

    assert response is not None
    assert response.code == ResponseCode.SUCCESS


def test_the_ha_status_is_a_master_without_replicas(serving: Serving) -> None:
    serving.engine.create_topic("orders", 1)
    serving.engine.sends.send(Message("orders", b"x"))

    response = serving.request(RequestCode.GET_BROKER_HA_STATUS)

    assert response is not None
    assert json.loads(response.body) == {
        "haConnectionInfo": [],
        "inSyncSlaveNums": 0,
        "master": True,
        "masterCommitLogMaxOffset": serving.engine.engine.store.end_offset,
    }


# --- accounts -------------------------------------------------------------------------------------


def ask(serving: Serving, code: RequestCode, **fields: str) -> RemotingCommand:
    """Send a request of an administrator."""
    connection = RecordingConnection(access_key="administrator")
    request = RemotingCommand.request(code, opaque=7)
    request.ext_fields.update(fields)
    sign_command(request, "administrator", SECRET)
    response = serving.process(connection, request)
    assert response is not None
    return response


def found(serving: Serving, code: RequestCode, **fields: str) -> Any:
    response = ask(serving, code, **fields)
    assert response.code == ResponseCode.SUCCESS
    assert SECRET.encode() not in response.body
    return json.loads(response.body)


@pytest.fixture
def secured() -> Any:
    with Serving(acl=AclSettings(accounts=ACCOUNTS)) as serving:
        yield serving


def test_accounts_are_listed_as_users_without_their_keys(secured: Serving) -> None:
    administrator = {"username": "administrator", "userType": "Super", "userStatus": "enable"}
    shop = {"username": "shop-owner", "userType": "Normal", "userStatus": "enable"}

    assert found(secured, RequestCode.AUTH_LIST_USER) == [administrator, shop]
    assert found(secured, RequestCode.AUTH_LIST_USER, filter="shop") == [shop]
    assert found(secured, RequestCode.AUTH_GET_USER, username="shop-owner") == shop


def entry(resource: str, decision: str, *actions: str) -> dict[str, object]:
    return {"resource": resource, "actions": list(actions), "sourceIps": [], "decision": decision}


def test_rights_are_listed_as_policies(secured: Serving) -> None:
    shop = {
        "subject": "User:shop-owner",
        "policies": [
            {
                "policyType": "Custom",
                "entries": [
                    entry("Topic:orders", "Allow", "Pub", "Sub"),
                    entry("Topic:secrets", "Deny", "Pub", "Sub"),
                    entry("Group:billing", "Allow", "Sub"),
                ],
            },
            {
                "policyType": "Default",
                "entries": [entry("Topic:*", "Allow", "Pub"), entry("Group:*", "Deny", "Pub", "Sub")],
            },
        ],
    }

    assert found(secured, RequestCode.AUTH_GET_ACL, subject="User:shop-owner") == shop
    assert found(secured, RequestCode.AUTH_LIST_ACL, subjectFilter="User:shop") == [shop]
    assert found(secured, RequestCode.AUTH_LIST_ACL, resourceFilter="Group:billing") == [
        {
            "subject": "User:shop-owner",
            "policies": [{"policyType": "Custom", "entries": [entry("Group:billing", "Allow", "Sub")]}],
        }
    ]
    [every, _] = found(secured, RequestCode.AUTH_LIST_ACL)
    assert every["policies"] == [
        {
            "policyType": "Default",
            "entries": [entry("Topic:*", "Allow", "Pub", "Sub"), entry("Group:*", "Allow", "Pub", "Sub")],
        }
    ]


def test_an_account_that_does_not_exist_is_refused_with_advice(secured: Serving) -> None:
    """So is the account that the owner of the store folder creates for its own processes."""
    for name in ("nobody-else", "internal-owner"):
        response = ask(secured, RequestCode.AUTH_GET_USER, username=name)

        assert response.code == ResponseCode.QUERY_NOT_FOUND
        assert str(response.remark).startswith(f"there is no account '{name}'; accounts and their rights are in the")


def test_without_access_control_there_are_no_accounts(serving: Serving) -> None:
    response = serving.request(RequestCode.AUTH_LIST_USER)

    assert response is not None
    assert (response.code, response.remark) == (
        ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
        "access control is disabled, so there are no accounts; set mqtemplate.server.acl.enabled to true",
    )
