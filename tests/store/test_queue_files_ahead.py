"""A consume queue file may be created before its first unit. RocketMQ must not count the empty file as one unit."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqtemplate.store.layout import CQ_UNIT_SIZE, NO_UNIT_YET, unpack_cq_unit
from tests.store.small_store import OpenStore, bodies, draft, kill


def first_unit(path: Path, file_start: int = 0) -> bytes:
    return (path / f"consumequeue/orders/0/{file_start:020d}").read_bytes()[:CQ_UNIT_SIZE]


def test_a_queue_file_created_ahead_starts_with_a_unit_past_every_log(open_store: OpenStore, tmp_path: Path) -> None:
    """RocketMQ takes the first bytes for a unit, even zeros, and would count the first message as the second. It drops
    a file whose first unit points past the end of the log."""
    store = open_store()

    store.prepare("orders", 0)

    assert first_unit(tmp_path) == NO_UNIT_YET
    assert unpack_cq_unit(NO_UNIT_YET) == ((1 << 63) - 1, 0, 0)


@pytest.mark.parametrize("count", [0, 10])
@pytest.mark.parametrize("was_killed", [False, True])
def test_a_queue_continues_in_a_file_that_was_created_ahead(
    open_store: OpenStore, tmp_path: Path, count: int, was_killed: bool
) -> None:
    """The first file, or the one after a full one; after a clean stop and after a kill."""
    store = open_store()
    for number in range(count):
        store.put(draft(b"%d" % number))
    store.prepare("orders", 0)
    assert first_unit(tmp_path, count * CQ_UNIT_SIZE) == NO_UNIT_YET

    if was_killed:
        kill(store)
    else:
        store.close()
    again = open_store()
    again.confirm(again.put(draft(b"next")).end, ["orders"])

    assert again.consume_queue("orders", 0).max_offset == count + 1
    assert bodies(again) == [*(b"%d" % number for number in range(count)), b"next"]
