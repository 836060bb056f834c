"""A store directory of a RocketMQ broker that delivered messages by POP: those that were in flight come again, once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from mqtemplate.engine.pop.checkpoints import REVIVE_GROUP
from mqtemplate.record.codec import RecordDraft
from mqtemplate.testing import Harness
from tests.engine.pop.consumer import GROUP, TOPIC, Shop, bodies

REVIVE = "rmq_sys_REVIVE_LOG_DefaultCluster"


@pytest.fixture
def shop() -> Iterator[Shop]:
    """A topic with five messages, which RocketMQ has delivered: the committed offset is after them."""
    shop = Shop()
    shop.send(*"abcde")
    engine = shop.broker.engine
    engine.topics.create(REVIVE, 1)
    engine.offsets.commit(GROUP, TOPIC, 0, 5)
    engine._checkpoints.load()
    yield shop
    shop.broker.close()


def put(shop: Shop, tag: str, content: Any, *, is_text: bool = False) -> None:
    """Store a message of the revive topic, as the timer of the broker does."""
    body = content if is_text else json.dumps(content)
    draft = RecordDraft(REVIVE, 0, body.encode(), f"TAGS\x01{tag}\x02".encode())
    shop.broker.store.confirm(shop.broker.store.put(draft).end, (REVIVE,))


def checkpoint(shop: Shop, **changes: Any) -> dict[str, Any]:
    """Return a checkpoint of all five messages, whose time is over in a second."""
    now_ms = shop.clock.now_ms()
    fields = {"so": 0, "pt": now_ms - 59_000, "it": 60_000, "bm": 0, "n": 5, "q": 0, "t": TOPIC, "c": GROUP}
    return fields | {"d": [0, 1, 2, 3, 4], "bn": "broker-a"} | changes


def ack(of: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {name: of[name] for name in ("so", "pt", "q", "t", "c", "bn")} | changes


def test_messages_that_were_not_acknowledged_come_again_once(shop: Shop) -> None:
    found = checkpoint(shop)
    put(shop, "ck", found)
    shop.harness.advance("1s")
    put(shop, "ack", ack(found, ao=1))
    put(shop, "bAck", ack(found, aol=[3, 4]))

    shop.harness.advance("11s")
    again = shop.pop()

    assert [(*bodies([each]), each.attempt) for each in again] == [("a", 2), ("c", 2)]
    shop.ack(*again)
    shop.harness.advance("1h")
    assert shop.pop() == []
    assert shop.broker.engine.offsets.offset(REVIVE_GROUP, REVIVE, 0) == 2
    assert shop.number("pop.revived_of_rocketmq") == 2


def test_a_message_does_not_come_before_its_time(shop: Shop) -> None:
    put(shop, "ck", checkpoint(shop, pt=shop.clock.now_ms(), it=300_000))

    shop.harness.advance("299s")
    assert shop.pop() == []
    assert shop.broker.engine.offsets.offset(REVIVE_GROUP, REVIVE, 0) is None
    shop.harness.advance("3s")

    assert len(shop.pop()) == 5


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({"bm": 0b10011}, "cd", id="acknowledged in memory"),
        pytest.param({"d": [0, 2], "n": 2}, "ac", id="with differences"),
        pytest.param({"d": None, "so": 2, "n": 2}, "cd", id="without differences"),
    ],
)
def test_forms_of_a_checkpoint(shop: Shop, changes: dict[str, Any], expected: str) -> None:
    put(shop, "ck", checkpoint(shop, **changes))

    shop.harness.advance("15s")

    assert "".join(bodies(shop.pop())) == expected


def test_a_delivery_that_is_no_attempt_is_not_counted(shop: Shop) -> None:
    put(shop, "ck", checkpoint(shop, n=1, d=[0], sp=True))

    shop.harness.advance("15s")

    assert [each.attempt for each in shop.pop()] == [1]


def test_what_is_no_checkpoint_is_skipped(shop: Shop) -> None:
    put(shop, "ck", "{", is_text=True)
    put(shop, "ck", [1, 2])
    put(shop, "ack", {"t": TOPIC})
    put(shop, "other", checkpoint(shop))
    put(shop, "ck", checkpoint(shop, n=1, d=[0]))

    shop.harness.advance("15s")

    assert bodies(shop.pop()) == ["a"]


def test_deliveries_of_a_deleted_group_do_not_come_again(shop: Shop) -> None:
    put(shop, "ck", checkpoint(shop, c="gone"))

    shop.harness.advance("15s")

    assert not shop.broker.engine.topics.has(f"%RETRY%gone_{TOPIC}")


def test_a_start_continues_after_the_last_message_that_is_done(shop: Shop) -> None:
    put(shop, "ck", checkpoint(shop, n=1, d=[0]))
    shop.broker.engine.offsets.commit(REVIVE_GROUP, REVIVE, 0, 0)

    Harness(shop.broker).advance("15s")

    assert shop.pop() == []
