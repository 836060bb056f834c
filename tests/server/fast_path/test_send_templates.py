"""Headers that are read without decoding them: what is read equals what decoding finds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqtemplate.remoting.protocol import RequestCode, header_forms
from mqtemplate.remoting.protocol.header_forms import ConnectionForms
from mqtemplate.remoting.protocol.headers.message import SendMessageRequestHeaderV2
from mqtemplate.remoting.protocol.json_header import decode_json_header
from mqtemplate.server.processors.sends import send_forms
from mqtemplate.server.processors.sends.send_forms import SendForm, SendForms
from mqtemplate.server.processors.sends.sent_properties import SentProperties

ADDED = {"MSG_REGION": "DefaultRegion", "TRACE_ON": "true", "CLUSTER": "DefaultCluster"}
SEND: dict[str, Any] = {
    "code": RequestCode.SEND_MESSAGE_V2,
    "extFields": {
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
    },
    "flag": 0,
    "language": "JAVA",
    "opaque": 7,
    "serializeTypeCurrentRPC": "JSON",
    "version": 513,
}


def header(
    *,
    properties: str | None = None,
    fields: Mapping[str, str] | None = None,
    first: tuple[str, ...] = (),
    **members: object,
) -> bytes:
    """Return `SEND` with changes as compact JSON.

    Args:
        first: Members that are before the others.
    """
    ext_fields = SEND["extFields"] | (fields or {}) | ({} if properties is None else {"i": properties})
    changed = SEND | {"extFields": ext_fields} | members
    return json.dumps({name: changed[name] for name in first} | changed, separators=(",", ":")).encode()


@pytest.fixture
def properties() -> SentProperties:
    return SentProperties(ADDED)


@pytest.fixture
def forms(properties: SentProperties) -> ConnectionForms[SendForm]:
    return ConnectionForms(SendForms(properties))


def read(forms: ConnectionForms[SendForm], data: bytes) -> tuple[SendForm, tuple[bytes, ...]] | None:
    """Return what is known of a header that occurs the second time."""
    forms.match(data)
    return forms.match(data)


def values_of(found: tuple[SendForm, tuple[bytes, ...]]) -> tuple[object, ...]:
    """Return all values that a message gets from its header."""
    form, (queue_id, born, unique_id, opaque, keys) = found
    encoded = form.encode(unique_id, keys)
    fixed = (form.topic, form.tags_code, form.flag, form.sys_flag, form.reconsume_times)
    return int(queue_id), int(born), unique_id.decode(), int(opaque), encoded, fixed


def decoded_values(properties: SentProperties, data: bytes) -> tuple[object, ...]:
    command = decode_json_header(data)
    sent = command.header(SendMessageRequestHeaderV2)
    complete = properties.complete_text(sent.properties)
    assert complete is not None
    fixed = (sent.topic, complete.tags_code, sent.flag, sent.sys_flag, sent.reconsume_times or 0)
    return sent.queue_id, sent.born_timestamp, complete.unique_id, command.opaque, complete.encoded, fixed


def test_a_form_is_known_when_it_occurs_the_second_time(
    forms: ConnectionForms[SendForm], properties: SentProperties, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert forms.match(header()) is None
    assert forms.match(header(opaque=8)) is not None
    monkeypatch.setattr(header_forms, "decode_json_header", lambda data: pytest.fail("it was decoded"))
    third = header(
        opaque=2_000,
        fields={"e": "0", "g": "1800000000001"},
        properties="UNIQ_KEY\x01B2\x02WAIT\x01true\x02TAGS\x01paid\x02",
    )

    found = forms.match(third)

    assert found is not None
    assert values_of(found) == decoded_values(properties, third)


def text_of(pairs: list[tuple[str, str]]) -> str:
    return "".join(f"{name}\x01{value}\x02" for name, value in [("UNIQ_KEY", "A1"), *pairs])


texts = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x17F), max_size=8)
names = st.sampled_from(["TAGS", "KEYS", "UNIQ_KEY", "XKEYS", "XUNIQ_KEY", "city", '"e":"', "WAIT", "DELAY", "UNIQ"])
pairs = st.lists(
    st.tuples(names, texts | st.sampled_from(["7F01", "order-1", "a b", '","g":"12', "\\u0002"])), max_size=5
)


@given(
    pairs,
    pairs,
    st.sampled_from(["0", "3", "-1", "03", "123456789012", "x"]),
    st.integers(-(2**31), 2**31 - 1),
    st.sampled_from([(), ("opaque",), ("extFields", "opaque"), ("version", "opaque", "language")]),
)
def test_what_is_read_equals_what_is_decoded(
    learned: list[tuple[str, str]], sent: list[tuple[str, str]], queue_id: str, opaque: int, first: tuple[str, ...]
) -> None:
    """Whatever form was learned before, a header is read as decoding reads it, or not at all."""
    properties = SentProperties(ADDED)
    forms = ConnectionForms(SendForms(properties))
    texts = [
        "".join(f"{name}\x01{value}\x02" for name, value in [("UNIQ_KEY", "A1"), *each]) for each in (learned, sent)
    ]
    for text in (texts[0], texts[1]):
        read(forms, header(properties=text, first=first))
    data = header(properties=texts[1], fields={"e": queue_id}, opaque=opaque, first=first)

    found = forms.match(data)

    if found is not None:
        assert values_of(found) == decoded_values(properties, data)


@pytest.mark.parametrize("first", [(), ("opaque",), ("code", "language", "version", "opaque", "flag")])
@pytest.mark.parametrize(
    "text",
    [
        "UNIQ_KEY\x01A1\x02KEYS\x01order-1 o2\x02TAGS\x01paid\x02",
        "KEYS\x01order-1\x02UNIQ_KEY\x01A1",
        "MYKEYS\x01x\x02UNIQ_KEY\x01A1\x02",
        "city\x01Ulm\x02UNIQ_KEY\x01A1\x02",
        'UNIQ_KEY\x01A1\x02KEYS\x01a"b\x02',
    ],
)
def test_clients_of_several_languages_have_forms(
    forms: ConnectionForms[SendForm], properties: SentProperties, text: str, first: tuple[str, ...]
) -> None:
    """Go writes the opaque before the fields, and each client has its own order of properties."""
    data = header(properties=text, first=first)

    found = read(forms, data)

    assert found is not None
    assert values_of(found) == decoded_values(properties, data)


@pytest.mark.parametrize(
    "data",
    [
        header(code=RequestCode.SEND_MESSAGE),
        header(flag=1),
        header(flag=2),
        header(fields={"b": "%RETRY%billing"}),
        header(fields={"e": "-1"}),
        header(fields={"e": "1234567890"}),
        header(fields={"g": "soon"}),
        header(opaque=-5),
        header(properties=""),
        header(properties="WAIT\x01true\x02"),
        header(properties="UNIQ_KEY\x01A-1\x02"),
        header(properties="UNIQ_KEY\x01A1\x02UNIQ_KEY\x01B1\x02"),
        header(properties="XUNIQ_KEY\x01A1\x02"),
        header(properties="UNIQ_KEY\x01A1\x02KEYS\x01Zürich\x02"),
        header(properties="UNIQ_KEY\x01A1\x02KEYS\x01a\x02KEYS\x01b\x02"),
        header(properties="UNIQ_KEY\x01A1\x02DELAY\x013\x02"),
        header(properties="UNIQ_KEY\x01A1\x02TIMER_DELAY_MS\x013\x02"),
        header(properties="UNIQ_KEY\x01A1\x02TRAN_MSG\x01true\x02"),
        header().replace(b'"d":"4",', b""),
        header().replace(b'"e":"3"', b'"e":"3","e":"1"'),
        header().replace(b'"e":"3"', b'"x":"3"'),
        header()[:-1],
        b'{"e":"1","g":"2","i":"UNIQ_KEY\\u0001A\\u0002","opaque":3}',
        b"",
    ],
)
def test_other_requests_are_decoded(forms: ConnectionForms[SendForm], data: bytes) -> None:
    assert read(forms, data) is None


@pytest.mark.parametrize("code", [RequestCode.SEND_BATCH_MESSAGE, RequestCode.SEND_MESSAGE_V2])
def test_the_header_of_a_batch_has_a_form_of_its_own(forms: ConnectionForms[SendForm], code: RequestCode) -> None:
    batch, single = read(forms, header(code=code, fields={"m": "true"})), read(forms, header())

    assert batch is not None
    assert batch[0].is_batch
    assert single is not None
    assert not single[0].is_batch


def of_batch(properties: str) -> bytes:
    return header(code=RequestCode.SEND_BATCH_MESSAGE, fields={"m": "true"}, properties=properties)


@pytest.mark.parametrize("text", ["WAIT\x01true\x02", "", "UNIQ_KEY\x01\x02", "KEYS\x01order-1\x02"])
def test_the_header_of_a_batch_needs_no_id(forms: ConnectionForms[SendForm], text: str) -> None:
    found = read(forms, of_batch(text))

    assert found is not None
    form, (queue_id, born, unique_id, opaque, *_) = found
    assert (form.is_batch, queue_id, born, unique_id, opaque) == (True, b"3", b"1700000000000", b"", b"7")


@pytest.mark.parametrize(
    "text",
    [
        "UNIQ_KEY\x01A-1\x02",
        "UNIQ_KEY\x01A1\x02UNIQ_KEY\x01B1\x02",
        "XUNIQ_KEY\x01A1\x02",
    ],
)
def test_the_header_of_a_batch_with_an_unusual_id_is_decoded(forms: ConnectionForms[SendForm], text: str) -> None:
    assert read(forms, of_batch(text)) is None


def test_all_values_of_the_probe_differ() -> None:
    """Else a header with two fields exchanged would look right."""
    probes = [value.probe for value in send_forms._VALUES.values()]

    assert len(set(probes)) == len(probes)
    assert not any(one in other for one in probes for other in probes if one is not other)
