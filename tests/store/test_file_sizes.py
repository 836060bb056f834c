"""Sizes of files: taken from the store directory. Settings that contradict it are refused."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import VirtualClock
from mqtemplate.errors import StoreFormatError
from mqtemplate.message import Message, MessageExt
from mqtemplate.pending import PendingQuery

UNUSUAL = {
    "mapped_file_size_commit_log": 50_000,
    "mapped_file_size_consume_queue": 1_240,
    "mapped_file_size_timer_log": 700,
    "max_hash_slot_num": 77,
    "max_index_num": 400,
}
"""Sizes that are not defaults, here or in RocketMQ."""

OpenBroker = Callable[..., EmbeddedBroker]


@pytest.fixture
def open_broker(tmp_path: Path) -> Iterator[OpenBroker]:
    """Function that opens a broker in one folder with some settings; it closes the one before."""
    clock, brokers = VirtualClock(), list[EmbeddedBroker]()

    def open_(**settings: object) -> EmbeddedBroker:
        for broker in brokers:
            broker.close()
        brokers.append(EmbeddedBroker(tmp_path / "store", EmbeddedSettings(**settings), clock))  # type: ignore[arg-type]
        brokers[-1].start()
        return brokers[-1]

    yield open_
    for broker in brokers:
        broker.close()


def send(broker: EmbeddedBroker, count: int = 150) -> None:
    for number in range(count):
        delay = {"TIMER_DELAY_SEC": str(60 + number)} if number % 3 == 0 else {}
        broker.sends.send(Message("orders", b"%04d" % number + bytes(500), {"KEYS": f"k{number}", **delay}))
        if number % 50 == 0:
            for service in broker.services():
                service.step()


def stored(broker: EmbeddedBroker) -> list[bytes]:
    messages: list[MessageExt] = []
    for queue in broker.queues("orders"):
        for at in range(broker.reader.min_offset(queue), broker.reader.max_offset(queue)):
            messages += broker.reader.pull(queue, at, 1).messages
    return sorted(message.body[:4] for message in messages)


def sizes(broker: EmbeddedBroker) -> dict[str, int]:
    return {
        "mapped_file_size_commit_log": broker.store.sizes.commit_log,
        "mapped_file_size_consume_queue": broker.store.sizes.consume_queue,
        "mapped_file_size_timer_log": broker.engine.delayed.timers.log_file_size,
        "max_hash_slot_num": broker.store.index.geometry.slots,
        "max_index_num": broker.store.index.geometry.units,
    }


# --- taken from the directory ---------------------------------------------------------------------


def test_all_sizes_are_taken_from_the_directory(open_broker: OpenBroker) -> None:
    """Also without what mqtemplate noted there: RocketMQ notes nothing."""
    broker = open_broker(**UNUSUAL)
    send(broker)
    expected = stored(broker)
    broker.close()
    page = broker.path / "checkpoint"  # type: ignore[operator]
    page.write_bytes(page.read_bytes()[:64] + bytes(4_032))

    broker = open_broker()

    assert sizes(broker) == UNUSUAL
    assert stored(broker) == expected
    assert broker.delayed.pending(PendingQuery(topic="orders")).messages[0].keys == "k0"
    assert [message.body[:4] for message in broker.reader.messages_by_key("orders", "k100")] == [b"0100"]
    send(broker)
    assert len(stored(broker)) == 2 * len(expected)
    broker.close()
    shutil.rmtree(broker.path / "consumequeue")  # type: ignore[operator]  # rebuilt with the same size
    assert sizes(open_broker()) == UNUSUAL


def test_a_new_directory_has_the_documented_sizes(open_broker: OpenBroker) -> None:
    broker = open_broker()

    assert list(sizes(broker).values()) == [67_108_864, 600_000, 4_194_304, 250_000, 1_000_000]


# --- refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(UNUSUAL))
def test_a_size_that_is_set_and_that_the_directory_does_not_have_is_refused(open_broker: OpenBroker, name: str) -> None:
    """The error says that it may be left out."""
    broker = open_broker(**UNUSUAL)
    send(broker)

    with pytest.raises(StoreFormatError, match=rf"{name.replace('_', '-')}.* leave .*out"):
        open_broker(**{name: UNUSUAL[name] * 2})

    assert sizes(open_broker(**UNUSUAL)) == UNUSUAL, "sizes that the directory has may be set"


@pytest.mark.parametrize(
    ("settings", "number", "left", "error"),
    [
        # It is not taken for a file of another size: the size is noted in the checkpoint.
        pytest.param({}, 0, 40_000_000, "has 40000000 bytes, .* say 67108864, so it was cut", id="a single file"),
        pytest.param(UNUSUAL, 0, 30_000, r"0{20} has 30000 bytes, .* say 50000, so it was cut", id="among others"),
        pytest.param(UNUSUAL, 1, None, "a file is missing between", id="missing"),
    ],
)
def test_a_file_that_was_cut_or_is_missing_is_refused(
    open_broker: OpenBroker, settings: dict[str, int], number: int, left: int | None, error: str
) -> None:
    broker = open_broker(**settings)
    send(broker)
    broker.close()
    path = sorted((broker.path / "commitlog").iterdir())[number]  # type: ignore[operator]
    path.unlink() if left is None else os.truncate(path, left)

    with pytest.raises(StoreFormatError, match=error):
        open_broker()

    assert left is None or path.stat().st_size == left
