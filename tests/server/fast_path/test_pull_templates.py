"""Headers of pulls that are read without decoding them: what is read equals what decoding finds."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqtemplate.remoting.protocol import RequestCode
from mqtemplate.remoting.protocol.header_forms import ConnectionForms
from mqtemplate.remoting.protocol.headers.message import PullMessageRequestHeader
from mqtemplate.remoting.protocol.json_header import decode_json_header
from mqtemplate.server.processors.pulls import pull_forms
from mqtemplate.server.processors.pulls.pull_forms import PullForm, PullForms

FIELDS = {
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


def header(first: tuple[str, ...] = (), code: int = RequestCode.PULL_MESSAGE, opaque: int = 7, **fields: str) -> bytes:
    """Return the header of a pull as a Java client writes it, in compact JSON.

    Args:
        first: Members that are before the others.
    """
    members: dict[str, Any] = {
        "code": code,
        "extFields": FIELDS | fields,
        "flag": 0,
        "language": "JAVA",
        "opaque": opaque,
        "serializeTypeCurrentRPC": "JSON",
        "version": 513,
    }
    return json.dumps({name: members[name] for name in first} | members, separators=(",", ":")).encode()


def read(forms: ConnectionForms[PullForm], data: bytes) -> tuple[PullForm, tuple[bytes, ...]] | None:
    """Return what is known of a header that occurs the second time."""
    forms.match(data)
    return forms.match(data)


def pull_of(found: tuple[PullForm, tuple[bytes, ...]]) -> tuple[PullMessageRequestHeader, int]:
    """Return the header and the opaque of the request."""
    form, (queue_id, queue_offset, commit_offset, opaque) = found
    numbers = {"queue_id": queue_id, "queue_offset": queue_offset, "commit_offset": commit_offset}
    return replace(form.header, **{name: int(number) for name, number in numbers.items()}), int(opaque)


def decoded(data: bytes) -> tuple[PullMessageRequestHeader, int]:
    request = decode_json_header(data)
    return request.header(PullMessageRequestHeader), request.opaque


@pytest.fixture
def forms() -> ConnectionForms[PullForm]:
    return ConnectionForms(PullForms())


@pytest.mark.parametrize("code", [RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE])
@pytest.mark.parametrize("first", [(), ("opaque",), ("extFields", "opaque")])
def test_the_values_are_read(forms: ConnectionForms[PullForm], code: int, first: tuple[str, ...]) -> None:
    assert read(forms, header(first, code)) is not None
    data = header(first, code, opaque=2_000, queueId="0", queueOffset="123456789012", commitOffset="0")

    found = forms.match(data)

    assert found is not None
    assert pull_of(found) == decoded(data)


numbers = st.sampled_from(["0", "3", "007", "-1", "12345678901", "123456789012345678901", "x", ""])
texts = st.sampled_from(["orders", '"opaque":12', '","queueId":"2', "3", "a b", "Zürich", "\\"])


@given(st.lists(texts, min_size=2, max_size=2), numbers, numbers, numbers, st.integers(-(2**31), 2**31 - 1))
def test_what_is_read_equals_what_is_decoded(
    topics: list[str], queue_id: str, queue_offset: str, commit_offset: str, opaque: int
) -> None:
    """Whatever form was learned before, a header is read as decoding reads it, or not at all."""
    forms = ConnectionForms(PullForms())
    for topic in topics:
        read(forms, header(topic=topic, subscription=topics[0]))
    values = {"queueId": queue_id, "queueOffset": queue_offset, "commitOffset": commit_offset}
    data = header(topic=topics[1], subscription=topics[0], opaque=opaque, **values)

    found = forms.match(data)

    if found is not None:
        assert pull_of(found) == decoded(data)


@pytest.mark.parametrize(
    "data",
    [
        header(code=RequestCode.QUERY_MESSAGE),
        header(queueId="-1"),
        header(queueOffset="-1"),
        header(commitOffset="-1"),
        header(opaque=-5),
        header(maxMsgNums="many"),
        header().replace(b'"topic":"orders",', b""),
        header().replace(b'"queueId":"1"', b'"queueId":"1","queueId":"2"'),
        header().replace(b'"queueOffset":"4000",', b""),
        header().replace(b'"flag":0', b'"flag":1'),
        header().replace(b'"flag":0', b'"flag":2'),
    ],
)
def test_other_requests_are_decoded(forms: ConnectionForms[PullForm], data: bytes) -> None:
    assert read(forms, data) is None


def test_all_values_of_the_probe_differ() -> None:
    """Else a header with two fields exchanged would look right."""
    probes = [value.probe for value in pull_forms._VALUES.values()]

    assert len(set(probes)) == len(probes)
    assert not any(one in other for one in probes for other in probes if one is not other)
