"""Headers that are read without decoding them: the values that are read equal those that decoding finds."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqtemplate.errors import RemoteProtocolError
from mqtemplate.record.properties_template import AddedProperties
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode
from mqtemplate.remoting.protocol.headers.message import PullMessageRequestHeader, SendMessageRequestHeaderV2
from mqtemplate.remoting.protocol.json_header import decode_json_header
from mqtemplate.server.fast_path import header_templates
from mqtemplate.server.fast_path.header_templates import (
    OPAQUE,
    ConnectionTemplates,
    HeaderKey,
    HeaderTemplates,
    HeaderValue,
    field_value,
    pull_templates,
    send_templates,
)

BATCH, PULL = RequestCode.SEND_BATCH_MESSAGE, RequestCode.PULL_MESSAGE
ADDED = AddedProperties({"MSG_REGION": "DefaultRegion", "TRACE_ON": "true", "CLUSTER": "DefaultCluster"})
NAMED = {
    "offset": field_value("offset", rb"[0-9]{1,18}", b"345678912345"),
    "note": field_value("note", rb"[a-z]+", b"probe")._replace(is_optional=True),
    "opaque": OPAQUE,
}
SEND_FIELDS = {
    "a": "producers",
    "b": "orders",
    "c": "TBW102",
    "d": "4",
    "e": "3",
    "f": "0",
    "g": "1700000000000",
    "h": "5",
    "i": "UNIQ_KEY\x017F000001A1\x02WAIT\x01true\x02TAGS\x01paid\x02",
    "j": "0",
    "k": "false",
    "m": "false",
}
PULL_FIELDS = {
    "queueId": "1",
    "maxMsgBytes": "262144",
    "maxMsgNums": "32",
    "sysFlag": "3",
    "suspendTimeoutMillis": "15000",
    "commitOffset": "3968",
    "topic": "orders",
    "queueOffset": "4000",
    "expressionType": "TAG",
    "subVersion": "1700000000000",
    "consumerGroup": "billing",
}


def name_templates(**limits: int) -> HeaderTemplates[str]:
    """Return a table in which the template of a request is its field *name*."""
    return HeaderTemplates(NAMED, _name, **limits)


def _name(key: HeaderKey, request: RemotingCommand) -> str | None:
    if request.ext_fields.get("name") == "invalid":
        raise RemoteProtocolError("the header is invalid")
    return request.ext_fields.get("name")


def header(fields: Mapping[str, str | None], first: tuple[str, ...] = (), **members: object) -> bytes:
    """Return a header as a Java client writes it, in compact JSON, without fields that are None.

    Args:
        first: Members that are before the others.
    """
    java = {
        "code": 11,
        "extFields": {name: value for name, value in fields.items() if value is not None},
        "flag": 0,
        "language": "JAVA",
        "opaque": 7,
        "serializeTypeCurrentRPC": "JSON",
        "version": 513,
    }
    changed = java | members
    return json.dumps({name: changed[name] for name in first} | changed, separators=(",", ":")).encode()


def named(name: str | None = "a", offset: str | None = "1", note: str | None = None, **members: object) -> bytes:
    return header({"name": name, "offset": offset, "note": note}, **members)


def send(properties: str | None = None, first: tuple[str, ...] = (), **changes: object) -> bytes:
    """Return the header of a send; changes with names of one letter are fields, the others members."""
    fields = {name: str(value) for name, value in changes.items() if len(name) == 1}
    members = {name: value for name, value in changes.items() if len(name) > 1}
    text = {} if properties is None else {"i": properties}
    return header(SEND_FIELDS | fields | text, first, **{"code": RequestCode.SEND_MESSAGE_V2} | members)


def of_batch(properties: str) -> bytes:
    return send(properties, code=BATCH, m="true")


def pull(first: tuple[str, ...] = (), code: int = PULL, opaque: int = 7, **fields: str) -> bytes:
    return header(PULL_FIELDS | fields, first, code=code, opaque=opaque)


def read(templates: ConnectionTemplates[Any], data: bytes) -> tuple[Any, tuple[bytes, ...]] | None:
    """Return what is known of a header that occurs the second time."""
    templates.match(data)
    return templates.match(data)


def names() -> ConnectionTemplates[str]:
    return ConnectionTemplates(name_templates())


def sends() -> ConnectionTemplates[Any]:
    return ConnectionTemplates(send_templates(ADDED))


def pulls() -> ConnectionTemplates[Any]:
    return ConnectionTemplates(pull_templates())


# --- templates of any kind ------------------------------------------------------------------------------


def test_the_values_have_the_order_of_their_names() -> None:
    opaque_first = b'{"opaque":9,"extFields":{"note":"new","name":"a","offset":"12"},"code":11,"flag":0}'
    templates = names()

    assert read(templates, named(note="paid")) == ("a", (b"1", b"paid", b"7"))
    assert read(templates, opaque_first) == ("a", (b"12", b"new", b"9"))


def test_an_optional_value_that_a_template_does_not_have_is_empty() -> None:
    assert read(names(), named()) == ("a", (b"1", b"", b"7"))


def test_a_header_is_not_decoded_after_its_template_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The template is learned when it occurs the second time."""
    templates = names()
    assert templates.match(named()) is None
    assert templates.match(named(opaque=8)) is not None
    monkeypatch.setattr(header_templates, "decode_json_header", lambda data: pytest.fail("it was decoded"))

    assert templates.match(named(offset="123456", opaque=8)) == ("a", (b"123456", b"", b"8"))


def test_a_connection_keeps_the_templates_that_it_used_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are found again among the templates of all connections: nothing is decoded."""
    templates = names()
    assert all(read(templates, named(f"name{number}")) is not None for number in range(6))
    monkeypatch.setattr(header_templates, "decode_json_header", lambda data: pytest.fail("it was decoded"))

    assert [known.template for known in templates._last] == ["name5", "name4", "name3", "name2"]
    assert templates.match(named("name0")) == ("name0", (b"1", b"", b"7"))
    assert [known.template for known in templates._last] == ["name0", "name5", "name4", "name3"]


def test_a_template_of_another_connection_is_not_decoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    known = name_templates()
    read(ConnectionTemplates(known), named())
    monkeypatch.setattr(header_templates, "decode_json_header", lambda data: pytest.fail("it was decoded"))

    assert ConnectionTemplates(known).match(named(opaque=99)) == ("a", (b"1", b"", b"99"))


def test_headers_that_all_differ_are_rarely_inspected() -> None:
    """A client that sends a trace id in each request must not pay for templates that never occur again."""
    inspected: list[bytes] = []

    class Noted(HeaderTemplates[str]):
        def find(self, header: bytes, seen: set[int]) -> Any:
            inspected.append(header)
            return super().find(header, seen)

    templates = ConnectionTemplates(Noted(NAMED, _name))
    for number in range(2_500):
        assert templates.match(named(f"name{number}")) is None

    assert len(inspected) == 16 + 2
    assert len(templates._seen) <= 18


def test_the_number_of_templates_is_limited() -> None:
    known = name_templates(max_templates=10)
    for number in range(25):
        assert read(ConnectionTemplates(known), named(f"name{number}")) is not None

    assert 1 <= len(known) <= 10


OTHERS: dict[Callable[[], ConnectionTemplates[Any]], list[bytes]] = {
    names: [
        named(offset=None),
        named(offset="-1"),
        named(offset="1234567890123456789"),
        named(opaque=-7),
        named(opaque=1_234_567_890),
        named(flag=1),
        named(flag=2),
        named(name=None),
        named(name="invalid"),
        named().replace(b'"name":"a"', b'"offset":"2"'),
        named()[:-1],
    ],
    sends: [
        send(code=RequestCode.SEND_MESSAGE),
        send(flag=1),
        send(flag=2),
        send(b="%RETRY%billing"),
        send(e="-1"),
        send(e="1234567890"),
        send(g="soon"),
        send(opaque=-5),
        send(""),
        send("WAIT\x01true\x02"),
        send("UNIQ_KEY\x01A-1\x02"),
        send("UNIQ_KEY\x01A1\x02UNIQ_KEY\x01B1\x02"),
        send("XUNIQ_KEY\x01A1\x02"),
        send("UNIQ_KEY\x01A1\x02KEYS\x01Zürich\x02"),
        send("UNIQ_KEY\x01A1\x02KEYS\x01a\x02KEYS\x01b\x02"),
        send("UNIQ_KEY\x01A1\x02DELAY\x013\x02"),
        send("UNIQ_KEY\x01A1\x02TIMER_DELAY_MS\x013\x02"),
        send("UNIQ_KEY\x01A1\x02TRAN_MSG\x01true\x02"),
        send().replace(b'"d":"4",', b""),
        send().replace(b'"e":"3"', b'"e":"3","e":"1"'),
        send().replace(b'"e":"3"', b'"x":"3"'),
        send()[:-1],
        b'{"e":"1","g":"2","i":"UNIQ_KEY\\u0001A\\u0002","opaque":3}',
        b"",
        of_batch("UNIQ_KEY\x01A-1\x02"),
        of_batch("UNIQ_KEY\x01A1\x02UNIQ_KEY\x01B1\x02"),
        of_batch("XUNIQ_KEY\x01A1\x02"),
    ],
    pulls: [
        pull(code=RequestCode.QUERY_MESSAGE),
        pull(queueId="-1"),
        pull(queueOffset="-1"),
        pull(commitOffset="-1"),
        pull(opaque=-5),
        pull(maxMsgNums="many"),
        pull().replace(b'"topic":"orders",', b""),
        pull().replace(b'"queueId":"1"', b'"queueId":"1","queueId":"2"'),
        pull().replace(b'"queueOffset":"4000",', b""),
        pull().replace(b'"flag":0', b'"flag":1'),
        pull().replace(b'"flag":0', b'"flag":2'),
    ],
}


@pytest.mark.parametrize(("kind", "data"), [(kind, data) for kind, others in OTHERS.items() for data in others])
def test_other_headers_are_decoded(kind: Callable[[], ConnectionTemplates[Any]], data: bytes) -> None:
    """A value is missing, unusual or there twice; a response, a one-way request; another code; invalid; no JSON."""
    assert read(kind(), data) is None


@pytest.mark.parametrize("values", [header_templates._SEND_VALUES, header_templates._PULL_VALUES])
def test_all_probes_differ(values: dict[str, HeaderValue]) -> None:
    """Else a header with two fields exchanged would look right."""
    probes = [value.probe for value in values.values()]

    assert len(set(probes)) == len(probes)
    assert not any(one in other for one in probes for other in probes if one is not other)


# --- sends ----------------------------------------------------------------------------------------------


def check_send(found: tuple[Any, tuple[bytes, ...]], data: bytes) -> None:
    """Compare all values that a message gets from its header with those that decoding finds."""
    template, (queue_id, born, unique_id, opaque, keys, sharding_key) = found
    command = decode_json_header(data)
    sent = command.header(SendMessageRequestHeaderV2)
    complete = ADDED.complete_text(sent.properties)
    assert complete is not None
    assert template.properties.fill(unique_id, keys, sharding_key) == complete.encoded
    assert (int(queue_id), int(born), int(opaque)) == (sent.queue_id, sent.born_timestamp, command.opaque)
    assert (unique_id.decode(), template.tags_code) == (complete.unique_id, complete.tags_code)
    assert (template.topic, template.flag, template.sys_flag) == (sent.topic, sent.flag, sent.sys_flag)
    assert template.reconsume_times == (sent.reconsume_times or 0)


texts = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x17F), max_size=8)
names_of_properties = st.sampled_from(
    [
        *("TAGS", "KEYS", "UNIQ_KEY", "XKEYS", "XUNIQ_KEY", "city", '"e":"', "WAIT", "DELAY", "UNIQ"),
        *("__SHARDINGKEY", "X__SHARDINGKEY"),
    ]
)
pairs = st.lists(
    st.tuples(names_of_properties, texts | st.sampled_from(["7F01", "order-1", "a b", '","g":"12', "\\u0002"])),
    max_size=5,
)


@given(
    pairs,
    pairs,
    st.sampled_from(["0", "3", "-1", "03", "123456789012", "x"]),
    st.integers(-(2**31), 2**31 - 1),
    st.sampled_from([(), ("opaque",), ("extFields", "opaque"), ("version", "opaque", "language")]),
)
def test_the_values_of_a_send_equal_the_decoded_ones(
    learned: list[tuple[str, str]], sent: list[tuple[str, str]], queue_id: str, opaque: int, first: tuple[str, ...]
) -> None:
    """Whatever template was learned before, a header is read as decoding reads it, or not at all."""
    templates = sends()
    properties = [
        "".join(f"{name}\x01{value}\x02" for name, value in [("UNIQ_KEY", "A1"), *p]) for p in (learned, sent)
    ]
    for text in properties:
        read(templates, send(text, first))
    data = send(properties[1], first, e=queue_id, opaque=opaque)

    found = templates.match(data)

    if found is not None:
        check_send(found, data)


@pytest.mark.parametrize("first", [(), ("opaque",), ("code", "language", "version", "opaque", "flag")])
@pytest.mark.parametrize(
    "text",
    [
        "UNIQ_KEY\x01A1\x02KEYS\x01order-1 o2\x02TAGS\x01paid\x02",
        "KEYS\x01order-1\x02UNIQ_KEY\x01A1",
        "UNIQ_KEY\x01A1\x02__SHARDINGKEY\x01customer 7\x02WAIT\x01true\x02",
        "__SHARDINGKEY\x017\x02UNIQ_KEY\x01A1\x02WAIT\x01true\x02KEYS\x01order-1\x02",
        "KEYS\x01order-1\x02UNIQ_KEY\x01A1\x02__SHARDINGKEY\x017",
        "MY__SHARDINGKEY\x017\x02UNIQ_KEY\x01A1\x02",
        "MYKEYS\x01x\x02UNIQ_KEY\x01A1\x02",
        "city\x01Ulm\x02UNIQ_KEY\x01A1\x02",
        'UNIQ_KEY\x01A1\x02KEYS\x01a"b\x02',
    ],
)
def test_clients_of_several_languages_have_templates(text: str, first: tuple[str, ...]) -> None:
    """Go writes the opaque before the fields, and each client has its own order of properties."""
    data = send(text, first)

    found = read(sends(), data)

    assert found is not None
    check_send(found, data)


@pytest.mark.parametrize("code", [BATCH, RequestCode.SEND_MESSAGE_V2])
def test_the_header_of_a_batch_has_a_template_of_its_own(code: RequestCode) -> None:
    templates = sends()
    batch, single = read(templates, send(code=code, m="true")), read(templates, send())

    assert batch is not None
    assert batch[0].properties is None
    assert single is not None
    assert single[0].properties is not None


@pytest.mark.parametrize("text", ["WAIT\x01true\x02", "", "UNIQ_KEY\x01\x02", "KEYS\x01order-1\x02"])
def test_the_header_of_a_batch_needs_no_id(text: str) -> None:
    found = read(sends(), of_batch(text))

    assert found is not None
    template, (queue_id, born, unique_id, opaque, *_) = found
    assert (template.properties, queue_id, born, unique_id, opaque) == (None, b"3", b"1700000000000", b"", b"7")


# --- pulls ----------------------------------------------------------------------------------------------


def check_pull(found: tuple[Any, tuple[bytes, ...]], data: bytes) -> None:
    template, (queue_id, queue_offset, commit_offset, opaque) = found
    numbers = {"queue_id": queue_id, "queue_offset": queue_offset, "commit_offset": commit_offset}
    request = decode_json_header(data)
    pulled = replace(template.header, **{name: int(number) for name, number in numbers.items()})
    assert (pulled, int(opaque)) == (request.header(PullMessageRequestHeader), request.opaque)


@pytest.mark.parametrize("code", [PULL, RequestCode.LITE_PULL_MESSAGE])
@pytest.mark.parametrize("first", [(), ("opaque",), ("extFields", "opaque")])
def test_the_values_of_a_pull_are_read(code: int, first: tuple[str, ...]) -> None:
    templates = pulls()
    assert read(templates, pull(first, code)) is not None
    data = pull(first, code, opaque=2_000, queueId="0", queueOffset="123456789012", commitOffset="0")

    found = templates.match(data)

    assert found is not None
    check_pull(found, data)


numbers = st.sampled_from(["0", "3", "007", "-1", "12345678901", "123456789012345678901", "x", ""])
topics = st.sampled_from(["orders", '"opaque":12', '","queueId":"2', "3", "a b", "Zürich", "\\"])


@given(st.lists(topics, min_size=2, max_size=2), numbers, numbers, numbers, st.integers(-(2**31), 2**31 - 1))
def test_the_values_of_a_pull_equal_the_decoded_ones(
    topics: list[str], queue_id: str, queue_offset: str, commit_offset: str, opaque: int
) -> None:
    """Whatever template was learned before, a header is read as decoding reads it, or not at all."""
    templates = pulls()
    for topic in topics:
        read(templates, pull(topic=topic, subscription=topics[0]))
    values = {"queueId": queue_id, "queueOffset": queue_offset, "commitOffset": commit_offset}
    data = pull(topic=topics[1], subscription=topics[0], opaque=opaque, **values)

    found = templates.match(data)

    if found is not None:
        check_pull(found, data)
