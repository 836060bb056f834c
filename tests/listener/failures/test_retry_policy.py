"""Retry policy of a listener: jitter, and delays that are refused. The scripts of ``tests/listener`` have the rest."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from mqtemplate import Backoff, RetryLater
from mqtemplate.listener import message_listener

if TYPE_CHECKING:
    from tests.listener.conftest import App


def test_jitter_spreads_the_delays_and_exceeds_no_maximum(app: App) -> None:
    tries: list[int] = []
    retry = Backoff("10s", factor=1, maximum="10500ms", jitter=0.1, attempts=50)

    @message_listener(topic="orders", consumer_group="billing", retry=retry)
    def bill(message: str) -> None:
        tries.append(app.broker.clock.now_ms())
        raise RuntimeError("no")

    app.listen(bill)
    app.send("orders", "bad")
    app.advance("1h")

    delays = [later - at for at, later in pairwise(tries)]
    assert len(delays) == 49
    assert all(9_000 <= delay <= 10_500 for delay in delays)
    assert len(set(delays)) > 10


@pytest.mark.parametrize("delay", ["soon", "-1s", -1, "41d", float("nan"), True, ""])
def test_a_delay_that_is_none_is_refused_with_the_allowed_forms(delay: Any) -> None:
    with pytest.raises(ValueError, match=r"delay must be (a duration: '3h', .*|0 or longer|40d or shorter)[;,] got "):
        RetryLater(delay)
