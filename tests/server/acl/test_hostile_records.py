"""Records that an earlier version stored for a client, with contents that nothing can read: every store opens."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import VirtualClock
from mqtemplate.message import INTERNAL_PROPERTIES, ORIGIN_PROPERTIES, Message, MessageQueue, SendSequence
from mqtemplate.pending import PendingQuery
from mqtemplate.record.codec import RecordDraft
from mqtemplate.record.layout import SysFlag
from mqtemplate.record.properties import encode_properties
from mqtemplate.topics import HALF_TOPIC, OP_TOPIC, SCHEDULE_TOPIC, TIMER_TOPIC
from tests.server.acl.crashes import SMALL, after_a_crash

DIGITS = "9" * 5_000
VALUES = (
    "garbage",
    "-1",
    DIGITS,
    "1 2 3",
    "query 1 0 " + DIGITS,
    "query x 0 1",
    "\N{BELL}[2J",
    "٣",
    "orders",
    "../../x",
)
NAMES = sorted(INTERNAL_PROPERTIES | ORIGIN_PROPERTIES | {"DELAY", "TIMER_DELIVER_MS", "TIMER_DELAY_SEC", "PGROUP"})
ORDERS = MessageQueue("orders", "broker-a", 0)


def open_broker(folder: Path) -> EmbeddedBroker:
    broker = EmbeddedBroker(folder, SMALL, VirtualClock())
    broker.start()
    return broker


def put(broker: EmbeddedBroker, topic: str, properties: dict[str, str], **fields: int | bytes) -> None:
    """Store a record past all checks."""
    values = {"sys_flag": int(SysFlag.SEQUENCED), "tags_code": 1, "body": b"x", **fields}
    draft = RecordDraft(topic, 0, properties=encode_properties(properties), **values)  # type: ignore[arg-type]
    broker.store.put(draft)


@pytest.mark.parametrize("topic", ["orders", HALF_TOPIC, OP_TOPIC, SCHEDULE_TOPIC, TIMER_TOPIC])
def test_a_store_opens_whatever_the_properties_of_its_records_are(tmp_path: Path, topic: str) -> None:
    """Each property with each value, linked to another record or not. Then the broker works, and so do its services."""
    broker = open_broker(tmp_path / "store")
    broker.create_topic("orders", 1)
    kept = broker.sends.send(Message("orders", b"kept")).offset_msg_id
    for system_topic in (HALF_TOPIC, OP_TOPIC):
        broker.topics.create(system_topic, 1)
    real = {"REAL_TOPIC": "orders", "REAL_QID": "0", "UNIQ_KEY": "0A0B", "TAGS": "d"}
    for name in NAMES:
        for value in VALUES:
            put(broker, topic, real | {name: value})
            put(broker, topic, real | {name: value}, prepared_transaction_offset=7, body=f"{DIGITS},".encode())
    broker.store.flush()

    with after_a_crash(tmp_path / "store", may_be_damaged=True) as reopened:
        broker.close()
        for _ in range(300):
            for service in reopened.services():
                service.step()
        assert reopened.reader.message_by_id(kept) is not None
        assert reopened.sends.send(Message("orders", b"new")).queue_offset > 0
        list(reopened.delayed.pending(PendingQuery(topic="orders"), 100).messages)
        assert reopened.admin().topic_kinds()


def test_a_sequence_that_cannot_be_read_is_skipped_and_the_others_are_not(tmp_path: Path) -> None:
    """Such a record once made each start fail, also the doctor's."""
    broker = open_broker(tmp_path / "store")
    broker.create_topic("orders", 1)
    put(broker, "orders", {"__SEQUENCE": "garbage"})
    broker.sends.send_sequenced([(Message("orders", b"row"), ORDERS)], SendSequence("query", 1, 0))
    put(broker, "orders", {"__SEQUENCE": f"query 1 0 {DIGITS}"})
    broker.store.flush()

    with after_a_crash(tmp_path / "store", may_be_damaged=True) as reopened:
        broker.close()
        again = reopened.sends.send_sequenced([(Message("orders", b"row"), ORDERS)], SendSequence("query", 1, 0))

    assert (again.stored, again.repeated) == (0, 1)


def test_a_marker_of_one_topic_deletes_no_timer_of_another(tmp_path: Path) -> None:
    """RocketMQ 5.5 compares the id only. An earlier version stored markers that clients had sent."""
    with open_broker(tmp_path / "store") as broker:
        for topic in ("mine", "theirs"):
            broker.create_topic(topic, 1)
        due_ms = broker.clock.now_ms() + 10_000
        for topic in ("mine", "theirs"):
            delayed = {"TIMER_DELIVER_MS": str(due_ms), "UNIQ_KEY": "0A0B"}
            broker.sends.send(Message(topic, b"delayed", delayed))
        out_ms = str(due_ms // 1_000 * 1_000 - 1_000)
        for key in ("0A0B", "theirs+0A0B"):
            marker = {"TIMER_DEL_UNIQKEY": key, "TIMER_DELIVER_MS": str(due_ms), "TIMER_OUT_MS": out_ms}
            put(broker, TIMER_TOPIC, marker | {"REAL_TOPIC": "mine", "REAL_QID": "0", "UNIQ_KEY": "0C"}, sys_flag=0)

        pending = [each.topic for each in broker.delayed.pending(PendingQuery(), 100).messages]
        assert isinstance(broker.clock, VirtualClock)
        for _ in range(12):
            broker.clock.move_ms(1_000)
            for service in broker.services():
                service.step()

        assert pending == ["theirs"]
        ends = broker.store.topic_ends()
        assert (ends["mine"], ends["theirs"]) == (0, 1)
