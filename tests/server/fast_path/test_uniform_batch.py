"""Batches that are read as rows: stored as if each message had been read alone."""

from __future__ import annotations

import random

import pytest

from mqtemplate.message import Message
from mqtemplate.record.codec import StoredRecord
from mqtemplate.remoting.protocol.messages import encode_batch, join_in_batch
from mqtemplate.server.processors.sends import alike_messages
from mqtemplate.server.processors.sends.alike_messages import read_alike
from mqtemplate.server.processors.sends.sent_properties import SentProperties
from tests.server.processors.run_serving import answers, known_producer, records, send, serving


@pytest.fixture
def properties() -> SentProperties:
    return SentProperties({"CLUSTER": "DefaultCluster"})


def batch(count: int = 8, **properties: str) -> list[Message]:
    return [Message("orders", b"%08d" % number, {"UNIQ_KEY": f"A{number:03}", **properties}) for number in range(count)]


def test_messages_that_differ_in_body_and_id_are_alike(properties: SentProperties) -> None:
    alike = read_alike(encode_batch(batch(TAGS="paid")), properties)

    assert alike is not None
    assert alike.sent_batch("orders", 0, 0, 0, bytes(8), 0).msg_ids() == b"A000,A001,A002,A003,A004,A005,A006,A007"
    assert [bytes(row) for row in alike.bodies] == [b"%08d" % number for number in range(8)]
    assert alike.properties.encoded[alike.id_at :].startswith(b"A000\x02")


ALIKE = encode_batch(batch())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        bytes(10),
        ALIKE[:-1],
        ALIKE + b"x",
        encode_batch(batch(7)),
        encode_batch([*batch(), Message("orders", b"longer than the others", {"UNIQ_KEY": "A009"})]),
        encode_batch([*batch(), Message("orders", b"12345678", {"UNIQ_KEY": "A-09"})]),
        encode_batch([*batch(), Message("orders", b"12345678", {"UNIQ_KEZ": "A009"})]),
        encode_batch([*batch(), Message("orders", b"12345678", {"UNIQ_KEY": "A009"}, flag=1)]),
        encode_batch(batch(DELAY="3")),
        encode_batch(batch(KEYS="A000")),
        encode_batch([Message("orders", b"12345678", {"TAGS": "a"})] * 8),
        join_in_batch(b"12345678", b"UNIQ_KEY\x01A000\x02", 0).replace(b"\0\x0e", b"\0\x0d") * 8,
        (b"\xff\xff\xff\xff" + bytes(40)) * 8,
        (b"\0\0\0\x16" + bytes(12) + b"\xff\xff\xff\xff" + bytes(2)) * 8,
    ],
)
def test_other_batches_are_read_message_by_message(properties: SentProperties, data: bytes) -> None:
    assert read_alike(data, properties) is None


def test_a_large_batch_is_read_message_by_message(properties: SentProperties) -> None:
    """The interpreter lock is free between its messages, so other clients do not wait for all of it."""
    of_64 = encode_batch([Message("orders", bytes(4_000), {"UNIQ_KEY": f"A{number:03}"}) for number in range(64)])

    assert read_alike(of_64, properties) is not None
    assert read_alike(of_64 + of_64[: len(of_64) // 64 * 2], properties) is None


def random_batch(chance: random.Random, number: int) -> bytes:
    size, count = chance.choice([0, 5, 100]), chance.randrange(1, 40)
    same = chance.choice([{}, {"TAGS": "a"}, {"KEYS": "one two"}, {"DELAY": "2"}, {"WAIT": "true", "city": "Ulm"}])
    return encode_batch(
        [
            Message(
                "orders",
                chance.randbytes(size if chance.random() < 0.98 else size + 1),
                {"UNIQ_KEY": f"B{number:03}{each:03}", **same},
                flag=int(chance.random() < 0.01),
            )
            for each in range(count)
        ]
    )


def stored_of(bodies: list[bytes]) -> tuple[object, list[StoredRecord]]:
    with serving(mapped_file_size_commit_log=40_000) as server, known_producer(server) as peer:
        frames = [send(10 + number, body, queue_id=number % 4, batch=True) for number, body in enumerate(bodies)]
        peer.send(b"".join(frames))
        responses = answers(peer, len(frames))
        queues = [server.engine.store.consume_queue("orders", queue_id) for queue_id in range(4)]
        units = [queue.unit_tuples(0, queue.max_offset) for queue in queues]
        return (responses, units), records(server)


@pytest.mark.parametrize("seed", range(3))
def test_rows_are_stored_and_answered_as_single_messages(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a batch does not fit into the rest of a file of the log."""
    chance = random.Random(seed)
    bodies = [random_batch(chance, number) for number in range(60)]
    found = []
    for fewest in (2, 1_000_000):
        monkeypatch.setattr(alike_messages, "_FEWEST", fewest)
        found.append(stored_of(bodies))

    assert found[0] == found[1]
    assert len(found[0][1]) > 500
