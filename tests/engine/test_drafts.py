"""Records of lists of messages: as rows where they are alike, with the same result as one by one."""

from __future__ import annotations

from typing import Any

import pytest

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import VirtualClock
from mqtemplate.engine import drafts
from mqtemplate.errors import MessageError
from mqtemplate.message import Message, Property
from mqtemplate.record.codec import StoredRecord
from mqtemplate.record.properties import decode_properties

NEVER = 1_000_000


def messages(count: int, size: int = 3, **properties: str) -> list[Message]:
    return [Message("orders", f"{number:0{size}}".encode()[:size], dict(properties)) for number in range(count)]


def stored(sent: list[Message]) -> tuple[list[Any], list[str], list[str]]:
    """Send a list; return its records without ids, their ids, and the ids of the result."""
    with EmbeddedBroker(None, clock=VirtualClock()) as broker:
        result = broker.sends.send_batch(sent)
        records, at = list[StoredRecord](), 0
        while at < broker.store.end_offset:
            record = broker.store.read_at(at)
            assert record is not None
            records.append(record)
            at += record.total_size
        properties = [decode_properties(record.properties_bytes) for record in records]
        ids = [each.pop(Property.UNIQ_KEY) for each in properties]
        rest = [(record[3:14], record.body, each) for record, each in zip(records, properties, strict=True)]
        queue = broker.store.consume_queue("orders", records[0].queue_id)
        return [rest, queue.unit_tuples(0, queue.max_offset)], ids, result.msg_id.split(",")


@pytest.mark.parametrize("size", [0, 3, 500])
@pytest.mark.parametrize("properties", [{}, {"TAGS": "paid", "KEYS": "o-1 o-2", "city": "Zürich"}])
def test_a_list_of_alike_messages_is_stored_as_one_by_one(
    size: int, properties: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for fewest in (2, NEVER):
        monkeypatch.setattr(drafts, "_FEWEST_UNIFORM", fewest)
        records, ids, result_ids = stored(messages(40, size, **properties))
        assert ids == result_ids
        assert len(set(ids)) == 40
        found.append(records)

    assert found[0] == found[1]


@pytest.mark.parametrize(
    "sent",
    [
        messages(15),
        [*messages(20), Message("orders", b"longer")],
        [*messages(20), Message("orders", b"abc", {"TAGS": "paid"})],
        [*messages(20), Message("orders", b"abc", flag=1)],
        messages(20, UNIQ_KEY="7F01"),
        messages(20, DELAY="3"),
        messages(20, TIMER_DELAY_MS="3000"),
    ],
)
def test_other_lists_are_stored_one_by_one(sent: list[Message]) -> None:
    with EmbeddedBroker(None, clock=VirtualClock()) as broker:
        assert broker.engine.drafts.make_uniform(sent, 0, 0) is None


def test_a_body_above_the_limit_refuses_the_list() -> None:
    with EmbeddedBroker(None, clock=VirtualClock()) as broker:
        big = [Message("orders", bytes(5 << 20))] * 20
        with pytest.raises(MessageError, match="has 5242880 bytes, allowed are 4194304"):
            broker.sends.send_batch(big)
        assert broker.store.end_offset == 0
