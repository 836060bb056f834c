"""Sequenced sends of the embedded broker: the table of numbers, its file, kills and power loss."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from pathlib import Path

import pytest

from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import VirtualClock
from mqtemplate.engine.sequences import SequenceTable
from mqtemplate.errors import MessageError, SendError
from mqtemplate.message import Message, MessageQueue, Property, SendSequence
from mqtemplate.store.files.folder_store_files import FolderStoreFiles
from mqtemplate.testing import messages_in
from tests.store.power_loss_disk import PowerLossDisk, subsets, write_image

QUEUE = MessageQueue("orders", "broker-a", 0)
SMALL = EmbeddedSettings(
    mapped_file_size_commit_log=1 << 14,
    mapped_file_size_consume_queue=2_000,
    max_message_size=1 << 12,
    default_topic_queue_nums=1,
    max_hash_slot_num=50,
    max_index_num=200,
)


def numbered(first: int, count: int) -> list[tuple[Message, MessageQueue]]:
    return [(Message("orders", b"%d" % number), QUEUE) for number in range(first, first + count)]


# --- the table --------------------------------------------------------------------------------------


def test_the_table_never_goes_back() -> None:
    """A record may be replayed twice, and a copy of an old message is stored after newer ones."""
    table = SequenceTable(10)
    table.advance("query", 1, 0, 5, 0)
    table.advance("query", 1, 0, 3, 0)
    table.advance("query", 0, 0, 9, 0)

    assert table.count_repeated(SendSequence("query", 1, 0, 0), 10) == 5
    assert table.count_repeated(SendSequence("query", 1, 0, 2), 2) == 2


def test_the_table_is_bounded_and_forgets_the_application_that_is_unused_for_the_longest_time() -> None:
    table = SequenceTable(2)
    for now_ms, app_id in enumerate(["old", "newer", "newest"]):
        table.advance(app_id, 0, 0, 5, now_ms)

    assert len(table) == 2
    assert table.count_repeated(SendSequence("old", 0, 0, 0), 5) == 0
    assert table.count_repeated(SendSequence("newer", 0, 0, 0), 5) == 5


def test_one_application_may_have_more_partitions_than_the_bound() -> None:
    """Forgetting partitions of the version that is being written would store messages twice."""
    table = SequenceTable(2)
    for partition in range(5):
        table.advance("query", 0, partition, 1, 0)

    assert len(table) == 5


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("", 0, 0, 0), "app_id must have 1..255 printable characters without spaces, got ''"),
        (("a b", 0, 0, 0), "app_id must have 1..255 printable characters without spaces, got 'a b'"),
        (("a", -1, 0, 0), "version of a sequenced send must be 0..9223372036854775807, got -1"),
        (("a", 0, 2**31, 0), "partition of a sequenced send must be 0..2147483647, got 2147483648"),
        (("a", 0, 0, -1), "first of a sequenced send must be 0..9223372036854775807, got -1"),
    ],
)
def test_a_sequence_with_another_value_is_refused(arguments: tuple[str, int, int, int], reason: str) -> None:
    with pytest.raises(MessageError, match=f"^{reason}"):
        SendSequence(*arguments)


# --- the broker -------------------------------------------------------------------------------------


def test_a_stored_message_has_its_number_as_a_property(tmp_path: Path) -> None:
    """Consumers of any client can recognise repeats by it."""
    with EmbeddedBroker(tmp_path, clock=VirtualClock()) as broker:
        broker.send_sequenced(numbered(0, 2), SendSequence("query", 7, 3))

        assert [each.properties[Property.SEQUENCE] for each in messages_in(broker, "orders")] == [
            "query 7 3 0",
            "query 7 3 1",
        ]


def test_an_invalid_message_stores_none_of_its_send(tmp_path: Path) -> None:
    too_large = (Message("orders", bytes(5_000)), QUEUE)
    with EmbeddedBroker(tmp_path, SMALL, VirtualClock()) as broker:
        with pytest.raises(MessageError, match="allowed are 4096"):
            broker.send_sequenced([*numbered(0, 1), too_large], SendSequence("query", 0, 0))

        assert messages_in(broker, "orders") == []


def test_ordinary_sends_write_no_table(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path, clock=VirtualClock()) as broker:
        broker.send(Message("orders", b"x"))

    assert not (tmp_path / "config" / "sendSequences.json").exists()


def test_the_table_is_written_with_the_checkpoint(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path, clock=VirtualClock()) as broker:
        broker.send_sequenced(numbered(0, 3), SendSequence("query", 1, 0))

    table = json.loads((tmp_path / "config" / "sendSequences.json").read_text())
    assert table["applications"]["query"]["version"] == 1
    assert table["applications"]["query"]["next"] == {"0": 3}


def test_more_messages_than_a_log_file_holds_are_stored_in_order(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path, SMALL, VirtualClock()) as broker:
        broker.send_sequenced(numbered(0, 500), SendSequence("query", 0, 0))

        assert [int(each.body) for each in messages_in(broker, "orders")] == list(range(500))


def test_a_gap_names_the_next_number(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path, clock=VirtualClock()) as broker:
        broker.send_sequenced(numbered(0, 2), SendSequence("query", 1, 0))
        with pytest.raises(SendError, match="partition 0 of 'query', version 1: the next number is 2, got 5"):
            broker.send_sequenced(numbered(5, 1), SendSequence("query", 1, 0, 5))


def test_a_power_loss_at_any_moment_stores_each_message_once(tmp_path: Path) -> None:
    """Before each call of the disk: any part of the unflushed data is lost, and the send is repeated from number 0."""
    disk = PowerLossDisk(_folder(tmp_path), sector=512)
    broker = EmbeddedBroker(
        settings=SMALL, clock=VirtualClock(), store_files=FolderStoreFiles(tmp_path / "store", disk)
    )
    broker.start()
    chance, problems, checking, images = random.Random(4466), [], [False], itertools.count()

    def check() -> None:
        if checking[0]:
            return
        checking[0] = True
        contents = disk.contents()
        for chosen in subsets(disk.choices(contents), chance, 3):
            folder = tmp_path / f"image-{next(images)}"
            write_image(disk.image(contents, chosen), folder)
            problems.extend(_problems_after_repeat(folder))
        checking[0] = False

    disk.on_event = check
    for first in range(0, 60, 20):
        broker.send_sequenced(
            [(Message("orders", b"%d" % n + b" " * 200), QUEUE) for n in range(first, first + 20)],
            SendSequence("query", 0, 0, first),
        )
        broker.store.take_checkpoint()
    disk.on_event = lambda: None
    broker.close()

    assert problems == []
    assert next(images) > 30


def _folder(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    return tmp_path / "store"


def _problems_after_repeat(folder: Path) -> list[str]:
    with EmbeddedBroker(folder, SMALL, VirtualClock()) as broker:
        messages = [(Message("orders", b"%d" % n), QUEUE) for n in range(60)]
        broker.send_sequenced(messages, SendSequence("query", 0, 0))
        counts = Counter(int(message.body) for message in messages_in(broker, "orders"))
    wrong = {number: counts[number] for number in range(60) if counts[number] != 1}
    return [f"{folder.name}: number -> copies: {wrong}"] if wrong else []
