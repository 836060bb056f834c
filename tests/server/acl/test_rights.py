"""The right that each request needs, and the documentation of it: ``docs/request-rights.md``."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mqtemplate.message import Message
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.acl import sign_command
from mqtemplate.remoting.protocol.bodies.group import (
    BatchAck,
    BatchAckMessageRequestBody,
    CheckClientRequestBody,
    ConsumerData,
    HeartbeatData,
    LockBatchRequestBody,
    QueryAssignmentRequestBody,
)
from mqtemplate.remoting.protocol.bodies.route import SubscriptionData
from mqtemplate.remoting.protocol.headers.fields import declared_fields
from mqtemplate.remoting.protocol.sequenced import encode_queue_batches
from mqtemplate.server import Account, AclSettings, Right
from mqtemplate.server.acl.access import AccessControl
from mqtemplate.server.acl.rights import ANY_ACCOUNT, CHANGES, RIGHTS
from tests.remoting.protocol.code_tables import REQUEST_HEADERS
from tests.server.serving import SECRET, RecordingConnection, Serving
from tests.server.tool import Tool

PAGE = Path(__file__).parents[3] / "docs" / "request-rights.md"
ACCOUNTS = (
    Account(
        access_key="shop-owner",
        secret_key=SECRET,
        topic_perms={"orders": Right.PUB, "invoices": Right.SUB},
        group_perms={"billing": Right.SUB},
    ),
)
CODES = sorted(RequestCode)
READING = (
    "AUTH_GET_",
    "AUTH_LIST_",
    "CHECK_CLIENT",
    "COUNT_",
    "GET_",
    "INVOKE_BROKER_TO_GET_",
    "LITE_PULL_",
    "NOTIFICATION",
    "PEEK_",
    "POLLING_",
    "PULL_",
    "QUERY_",
    "SEARCH_",
    "VIEW_",
)
REPEATED = {
    RequestCode.ACK_MESSAGE,
    RequestCode.CHANGE_HAND_OVER,
    RequestCode.BATCH_ACK_MESSAGE,
    RequestCode.CHANGE_MESSAGE_INVISIBLETIME,
    RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE,
    RequestCode.CLEAN_UNUSED_TOPIC,
    RequestCode.DELETE_TOPIC_IN_NAMESRV,
    RequestCode.HEART_BEAT,
    RequestCode.LOCK_BATCH_MQ,
    RequestCode.POP_MESSAGE,
    RequestCode.REGISTER_BROKER,
    RequestCode.RELOAD_CONFIG,
    RequestCode.SET_MESSAGE_REQUEST_MODE,
    RequestCode.UNLOCK_BATCH_MQ,
    RequestCode.UNREGISTER_BROKER,
    RequestCode.UNREGISTER_CLIENT,
    RequestCode.UPDATE_CONSUMER_OFFSET,
}


class Names(NamedTuple):
    """Names in a request with the needed rights. None: the request has no such name."""

    topic: str | None = None
    group: str | None = None


PUBLISHED, READ, CONSUMED, OF_GROUP = (
    Names("orders"),
    Names("invoices"),
    Names("invoices", "billing"),
    Names(None, "billing"),
)
PERMITTED = {
    RequestCode.SEND_MESSAGE: PUBLISHED,
    RequestCode.SEND_MESSAGE_V2: PUBLISHED,
    RequestCode.SEND_BATCH_MESSAGE: PUBLISHED,
    RequestCode.SEND_SEQUENCED_MESSAGES: PUBLISHED,
    RequestCode.RECALL_MESSAGE: PUBLISHED,
    RequestCode.END_TRANSACTION: PUBLISHED,
    RequestCode.CANCEL_DELAYED_MESSAGE: PUBLISHED,
    RequestCode.RESCHEDULE_DELAYED_MESSAGE: PUBLISHED,
    RequestCode.CHANGE_AND_SEND: PUBLISHED,
    RequestCode.GET_HAND_OVER: PUBLISHED,
    RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: PUBLISHED,
    RequestCode.GET_MAX_OFFSET: READ,
    RequestCode.GET_MIN_OFFSET: PUBLISHED,
    RequestCode.GET_EARLIEST_MSG_STORETIME: READ,
    RequestCode.QUERY_MESSAGE: READ,
    RequestCode.QUERY_TOPIC_CONSUME_BY_WHO: READ,
    RequestCode.GET_PENDING_MESSAGES: READ,
    RequestCode.COUNT_PENDING_MESSAGES: READ,
    RequestCode.GET_RECORD_BLOCK: READ,
    RequestCode.PULL_MESSAGE: CONSUMED,
    RequestCode.LITE_PULL_MESSAGE: CONSUMED,
    RequestCode.QUERY_CONSUMER_OFFSET: CONSUMED,
    RequestCode.UPDATE_CONSUMER_OFFSET: CONSUMED,
    RequestCode.POP_MESSAGE: CONSUMED,
    RequestCode.PEEK_MESSAGE: CONSUMED,
    RequestCode.NOTIFICATION: CONSUMED,
    RequestCode.POLLING_INFO: CONSUMED,
    RequestCode.ACK_MESSAGE: CONSUMED,
    RequestCode.BATCH_ACK_MESSAGE: CONSUMED,
    RequestCode.CHANGE_MESSAGE_INVISIBLETIME: CONSUMED,
    RequestCode.QUERY_ASSIGNMENT: CONSUMED,
    RequestCode.HEART_BEAT: CONSUMED,
    RequestCode.CHECK_CLIENT_CONFIG: CONSUMED,
    RequestCode.CONSUMER_SEND_MSG_BACK: OF_GROUP,
    RequestCode.GET_CONSUMER_LIST_BY_GROUP: OF_GROUP,
    RequestCode.LOCK_BATCH_MQ: OF_GROUP,
    RequestCode.UNLOCK_BATCH_MQ: OF_GROUP,
    RequestCode.UNREGISTER_CLIENT: OF_GROUP,
}


@pytest.fixture
def serving() -> Iterator[Serving]:
    with Serving(acl=AclSettings(accounts=ACCOUNTS)) as serving:
        for topic in ("invoices", "orders"):
            serving.engine.create_topic(topic, 1)
            serving.engine.sends.send(Message(topic, b"x"))
        yield serving


def request_with(code: int, names: Names) -> RemotingCommand:
    """Return a request with valid fields and these names."""
    kind = REQUEST_HEADERS.get(code)
    fields = {} if kind is None else {field.name: _value(field, names) for field, _, _ in declared_fields(kind)}
    header = None if kind is None else kind(**{name: value for name, value in fields.items() if value is not None})
    return RemotingCommand.request(code, header, _body(code, names), opaque=7)


def _value(field: dataclasses.Field[object], names: Names) -> object:
    kind = str(field.type)
    if field.name in ("topic", "consumer_group", "group"):
        return names.topic if field.name == "topic" else names.group
    if "None" in kind or "Boundary" in kind:
        return None
    return False if "bool" in kind else "x" if "str" in kind else 0


def _body(code: int, names: Names) -> bytes:
    if code in (RequestCode.SEND_SEQUENCED_MESSAGES, RequestCode.CHANGE_AND_SEND):
        topic = names.topic or ""
        return encode_queue_batches([(Message(topic, b"x"), 0)], {topic: topic})
    subscription = SubscriptionData(topic=names.topic or "", sub_string="*")
    if code == RequestCode.HEART_BEAT:
        consumer = ConsumerData(group_name=names.group or "", subscription_data_set=[subscription])
        return HeartbeatData(client_id="me@1", consumer_data_set=[consumer]).encode()
    if code == RequestCode.CHECK_CLIENT_CONFIG:
        return CheckClientRequestBody(
            client_id="me@1", group=names.group or "", subscription_data=subscription
        ).encode()
    topic, group = names.topic or "", names.group or ""
    if code == RequestCode.QUERY_ASSIGNMENT:
        return QueryAssignmentRequestBody(topic=topic, consumer_group=group, client_id="me@1").encode()
    if code == RequestCode.BATCH_ACK_MESSAGE:
        ack = BatchAck(
            consumer_group=group,
            topic=topic,
            start_offset=0,
            queue_id=0,
            revive_queue_id=0,
            pop_time=0,
            invisible_time=0,
        )
        return BatchAckMessageRequestBody(acks=[ack]).encode()
    if code in (RequestCode.LOCK_BATCH_MQ, RequestCode.UNLOCK_BATCH_MQ):
        return LockBatchRequestBody(consumer_group=names.group or "", client_id="me@1", mq_set=[]).encode()
    return b""


def refusal(serving: Serving, code: int, names: Names) -> str | None:
    """Return the remark of the response if the account has no right to a request."""
    request = request_with(code, names)
    sign_command(request, "shop-owner", SECRET)
    response = serving.process(RecordingConnection(), request)
    assert response is not None
    return response.remark if response.code == ResponseCode.NO_PERMISSION else None


def served_codes() -> list[RequestCode]:
    with Serving() as serving:
        return [code for code in CODES if code in serving.server.all_processors]


SERVED = served_codes()


@pytest.mark.parametrize("code", RIGHTS, ids=lambda code: code.name)
def test_a_request_needs_its_rights(serving: Serving, code: RequestCode) -> None:
    """It is permitted with the rights in the table, and refused if one of its names is another one."""
    names = PERMITTED[code]
    others = [names._replace(**{name: "other"}) for name, value in names._asdict().items() if value is not None]

    refusals = [refusal(serving, code, other) for other in others]

    assert refusal(serving, code, names) is None
    for other, text in zip(others, refusals, strict=True):
        kind = "topic" if other.topic == "other" else "group"
        assert text is not None
        assert text.startswith("access key 'shop-owner' has no right ")
        assert f" on {kind} 'other' ({code.name})" in text


@pytest.mark.parametrize("code", ANY_ACCOUNT, ids=lambda code: code.name)
def test_each_account_may_request_it(serving: Serving, code: RequestCode) -> None:
    assert refusal(serving, code, Names("other", "other")) is None


@pytest.mark.parametrize(
    "code", [code for code in SERVED if code not in RIGHTS and code not in ANY_ACCOUNT], ids=lambda code: code.name
)
def test_a_request_needs_an_administrator(serving: Serving, code: RequestCode) -> None:
    text = f"access key 'shop-owner' may not request {code.name}: only an account with admin: true may"

    assert refusal(serving, code, Names("orders", "billing")) == text


@pytest.mark.parametrize("code", [code for code in CODES if code not in SERVED], ids=lambda code: code.name)
def test_a_request_is_not_served(tool: Tool, code: RequestCode) -> None:
    assert tool.request(code).code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED


def test_the_window_for_recorded_requests_covers_each_request_that_changes_something() -> None:
    """All others read, or a client sends them again without a change."""
    others = {code for code in SERVED if not code.name.startswith(READING)}

    assert others == CHANGES | REPEATED


def test_the_page_lists_each_request_with_its_right_and_its_test() -> None:
    rows = re.findall(r"^\| (\d+) \| (\w+) \| (.+?) \| `(.+?)` \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)

    assert rows == [_row(code) for code in CODES]


def _row(code: RequestCode) -> tuple[str, str, str, str]:
    if code in RIGHTS:
        right, test = RIGHTS[code].text, test_a_request_needs_its_rights
    elif code in ANY_ACCOUNT:
        right, test = ANY_ACCOUNT[code], test_each_account_may_request_it
    elif code in SERVED:
        right, test = "administrator", test_a_request_needs_an_administrator
    else:
        right, test = "not served", test_a_request_is_not_served
    return str(int(code)), code.name, right, f"{test.__name__}[{code.name}]"


def test_an_acknowledgement_of_a_retry_needs_the_right_to_the_real_topic(serving: Serving) -> None:
    """The retry topic has messages of that topic. Its own name is no name of a topic or group with rights."""
    permitted, of_topic, of_group = (
        refusal(serving, RequestCode.ACK_MESSAGE, Names(topic, "billing"))
        for topic in ("%RETRY%billing_invoices", "%RETRY%billing_orders", "%RETRY%other_invoices")
    )

    assert permitted is None
    assert "has no right SUB on topic 'orders'" in (of_topic or "")
    assert "has no right SUB on group 'other_invoices'" in (of_group or "")


# --- topics that the default rights do not open ---------------------------------------------------------


@pytest.mark.parametrize("topic", ["RMQ_SYS_TRACE_TOPIC", "mqtemplate_dead_letter_marks", "TBW102", "CHECKPOINT_TOPIC"])
def test_the_default_rights_open_no_topic_of_the_system_for_readers(topic: str) -> None:
    """Clients of all accounts write ids and keys of their messages to the trace topic. Marks belong to operators."""
    default = Account(access_key="default-rights", secret_key=SECRET, default_topic_perm=Right.PUB | Right.SUB)
    own = Account(access_key="own-right", secret_key=SECRET, topic_perms={topic: Right.SUB})

    assert not default.may("topic", topic, Right.SUB)
    assert own.may("topic", topic, Right.SUB)


def test_the_default_right_to_send_includes_the_trace_topic_only() -> None:
    """A producer with tracing sends there, and would fail without it."""
    default = Account(access_key="default-rights", secret_key=SECRET, default_topic_perm=Right.PUB | Right.SUB)

    assert default.may("topic", "RMQ_SYS_TRACE_TOPIC", Right.PUB)
    assert not default.may("topic", "mqtemplate_dead_letter_marks", Right.PUB)


# --- retry topics of groups that receive by POP ---------------------------------------------------------


def may_pull(serving: Serving, account: Account, topic: str) -> bool:
    assert serving.server.guard is not None
    access = serving.server.guard._access
    access.change_accounts(AclSettings(accounts=(account,)))
    return access.may(account.access_key, topic, Right.SUB)


DENIED: dict[str, Any] = {"access_key": "denied-group", "secret_key": SECRET, "default_group_perm": Right.SUB}


@pytest.mark.parametrize("separator", ["_", "+"])
def test_a_denied_group_prevails_in_the_retry_topic_for_a_topic(serving: Serving, separator: str) -> None:
    """The default rights would permit a group of that name, which does not exist."""
    serving.engine.create_topic("orders", 1)
    serving.server.groups.ensure("shop_billing")
    serving.server.groups.ensure("shop")
    topic = f"%RETRY%shop_billing{separator}orders"
    rights = {**DENIED, "default_topic_perm": Right.SUB}

    assert may_pull(serving, Account(**rights), topic)
    assert not may_pull(serving, Account(**rights, group_perms={"shop_billing": Right.DENY}), topic)
    assert may_pull(serving, Account(**rights, group_perms={"shop": Right.DENY}), topic)
    assert not may_pull(serving, Account(**DENIED), topic)  # the messages are of the topic


def test_all_groups_and_topics_that_a_retry_topic_may_belong_to_count(serving: Serving) -> None:
    """It is that of ``a_b_c`` by pull, of ``a_b`` for ``c`` and of ``a`` for ``b_c`` by POP."""
    for topic in ("c", "b_c"):
        serving.engine.create_topic(topic, 1)
    for group in ("a", "a_b", "a_b_c"):
        serving.server.groups.ensure(group)
    rights = {**DENIED, "default_topic_perm": Right.SUB}

    assert may_pull(serving, Account(**rights), "%RETRY%a_b_c")
    for group in ("a", "a_b", "a_b_c"):
        assert not may_pull(serving, Account(**rights, group_perms={group: Right.DENY}), "%RETRY%a_b_c")
    for topic in ("c", "b_c"):
        assert not may_pull(serving, Account(**rights, topic_perms={topic: Right.DENY}), "%RETRY%a_b_c")


def test_names_that_the_broker_does_not_have_do_not_count(serving: Serving) -> None:
    serving.server.groups.ensure("billing_eu")
    account = Account(**DENIED, group_perms={"billing": Right.DENY})

    assert may_pull(serving, account, "%RETRY%billing_eu")
    assert not may_pull(serving, account, "%RETRY%billing")
    assert not may_pull(serving, account, "%DLQ%billing")


def test_where_the_groups_of_the_broker_are_not_known_a_name_with_a_denied_group_is_refused() -> None:
    """The dashboard of a remote broker."""
    account = Account(**DENIED, group_perms={"billing": Right.DENY})
    access = AccessControl(AclSettings(accounts=(account,)))

    assert not access.may("denied-group", "%RETRY%billing_orders", Right.SUB)
    assert access.may("denied-group", "%RETRY%shipping_orders", Right.SUB)


def test_a_pull_of_a_retry_topic_is_refused_on_the_wire(serving: Serving) -> None:
    serving.engine.create_topic("invoices", 1)
    names = Names("%RETRY%other_invoices", "billing")
    assert "has no right SUB on group 'other_invoices'" in (refusal(serving, RequestCode.PULL_MESSAGE, names) or "")
    serving.server.groups.ensure("billing")

    assert refusal(serving, RequestCode.PULL_MESSAGE, Names("%RETRY%billing_invoices", "billing")) is None
