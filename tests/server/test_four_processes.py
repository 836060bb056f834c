"""An application of four processes on our server: each has control over the delayed messages of the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import permutations
from pathlib import Path

import pytest

from tests.server.process import BrokerProcess
from tests.server.shop_process import ShopProcess
from tests.waiting import eventually

COUNT = 4


@pytest.fixture
def shops(tmp_path: Path) -> Iterator[list[ShopProcess]]:
    with ExitStack() as stack:
        broker = stack.enter_context(BrokerProcess(tmp_path))
        shops = [stack.enter_context(ShopProcess(broker.name_server)) for _ in range(COUNT)]
        for shop in shops:
            shop.wait_until_ready()
        yield shops


def test_any_process_cancels_what_another_one_sent(shops: list[ShopProcess]) -> None:
    """By handle and by key. All of them see the same pending messages."""
    pairs = list(permutations(range(COUNT), 2))
    handles = {pair: shops[pair[0]].ask("send", f"key-{pair[0]}-{pair[1]}") for pair in pairs}
    kept = shops[0].ask("send", "kept")
    assert [shop.ask("count") for shop in shops] == [len(pairs) + 1] * COUNT

    statuses = []
    for sender, canceller in pairs:
        if (sender + canceller) % 2:
            statuses.append(shops[canceller].ask("cancel", handles[sender, canceller]))
        else:
            statuses.append(shops[canceller].ask("cancel_key", f"key-{sender}-{canceller}"))

    assert statuses == ["CANCELLED"] * len(pairs)
    assert [shop.ask("pending") for shop in shops] == [["kept"]] * COUNT
    assert shops[3].ask("deliver_now", kept) == "RESCHEDULED"
    eventually(lambda: sum((shop.ask("received") for shop in shops), []) == ["kept"], "one process receives it")
    assert shops[1].ask("cancel", kept) == "ALREADY_DELIVERED"
