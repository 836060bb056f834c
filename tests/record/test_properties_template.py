"""Properties of sent messages: what is stored without decoding them equals what is stored after decoding."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqtemplate.message import Property
from mqtemplate.record import properties_template
from mqtemplate.record.properties import decode_properties, encode_properties
from mqtemplate.record.properties_template import AddedProperties

ADDED = {"MSG_REGION": "DefaultRegion", "TRACE_ON": "true", "CLUSTER": "DefaultCluster"}
JAVA = "UNIQ_KEY\x01{}\x02WAIT\x01true\x02TAGS\x01paid\x02"


@pytest.fixture
def properties() -> AddedProperties:
    return AddedProperties(ADDED)


def decoded_and_encoded(properties: AddedProperties, data: bytes) -> bytes:
    return encode_properties(properties.complete(decode_properties(data)))


def test_the_second_text_of_a_form_is_not_decoded(properties: AddedProperties, monkeypatch: pytest.MonkeyPatch) -> None:
    first = properties.complete_text(JAVA.format("7F000001A1") + "__SHARDINGKEY\x017\x02KEYS\x01order-1")
    monkeypatch.setattr(properties_template, "decode_properties", lambda data: pytest.fail("it was decoded"))

    second = properties.complete_text(JAVA.format("7F000001B2") + "__SHARDINGKEY\x018\x02KEYS\x01order 2\x02")

    assert first is not None
    assert second is not None
    assert second.unique_id == "7F000001B2"
    assert second.tags_code == first.tags_code
    assert decode_properties(second.encoded) == {
        "UNIQ_KEY": "7F000001B2",
        "WAIT": "true",
        "TAGS": "paid",
        "__SHARDINGKEY": "8",
        "KEYS": "order 2",
        **ADDED,
    }


@pytest.mark.parametrize(
    "text",
    [
        "",
        "WAIT\x01true\x02",  # the broker creates the id
        "UNIQ_KEY\x01\x02",
        "UNIQ_KEY\x01a\x01b\x02",
        "UNIQ_KEY\x01a\x02UNIQ_KEY\x01b\x02",
        "UNIQ_KEY\x01a\x02KEYS\x01\x02",
        "UNIQ_KEY\x01a\x02KEYS\x01b\x02KEYS\x01c\x02",
        "UNIQ_KEY\x01a\x02__SHARDINGKEY\x01\x02",
        "UNIQ_KEY\x01a\x02__SHARDINGKEY\x01b\x01c\x02",
        "UNIQ_KEY\x01a\x02__SHARDINGKEY\x01b\x02__SHARDINGKEY\x01c\x02",
        "UNIQ_KEY\x01a\x02\x02",
        "UNIQ_KEY\x01a\x02name\x02",
        "UNIQ_KEY\x01a\x02city\x01Zürich\x02",
        "UNIQ_KEY\x01a\x02DELAY\x013\x02",
        "UNIQ_KEY\x01a\x02TIMER_DELAY_MS\x013\x02",
        "UNIQ_KEY\x01a\x02TRAN_MSG\x01true\x02",
        "UNIQ_KEY\x01a\x02REAL_TOPIC\x01orders\x02",
        "UNIQ_KEY\x01a\x02POP_CK\x01x\x02",
        "UNIQ_KEY\x01a\x02CLUSTER\x01other\x02",
    ],
)
def test_what_decoding_changes_or_interprets_is_decoded(properties: AddedProperties, text: str) -> None:
    assert properties.complete_encoded(text.encode()) is None
    assert properties.complete_text(text) is None


KNOWN = sorted({value for name, value in vars(Property).items() if name.isupper()})
NAMES = st.sampled_from(
    ["UNIQ_KEY", "KEYS", "TAGS", *KNOWN, "city", "CLUSTER", "POP_CK", "NOT_UNIQ_KEY", "MY_KEYS", "MY__SHARDINGKEY", ""]
)
VALUES = st.sampled_from(["true", "a", "a b", "", "Zürich", "x\x01y", "1"])
TEXTS = st.lists(st.tuples(NAMES, VALUES, st.sampled_from(["\x02", "\x02\x02", ""]))).map(
    lambda pairs: "".join(f"{name}\x01{value}{end}" for name, value, end in pairs)
)


@given(st.lists(TEXTS, min_size=1, max_size=4))
def test_the_result_equals_decoding_and_encoding(texts: list[str]) -> None:
    """The texts share one object, so that a form which one of them leaves is used for the next."""
    properties = AddedProperties(ADDED)
    for text in texts * 2:
        data = text.encode()

        complete = properties.complete_encoded(data)

        if complete is not None:
            assert complete.encoded == decoded_and_encoded(properties, data)
            assert decode_properties(data)["UNIQ_KEY"] == complete.unique_id


def test_the_number_of_known_texts_is_bounded() -> None:
    properties = AddedProperties(ADDED, max_known=10)

    for number in range(100):
        assert properties.complete_text(f"UNIQ_KEY\x01a\x02order\x01{number}\x02") is not None

    assert len(properties._tags_codes) <= 10


@given(st.lists(st.text(alphabet="aB9\x01\x02 ü", max_size=4), min_size=2, max_size=6))
def test_another_id_in_the_form_of_the_last_text_gives_the_same_as_decoding(ids: list[str]) -> None:
    properties = AddedProperties(ADDED)
    for unique_id in ["first", *ids]:
        data = JAVA.format(unique_id).encode()

        complete = properties.complete_encoded(data)

        if complete is not None:
            assert complete.encoded == decoded_and_encoded(properties, data)
            assert complete.unique_id == decode_properties(data)["UNIQ_KEY"] == unique_id
        else:
            assert not unique_id.isalnum() or not unique_id.isascii()
