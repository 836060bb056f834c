"""Selectors of pulls: expressions of clients are compiled once, elsewhere if they are long, and cached with a limit."""

from __future__ import annotations

import pytest

from mqtemplate.clock import VirtualClock
from mqtemplate.engine.clients import ClientRegistry
from mqtemplate.remoting.protocol import ResponseCode
from mqtemplate.remoting.protocol.codes import PullSysFlag
from mqtemplate.server import BrokerServerSettings
from mqtemplate.server.pulls.pull_checks import Subscriptions
from mqtemplate.server.requests.deferred_work import DeferredWork
from mqtemplate.server.requests.refusal import RefusedError
from tests.server.serving import Serving


def subscriptions(*limit: int) -> Subscriptions:
    return Subscriptions(ClientRegistry(VirtualClock()), BrokerServerSettings(), *limit)


def test_the_cache_has_a_limit_of_text() -> None:
    """It had 4,096 entries of any length: 128 MB of text, and more of compiled expressions."""
    cache = subscriptions(10_000)
    for number in range(100):
        cache.compile("SQL92", f"a = {number} OR b = '{'x' * 1_000}'")
        cache.compile("TAG", f"tag-{number}")

    assert 3 < len(cache) < 16
    assert cache.find(("TAG", "tag-99")) is not None
    assert cache.find(("TAG", "tag-0")) is None


@pytest.mark.parametrize("kind", ["TAG", "SQL92"])
def test_an_expression_has_a_largest_length(kind: str) -> None:
    with pytest.raises(RefusedError, match="has 8193 characters, allowed are 8192; use several groups") as caught:
        subscriptions().compile(kind, "x" * 8_193)

    assert caught.value.code == ResponseCode.SUBSCRIPTION_PARSE_FAILED


@pytest.mark.parametrize(("conditions", "compiled_elsewhere"), [(5, 0), (50, 1)])
def test_a_long_expression_is_compiled_in_another_thread_once(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, conditions: int, compiled_elsewhere: int
) -> None:
    serving.send("orders", properties={"a": "1"})
    serving.pull("group", "orders", sys_flag=PullSysFlag.SUBSCRIPTION)  # creates the group
    runs: list[object] = []
    run = DeferredWork.run
    monkeypatch.setattr(DeferredWork, "run", lambda *arguments: runs.append(arguments) or run(*arguments))
    expression = "b = 2 OR " * conditions + "a = 1"

    for _ in range(3):
        response = serving.pull(
            "group",
            "orders",
            sys_flag=PullSysFlag.SUBSCRIPTION,
            subscription=expression,
            expression_type="SQL92",
        )
        assert response is not None
        assert response.code == ResponseCode.SUCCESS

    assert len(runs) == compiled_elsewhere
