"""Search for messages in the embedded broker, beyond the contract: corrupt files, retention and flush mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import VirtualClock
from mqtemplate.errors import BrokerClosedError, CorruptRecordError, MessageError
from mqtemplate.message import HostAddress, Message, Property, offset_msg_id
from mqtemplate.record.codec import RecordDraft
from mqtemplate.results import SendResult
from mqtemplate.testing import Harness

SMALL = EmbeddedSettings(
    mapped_file_size_commit_log=4_096,
    mapped_file_size_consume_queue=2_000,
    max_message_size=2_000,
    max_hash_slot_num=50,
    max_index_num=200,
)
IPV6 = HostAddress("2001:db8::7", 10911)

OpenBroker = Callable[..., EmbeddedBroker]


@pytest.fixture
def open_broker(tmp_path: Path) -> Iterator[OpenBroker]:
    """Return a function that opens a broker in ``tmp_path``. All brokers are closed at the end."""
    brokers: list[EmbeddedBroker] = []
    clock = VirtualClock()

    def open_(**changes: object) -> EmbeddedBroker:
        settings = {name: getattr(SMALL, name) for name in EmbeddedSettings.__dataclass_fields__}
        broker = EmbeddedBroker(tmp_path, EmbeddedSettings(**(settings | changes)), clock)
        broker.start()
        brokers.append(broker)
        return broker

    yield open_
    for broker in brokers:
        broker.close()


@pytest.fixture
def broker(open_broker: OpenBroker) -> EmbeddedBroker:
    return open_broker()


def send(broker: EmbeddedBroker, body: str, keys: str = "4466", **properties: str) -> SendResult:
    return broker.sends.send(Message("orders", body.encode(), {Property.KEYS: keys, **properties}))


def bodies(broker: EmbeddedBroker, key: str = "4466") -> list[str]:
    return [message.body.decode() for message in broker.reader.messages_by_key("orders", key)]


def physical_offset(result: SendResult) -> int:
    return int(result.offset_msg_id[-16:], 16)


def flip(folder: Path, physical_offset: int) -> None:
    """Change one byte of the log while the broker runs. The memory map shows the change."""
    file = folder / "commitlog" / f"{physical_offset - physical_offset % 4_096:020d}"
    with file.open("r+b") as log:
        log.seek(physical_offset % 4_096)
        [byte] = log.read(1)
        log.seek(physical_offset % 4_096)
        log.write(bytes([byte ^ 0x41]))


# --- by id -------------------------------------------------------------------------------------


def test_an_id_may_contain_an_ipv6_address(open_broker: OpenBroker) -> None:
    broker = open_broker(listen_host=IPV6)
    sent = send(broker, "far away")

    message = broker.reader.message_by_id(sent.offset_msg_id)

    assert len(sent.offset_msg_id) == 56
    assert message is not None
    assert (message.body, message.store_host) == (b"far away", IPV6)
    assert broker.reader.message_by_id(sent.offset_msg_id.lower()) == message


def test_an_id_is_valid_after_the_broker_got_another_address(open_broker: OpenBroker) -> None:
    """The id was created in this store directory, by the broker with the old address."""
    first = open_broker()
    old = send(first, "old")
    first.close()
    broker = open_broker(listen_host=IPV6)

    message = broker.reader.message_by_id(old.offset_msg_id)

    assert message is not None
    assert message.body == b"old"


def test_an_id_with_the_address_of_another_broker_is_refused(
    broker: EmbeddedBroker,
) -> None:
    sent = send(broker, "here")

    for offset in (physical_offset(sent), 1 << 40):
        with pytest.raises(
            MessageError, match=r"created by the broker at \[2001:db8::7\]:10911; this broker is at 127.0.0.1"
        ):
            broker.reader.message_by_id(offset_msg_id(IPV6, offset))


@pytest.mark.parametrize("at", [0, 5, 30, 37, 90, -3])
def test_a_corrupt_message_is_reported_with_file_and_offset(broker: EmbeddedBroker, tmp_path: Path, at: int) -> None:
    """With damage anywhere in the record, also in its header. The message is not reported as missing."""
    send(broker, "before")
    sent = send(broker, "damaged")
    after = send(broker, "after")
    flip(tmp_path, (physical_offset(sent) if at >= 0 else physical_offset(after)) + at)

    with pytest.raises(
        CorruptRecordError, match=rf"^{0:020d}: bad record at physical offset {physical_offset(sent)}: "
    ):
        broker.reader.message_by_id(sent.offset_msg_id)

    assert broker.reader.message_by_id(after.offset_msg_id) is not None


def test_an_offset_inside_a_message_has_no_message(broker: EmbeddedBroker, tmp_path: Path) -> None:
    damaged = send(broker, "damaged")
    sent = send(broker, "whole")
    flip(tmp_path, physical_offset(damaged) + 2)

    assert broker.reader.message_by_id(offset_msg_id(SMALL.listen_host, physical_offset(sent) + 4)) is None
    assert broker.reader.message_by_id(sent.offset_msg_id) is not None


def test_a_message_whose_file_was_deleted_is_not_found(broker: EmbeddedBroker) -> None:
    old = send(broker, "x" * 1_500)
    for _ in range(6):
        send(broker, "x" * 1_500)
    newest = send(broker, "newest")

    broker.store.delete_before(physical_offset(newest))

    assert broker.store.start_offset > physical_offset(old)
    assert broker.reader.message_by_id(old.offset_msg_id) is None
    assert broker.reader.message_by_id(newest.offset_msg_id) is not None


# --- by key ------------------------------------------------------------------------------------


def test_a_message_is_not_found_before_it_is_flushed(broker: EmbeddedBroker) -> None:
    """With SYNC_FLUSH a message that could still be lost is not visible, as in a pull."""
    broker.create_topic("orders", 1)
    put = broker.store.put(RecordDraft("orders", 0, b"not flushed", b"KEYS\x014466\x02"))
    message_id = offset_msg_id(SMALL.listen_host, put.physical_offset)

    before = (bodies(broker), broker.reader.message_by_id(message_id))
    broker.store.confirm(put.end, ["orders"])
    after = broker.reader.message_by_id(message_id)

    assert before == ([], None)
    assert bodies(broker) == ["not flushed"]
    assert after is not None


def test_a_search_by_key_logs_a_corrupt_message_and_finds_the_others(broker: EmbeddedBroker, tmp_path: Path) -> None:
    sent = [send(broker, body) for body in ("first", "damaged", "last")]
    assert len(bodies(broker)) == 3
    flip(tmp_path, physical_offset(sent[1]) + 90)

    with capture_logs() as logs:
        found = bodies(broker)

    assert found == ["last", "first"]
    [line] = [line for line in logs if line["event"] == "broker.record_skipped"]
    assert (line["file"], line["physical_offset"]) == (f"{0:020d}", physical_offset(sent[1]))


def test_a_search_by_key_returns_at_most_max_count_messages(broker: EmbeddedBroker) -> None:
    """From several index files, and with other keys that have the same hash code."""
    for number in range(600):
        send(broker, str(number), "BB" if number % 3 else "Aa")

    found = broker.reader.messages_by_key("orders", "BB", 250)
    everything = broker.reader.messages_by_key("orders", "Aa", 1_000)

    assert [int(message.body) for message in found] == [number for number in range(599, -1, -1) if number % 3][:250]
    assert [int(message.body) for message in everything] == list(range(597, -1, -3))


def test_a_delayed_message_is_found_under_its_system_topic(broker: EmbeddedBroker) -> None:
    """As in RocketMQ. It is found under its real topic once it is delivered."""
    harness = Harness(broker)
    sent = send(broker, "later", **{Property.DELAY: "1"})

    pending = broker.reader.messages_by_key("SCHEDULE_TOPIC_XXXX", "4466")
    by_id = broker.reader.message_by_id(sent.offset_msg_id)
    before = bodies(broker)
    harness.advance("1s")

    assert by_id == pending[0]
    assert before == []
    assert bodies(broker) == ["later"]


def test_a_search_by_key_finds_the_messages_that_retention_kept(broker: EmbeddedBroker) -> None:
    for number in range(9):
        send(broker, f"{number}" + "x" * 1_200)
    newest = send(broker, "newest")

    broker.store.delete_before(physical_offset(newest))
    kept = [body.strip("x") for body in bodies(broker)]

    assert kept[0] == "newest"
    assert 1 < len(kept) < 10
    assert kept[1:] == [str(number) for number in range(8, 9 - len(kept), -1)]


def test_a_closed_broker_finds_nothing(broker: EmbeddedBroker) -> None:
    broker.close()

    with pytest.raises(BrokerClosedError):
        broker.reader.messages_by_key("orders", "4466")
    with pytest.raises(BrokerClosedError):
        broker.reader.message_by_id("0" * 32)
