"""A consume queue's file may be made before its first unit comes; RocketMQ must not take it for one with a unit."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqtemplate.store.layout import CQ_UNIT_SIZE, NO_UNIT_YET, unpack_cq_unit
from tests.store.small_store import OpenStore, bodies, draft, kill


def first_unit(path: Path, file_start: int = 0) -> bytes:
    return (path / f"consumequeue/orders/0/{file_start:020d}").read_bytes()[:CQ_UNIT_SIZE]


def test_a_file_made_ahead_begins_with_a_unit_that_points_behind_every_log(
    open_store: OpenStore, tmp_path: Path
) -> None:
    """RocketMQ takes what stands there for a unit, even zeros, and would count the queue's first message as its second;
    a file that begins behind the log's end it drops."""
    store = open_store()

    store.prepare("orders", 0)

    assert first_unit(tmp_path) == NO_UNIT_YET
    assert unpack_cq_unit(NO_UNIT_YET) == ((1 << 63) - 1, 0, 0)


@pytest.mark.parametrize("count", [0, 10])
@pytest.mark.parametrize("was_killed", [False, True])
def test_a_queue_goes_on_in_a_file_that_was_made_ahead(
    open_store: OpenStore, tmp_path: Path, count: int, was_killed: bool
) -> None:
    """Its first file, or the one behind a full one, after a clean end and after a kill."""
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
