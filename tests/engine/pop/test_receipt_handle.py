"""Receipt handles: the text of both protocols, and texts that clients may send."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqtemplate.engine.pop.receipt_handle import ReceiptHandle
from mqtemplate.errors import MessageError

HANDLE = ReceiptHandle(5, 1_700_000_000_000, 60_000, 0, 1, "broker-a", 3, 7, 4_096)
longs = st.integers(min_value=0, max_value=10**18 - 1)


def test_the_text_has_nine_parts_and_that_of_remoting_eight() -> None:
    assert HANDLE.text == "5 1700000000000 60000 0 1 broker-a 3 7 4096"
    assert HANDLE.extra_info == "5 1700000000000 60000 0 1 broker-a 3 7"


@given(start=longs, pop_ms=longs, offset=longs, physical=st.none() | longs, kind=st.integers(0, 2))
def test_a_handle_survives_its_text(start: int, pop_ms: int, offset: int, physical: int | None, kind: int) -> None:
    handle = ReceiptHandle(start, pop_ms, 1_000, 999, kind, "b", 0, offset, physical)

    assert ReceiptHandle.parse(handle.text) == handle


def test_a_text_of_remoting_has_no_physical_offset() -> None:
    handle = ReceiptHandle.parse(HANDLE.extra_info)

    assert handle == HANDLE._replace(physical_offset=None)
    assert handle.text == handle.extra_info


@pytest.mark.parametrize(
    ("text", "handle"),
    [
        pytest.param(f"{HANDLE.text} 0", HANDLE, id="a tenth part is ignored"),
        pytest.param(f"{HANDLE.text}  ", HANDLE, id="blanks at the end"),
        pytest.param("5 1700000000000 60000 0 x broker-a 3 7 4096", HANDLE._replace(topic_type=0), id="another kind"),
        pytest.param("+5 1700000000000 60000 0 1 broker-a 3 7 4096", HANDLE, id="a sign"),
        pytest.param("5 1700000000000 60000 0 1 broker-a 3 7 -1", HANDLE._replace(physical_offset=None), id="-1"),
    ],
)
def test_texts_are_read_as_rocketmq_reads_them(text: str, handle: ReceiptHandle) -> None:
    assert ReceiptHandle.parse(text) == handle


@pytest.mark.parametrize(
    "text", ["", "1 2 3", "5 170 60000 0 1 broker-a 3", "a 2 3 0 1 b 3 7 9", "1 2 3 0 1  3 7", "1 2 3 0 1 b 3 7 x"]
)
def test_a_text_that_is_no_handle_is_refused(text: str) -> None:
    with pytest.raises(MessageError, match="receipt handle .* is not valid; a handle has at least 8 parts"):
        ReceiptHandle.parse(text)


@given(text=st.text(alphabet="0123456789 -x", max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    with suppress(MessageError):
        assert ReceiptHandle.parse(text).broker_name


@pytest.mark.parametrize(("kind", "topic"), [(0, "orders"), (1, "%RETRY%billing_orders"), (2, "%RETRY%billing+orders")])
def test_a_handle_names_the_topic_of_its_record(kind: int, topic: str) -> None:
    assert HANDLE._replace(topic_type=kind).real_topic("orders", "billing") == topic


def test_a_handle_knows_when_it_expires_and_whether_it_is_ordered() -> None:
    assert HANDLE.expires_ms == 1_700_000_060_000
    assert not HANDLE.is_ordered
    assert HANDLE._replace(revive_queue_id=999).is_ordered
