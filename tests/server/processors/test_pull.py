"""Pulling: the records in a response. `scripts/` has the response codes, offsets, limits and selections."""

from __future__ import annotations

from structlog.testing import capture_logs

from mqtemplate.broker import ConsumerSpec
from mqtemplate.brokers import EmbeddedSettings
from mqtemplate.message import Message
from mqtemplate.record.codec import parse_record, without_check
from mqtemplate.record.layout import CHECK_NAME
from mqtemplate.record.properties import decode_properties
from mqtemplate.remoting.protocol import RemotingCommand, ResponseCode
from mqtemplate.remoting.protocol.codes import PullSysFlag
from mqtemplate.remoting.protocol.headers.message import PullMessageResponseHeader
from mqtemplate.remoting.protocol.messages import decode_messages
from mqtemplate.selectors.tags import TagSelector
from mqtemplate.store.settings import FlushDiskType
from tests.server.serving import Serving

OWN = PullSysFlag.SUBSCRIPTION


def bodies(response: RemotingCommand | None) -> list[bytes]:
    assert response is not None
    return [message.body for message in decode_messages(response.body, "broker-a")]


def numbers(response: RemotingCommand | None) -> tuple[int, int, int, int, int]:
    """Return the code, the next, minimum and maximum offset, and the suggested broker."""
    assert response is not None
    header = response.header(PullMessageResponseHeader)
    return (
        response.code,
        header.next_begin_offset,
        header.min_offset,
        header.max_offset,
        header.suggest_which_broker_id,
    )


def test_records_are_returned_as_they_are_stored_without_our_checksum(serving: Serving) -> None:
    """Applications would see a property that the producer did not send."""
    serving.send("orders", b"paid", {"TAGS": "t"})

    response = serving.pull_all("orders")

    assert CHECK_NAME.encode() not in response.body
    (message,) = decode_messages(response.body, "broker-a")
    stored = serving.engine.store.read_at(message.physical_offset)
    assert stored is not None
    assert message.store_size == len(response.body) == stored.total_size - 24
    assert message.properties == decode_properties(stored.properties_bytes)


def test_a_record_without_our_checksum_is_returned_unchanged(serving: Serving) -> None:
    """Another broker may have written records to this store."""
    serving.send("orders", b"paid", {"TAGS": "t"})
    bare = serving.pull_all("orders").body

    assert without_check(bare, parse_record(bare)) == bare


def test_a_corrupt_record_is_skipped(serving: Serving) -> None:
    """A Java client could not decode the records after it."""
    for body in (b"one", b"two", b"three"):
        serving.send("orders", body)
    corrupt(serving, 1)

    with capture_logs() as logs:
        response = serving.pull_all("orders")

    assert (bodies(response), numbers(response)[1]) == ([b"one", b"three"], 3)
    (entry,) = [line for line in logs if line["event"] == "pull.record_corrupt"]
    assert (entry["topic"], entry["queue"], entry["offset"]) == ("orders", 0, 1)
    assert "CRC-32" in entry["reason"]


def corrupt(serving: Serving, queue_offset: int) -> None:
    """Change one byte of a message's body."""
    store = serving.engine.store
    unit = store.consume_queue("orders", 0).unit(queue_offset)
    found = store._commit_log.files.find(unit.physical_offset)
    assert found is not None
    file, start = found
    file.view[unit.physical_offset - start + 88] ^= 0xFF


def test_units_without_a_message_are_not_corrupt(serving: Serving) -> None:
    """The schedule queue has a mark instead of a message that was cancelled."""
    serving.send("orders", b"cancelled", {"DELAY": "1"})
    serving.advance(2_000)
    queue = serving.engine.store.consume_queue("SCHEDULE_TOPIC_XXXX", 0)
    queue.mark_done(0)

    with capture_logs() as logs:
        response = serving.pull_all("SCHEDULE_TOPIC_XXXX")

    assert numbers(response)[:2] == (ResponseCode.PULL_RETRY_IMMEDIATELY, 1)
    assert [line for line in logs if line["log_level"] == "error"] == []


def test_a_message_is_not_readable_before_it_is_durable() -> None:
    """With SYNC_FLUSH a message becomes readable when it is on disk."""
    with Serving(engine_settings=EmbeddedSettings(flush_disk_type=FlushDiskType.SYNC_FLUSH)) as serving:
        serving.send("orders")
        draft, _ = serving.engine.engine.drafts.make(Message("orders", b"unsafe"), 0, serving.clock.now_ms())
        serving.engine.store.put(draft)

        response = serving.pull_all("orders")

    assert numbers(response) == (ResponseCode.SUCCESS, 1, 0, 1, 0)


def test_a_pull_is_refused_while_the_group_has_listeners_by_pop_in_this_process(serving: Serving) -> None:
    """They do not hide their messages from pulls. A pull that was checked before is checked again."""
    serving.send("orders", b"a")
    assert bodies(serving.pull("billing", "orders", sys_flag=OWN)) == [b"a"]
    member = serving.engine.pop.join(ConsumerSpec(group="billing", subscriptions={"orders": TagSelector("*")}))

    refused = serving.pull("billing", "orders", sys_flag=OWN)

    assert refused is not None
    assert refused.code == ResponseCode.NO_PERMISSION
    assert (refused.remark or "").startswith(
        "group 'billing' has listeners in the broker's own process that receive by POP: each message would be handled "
    )
    member.close()
    assert bodies(serving.pull("billing", "orders", sys_flag=OWN)) == [b"a"]
