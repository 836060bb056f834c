"""Known forms of headers: found again, kept, and limited in number."""

from __future__ import annotations

import json

import pytest

from mqtemplate.errors import RemoteProtocolError
from mqtemplate.remoting.protocol import RemotingCommand, header_forms
from mqtemplate.remoting.protocol.header_forms import OPAQUE, ConnectionForms, HeaderForms, HeaderKey, field_value

VALUES = {
    "offset": field_value("offset", rb"[0-9]{1,18}", b"345678912345"),
    "note": field_value("note", rb"[a-z]+", b"probe")._replace(is_optional=True),
    "opaque": OPAQUE,
}


class Names(HeaderForms[str]):
    """The form of a request is its field *name*."""

    def __init__(self) -> None:
        super().__init__(VALUES)

    def form_of(self, key: HeaderKey, request: RemotingCommand) -> str | None:
        if request.ext_fields.get("name") == "invalid":
            raise RemoteProtocolError("the header is invalid")
        return request.ext_fields.get("name")


def header(name: str | None = "a", offset: str | None = "1", opaque: int = 7, flag: int = 0, **more: str) -> bytes:
    fields = {"name": name, "offset": offset, **more}
    ext_fields = {name: value for name, value in fields.items() if value is not None}
    members = {"code": 11, "extFields": ext_fields, "flag": flag, "opaque": opaque}
    return json.dumps(members, separators=(",", ":")).encode()


def read(forms: ConnectionForms[str], data: bytes) -> tuple[str, tuple[bytes, ...]] | None:
    """Return what is known of a header that occurs the second time."""
    forms.match(data)
    return forms.match(data)


@pytest.fixture
def forms() -> ConnectionForms[str]:
    return ConnectionForms(Names())


def test_the_values_have_the_order_of_their_names(forms: ConnectionForms[str]) -> None:
    opaque_first = b'{"opaque":9,"extFields":{"note":"new","name":"a","offset":"12"},"code":11,"flag":0}'

    assert read(forms, header(note="paid")) == ("a", (b"1", b"paid", b"7"))
    assert read(forms, opaque_first) == ("a", (b"12", b"new", b"9"))


def test_an_optional_value_that_a_form_does_not_have_is_empty(forms: ConnectionForms[str]) -> None:
    assert read(forms, header()) == ("a", (b"1", b"", b"7"))


def test_a_header_is_not_decoded_after_its_form_is_known(
    forms: ConnectionForms[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read(forms, header()) is not None
    monkeypatch.setattr(header_forms, "decode_json_header", lambda data: pytest.fail("it was decoded"))

    assert forms.match(header(offset="123456", opaque=8)) == ("a", (b"123456", b"", b"8"))


@pytest.mark.parametrize(
    "data",
    [
        header(offset=None),
        header(offset="-1"),
        header(offset="1234567890123456789"),
        header(opaque=-7),
        header(opaque=1_234_567_890),
        header(flag=1),
        header(flag=2),
        header(name=None),
        header(name="invalid"),
        header().replace(b'"name":"a"', b'"offset":"2"'),
        header()[:-1],
    ],
)
def test_other_headers_are_decoded(forms: ConnectionForms[str], data: bytes) -> None:
    """A value is missing, unusual or there twice; a response, a one-way request; none or an invalid form; no JSON."""
    assert read(forms, data) is None


def test_a_connection_keeps_the_forms_that_it_used_last(forms: ConnectionForms[str]) -> None:
    assert all(read(forms, header(f"name{number}")) is not None for number in range(6))

    assert [known.form for known in forms._forms] == ["name5", "name4", "name3", "name2"]


def test_a_form_of_another_connection_is_not_decoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Names()
    read(ConnectionForms(known), header())
    monkeypatch.setattr(header_forms, "decode_json_header", lambda data: pytest.fail("it was decoded"))

    assert ConnectionForms(known).match(header(opaque=99)) == ("a", (b"1", b"", b"99"))


def test_headers_that_all_differ_are_rarely_inspected(
    forms: ConnectionForms[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that sends a trace id in each request must not pay for forms that never occur again."""
    inspected = []
    key_of = forms._all._key_of
    monkeypatch.setattr(forms._all, "_key_of", lambda data: (inspected.append(data), key_of(data))[1])

    assert [forms.match(header(f"name{number}")) for number in range(2_100)] == [None] * 2_100
    assert len(inspected) == 16 + 2
    assert len(forms._seen) <= 18


def test_the_number_of_forms_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header_forms, "_MAX_FORMS", 10)
    known = Names()
    for number in range(25):
        assert read(ConnectionForms(known), header(f"name{number}")) is not None

    assert 1 <= len(known._forms) <= 10
