"""Checks of names, messages and types in RocketMQ's gRPC protocol, on either side of each limit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mqtemplate.errors import DelayError, DestinationError, StoreError
from mqtemplate.grpc_protos import protos
from mqtemplate.grpc_protos.enums import Code, GrpcMessageType
from mqtemplate.remoting.protocol.codes import ResponseCode
from mqtemplate.server.grpc_api.checks import (
    accepted_types,
    check_client_properties,
    check_group_name,
    check_message,
    check_topic_name,
    check_type,
    sent_type,
)
from mqtemplate.server.grpc_api.status import (
    GrpcRefusedError,
    code_of,
    code_of_response,
    error_status,
    overall,
)
from mqtemplate.server.requests.refusal import RefusedError

MAX_BODY = 100


def message(body: bytes = b"body", message_id: str = "id-1", **system: Any) -> Any:
    made = protos.Message(body=body)
    made.topic.name = "orders"
    made.system_properties.message_id = message_id
    for name, value in system.items():
        setattr(made.system_properties, name, value)
    return made


def with_properties(**properties: str) -> Any:
    made = message()
    made.user_properties.update(properties)
    return made


def with_keys(*keys: str) -> Any:
    made = message()
    made.system_properties.keys.extend(keys)
    return made


def with_recovery(seconds: int) -> Any:
    made = message()
    made.system_properties.orphaned_transaction_recovery_duration.seconds = seconds
    return made


def refusal(check: Callable[[], object]) -> GrpcRefusedError:
    with pytest.raises(GrpcRefusedError) as caught:
        check()
    return caught.value


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("topic", ["orders", "a" * 127, "a%|_-9Z"])
def test_a_topic_name_is_allowed(topic: str) -> None:
    assert check_topic_name(topic) == topic


@pytest.mark.parametrize("topic", ["", "  ", "a" * 128, "a b", "ä", "a.b", "TBW102", "rmq_sys_wheel_timer"])
def test_a_topic_name_is_refused(topic: str) -> None:
    assert refusal(lambda: check_topic_name(topic)).code is Code.ILLEGAL_TOPIC


@pytest.mark.parametrize("group", ["billing", "a" * 255])
def test_a_group_name_is_allowed(group: str) -> None:
    assert check_group_name(group) == group


@pytest.mark.parametrize("group", ["", " ", "a" * 256, "a b", "CID_RMQ_SYS_REVIVE_GROUP"])
def test_a_group_name_is_refused(group: str) -> None:
    assert refusal(lambda: check_group_name(group)).code is Code.ILLEGAL_CONSUMER_GROUP


def test_the_text_says_what_is_allowed() -> None:
    assert str(refusal(lambda: check_topic_name("a b"))) == (
        "topic 'a b' has characters that are not allowed; use letters, digits, '_', '-', '%' and '|'"
    )


# --- messages -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "allowed",
    [
        message(b"x"),
        message(b"x" * MAX_BODY),
        message(tag="paid"),
        message(tag="", message_group="", lite_topic="", trace_context=""),
        message(message_group="g" * 63),
        message(lite_topic="a" * 64),
        message(priority=0),
        with_recovery(3_600),
        with_keys("k"),
        with_properties(**{f"p{number}": "v" for number in range(128)}),
        with_properties(p="v" * (16 * 1_024 - 1)),
        with_properties(note="größe"),
    ],
    ids=range(12),
)
def test_a_message_is_allowed(allowed: Any) -> None:
    check_message(allowed, MAX_BODY)


@pytest.mark.parametrize(
    ("refused", "code"),
    [
        (message(b""), Code.MESSAGE_BODY_EMPTY),
        (message(b"x" * (MAX_BODY + 1)), Code.MESSAGE_BODY_TOO_LARGE),
        (message(message_id=""), Code.ILLEGAL_MESSAGE_ID),
        (message(message_id="  "), Code.ILLEGAL_MESSAGE_ID),
        (message(message_id="a\x01b"), Code.ILLEGAL_MESSAGE_ID),
        (message(tag=" "), Code.ILLEGAL_MESSAGE_TAG),
        (message(tag="a|b"), Code.ILLEGAL_MESSAGE_TAG),
        (message(tag="a\n"), Code.ILLEGAL_MESSAGE_TAG),
        (message(message_group=" "), Code.ILLEGAL_MESSAGE_GROUP),
        (message(message_group="g" * 64), Code.ILLEGAL_MESSAGE_GROUP),
        (message(message_group="ä" * 32), Code.ILLEGAL_MESSAGE_GROUP),
        (message(message_group="a\x7f"), Code.ILLEGAL_MESSAGE_GROUP),
        (message(lite_topic="a" * 65), Code.ILLEGAL_LITE_TOPIC),
        (message(lite_topic="a.b"), Code.ILLEGAL_LITE_TOPIC),
        (message(priority=-1), Code.BAD_REQUEST),
        (message(trace_context="a\x02"), Code.ILLEGAL_MESSAGE_PROPERTY_KEY),
        (with_recovery(3_601), Code.BAD_REQUEST),
        (with_keys(""), Code.ILLEGAL_MESSAGE_KEY),
        (with_keys("a", "b\x00"), Code.ILLEGAL_MESSAGE_KEY),
        (with_properties(**{f"p{number}": "v" for number in range(129)}), Code.MESSAGE_PROPERTIES_TOO_LARGE),
        (with_properties(p="v" * (16 * 1_024)), Code.MESSAGE_PROPERTIES_TOO_LARGE),
        (with_properties(UNIQ_KEY="x"), Code.ILLEGAL_MESSAGE_PROPERTY_KEY),
        (with_properties(BORN_TIMESTAMP="x"), Code.ILLEGAL_MESSAGE_PROPERTY_KEY),
        (with_properties(__SEQUENCE="x"), Code.ILLEGAL_MESSAGE_PROPERTY_KEY),
        (with_properties(a="x\x02DELAY\x013"), Code.ILLEGAL_MESSAGE_PROPERTY_KEY),
        (with_properties(**{"a\x01": "x"}), Code.ILLEGAL_MESSAGE_PROPERTY_KEY),
    ],
    ids=range(26),
)
def test_a_message_is_refused(refused: Any, code: Code) -> None:
    assert refusal(lambda: check_message(refused, MAX_BODY)).code is code


@pytest.mark.parametrize(
    "properties",
    [
        {f"p{number}": "" for number in range(33)},
        {"9a": ""},
        {"a" * 65: ""},
        {"a": "v" * 257},
        {f"p{number}": "v" * 250 for number in range(17)},
    ],
    ids=["many", "name", "long name", "value", "size"],
)
def test_client_properties_are_refused(properties: dict[str, str]) -> None:
    assert refusal(lambda: check_client_properties(properties)).code is Code.INVALID_CLIENT_PROPERTIES


def test_client_properties_are_allowed_up_to_the_limits() -> None:
    check_client_properties({"a" * 64: "v" * 256} | {f"p.{number}": "" for number in range(31)})


# --- types ----------------------------------------------------------------------------------------


def with_deliver_time() -> Any:
    made = message(message_group="g")
    made.system_properties.delivery_timestamp.seconds = 1
    return made


@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        (message(), "NORMAL"),
        (message(message_group="g", priority=1), "FIFO"),
        (message(priority=1), "PRIORITY"),
        (message(lite_topic="a"), "LITE"),
        (with_deliver_time(), "DELAY"),
        (message(message_type=GrpcMessageType.TRANSACTION, message_group="g"), "TRANSACTION"),
        (message(message_type=GrpcMessageType.FIFO, message_group="", lite_topic=""), "NORMAL"),
    ],
)
def test_the_type_follows_from_the_properties(sent: Any, kind: str) -> None:
    """The type that the client names counts for transactions only."""
    assert sent_type(sent.system_properties).name == kind


@pytest.mark.parametrize(
    ("attribute", "accepted"),
    [
        (None, ["NORMAL"]),
        ("FIFO", ["FIFO"]),
        ("PRIORITY", ["PRIORITY"]),
        ("MIXED", ["NORMAL", "FIFO", "DELAY", "TRANSACTION"]),
        ("UNSPECIFIED", ["MESSAGE_TYPE_UNSPECIFIED"]),
    ],
)
def test_a_topic_accepts_types(attribute: str | None, accepted: list[str]) -> None:
    attributes = {} if attribute is None else {"message.type": attribute}

    assert [kind.name for kind in accepted_types(attributes)] == accepted


def test_a_message_of_another_type_is_refused() -> None:
    refused = refusal(lambda: check_type("orders", GrpcMessageType.DELAY, {}))

    assert refused.code is Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE
    assert "topic 'orders' accepts NORMAL messages, this one is DELAY" in str(refused)
    check_type("orders", GrpcMessageType.DELAY, {"message.type": "MIXED"})
    check_type("%RETRY%billing", GrpcMessageType.DELAY, {})


# --- statuses -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (GrpcRefusedError(Code.FORBIDDEN, "no"), 40300),
        (RefusedError(ResponseCode.SYSTEM_BUSY, "busy"), 42900),
        (RefusedError(ResponseCode.TOPIC_NOT_EXIST, "no"), 40402),
        (RefusedError(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, "no"), 40403),
        (RefusedError(ResponseCode.SYSTEM_ERROR, "no"), 50001),
        (DelayError("too long"), 40012),
        (DestinationError("bad"), 40002),
        (StoreError("full"), 50001),
        (TimeoutError("late"), 50400),
        (KeyError("x"), 50001),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else type(value).__name__,
)
def test_an_error_has_a_code(error: Exception, code: int) -> None:
    assert code_of(error) == code


def test_an_unexpected_error_names_its_type() -> None:
    assert error_status(KeyError("x")).message == "KeyError: 'x'"


@pytest.mark.parametrize(
    ("response", "code"), [(0, 20000), (2, 42900), (3, 50100), (17, 40402), (26, 40403), (2017, 42901), (9_999, 50001)]
)
def test_a_response_code_has_a_code(response: int, code: int) -> None:
    assert code_of_response(response) == code


def test_several_results_have_one_code() -> None:
    assert overall([Code.OK, Code.OK]) is Code.OK
    assert overall([Code.OK, Code.FORBIDDEN]) is Code.MULTIPLE_RESULTS
    assert overall([]) is Code.INTERNAL_SERVER_ERROR
