"""ACL signatures, compared with those that Java's own hook computed."""

from __future__ import annotations

import json

import pytest

from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, Version, decode_command, encode_command
from mqtemplate.remoting.protocol.acl import is_signed_with, sign, sign_command, signed_content
from tests.remoting.protocol.golden_file import golden

SECRET = "SK12345"


def route_request(**ext_fields: str) -> RemotingCommand:
    return RemotingCommand(RequestCode.GET_ROUTEINFO_BY_TOPIC, ext_fields={"topic": "T1", **ext_fields}, body=b"B")


@pytest.mark.parametrize(("name", "token"), [("plain", None), ("token", "TOKEN")])
def test_a_signature_equals_javas(name: str, token: str | None) -> None:
    command = route_request()

    sign_command(command, "AK", SECRET, token)

    assert command.ext_fields == json.loads(golden("acl")[name])


def test_a_known_content_has_a_known_signature() -> None:
    content = signed_content({"topic": "T1", "AccessKey": "AK"}, b"B")

    assert content == b"AKT1B"
    assert sign(content, SECRET) == "Y9sbfmHYKfQHpu/vYTojehcFXEw="


def test_the_receiver_of_a_signed_request_accepts_it() -> None:
    command = route_request(keys="é")
    sign_command(command, "AK", SECRET)

    received = decode_command(encode_command(command))

    assert is_signed_with(received, SECRET)
    assert not is_signed_with(received, "another")


@pytest.mark.parametrize("damage", ["field", "more", "body", "signature", "none"])
def test_a_change_after_signing_is_detected(damage: str) -> None:
    command = route_request()
    sign_command(command, "AK", SECRET)

    match damage:
        case "field":
            command.ext_fields["topic"] = "T2"
        case "more":
            command.ext_fields["zone"] = "z"
        case "body":
            command.body = b"b"
        case "signature":
            command.ext_fields["Signature"] = "é"
        case "none":
            del command.ext_fields["Signature"]

    assert not is_signed_with(command, SECRET)


def test_clients_up_to_4_9_3_do_not_sign_one_field() -> None:
    command = route_request()
    sign_command(command, "AK", SECRET)
    command.ext_fields["_UNIQUE_KEY_QUERY"] = "true"

    command.version = Version.V4_9_3
    assert is_signed_with(command, SECRET)

    command.version = Version.V4_9_4
    assert not is_signed_with(command, SECRET)


def test_a_query_of_messages_is_signed_as_old_and_new_brokers_verify_it() -> None:
    """RocketMQ 4.9 leaves the field out for all clients, newer brokers for those up to 4.9.3."""
    command = route_request()
    command.ext_fields["_UNIQUE_KEY_QUERY"] = "true"

    sign_command(command, "AK", SECRET)

    assert command.version == Version.V4_9_3
    assert is_signed_with(command, SECRET)
    content = signed_content(command.ext_fields, command.body, "_UNIQUE_KEY_QUERY")
    assert command.ext_fields["Signature"] == sign(content, SECRET)
