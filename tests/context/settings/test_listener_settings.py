"""The section ``mqtemplate.listener.*``: the retry policy of listeners without one of their own."""

from __future__ import annotations

from mqtemplate import MQApplication, VirtualClock, message_listener
from mqtemplate.testing import Harness


def test_listeners_without_a_policy_of_their_own_use_it() -> None:
    clock = VirtualClock()
    start_ms = clock.now_ms()
    tries: dict[str, list[int]] = {"default": [], "own": [], "level": []}

    def fail(name: str) -> None:
        tries[name].append(clock.now_ms() - start_ms)
        raise RuntimeError("no")

    @message_listener(topic="orders", consumer_group="default")
    def default(message: str) -> None:
        fail("default")

    @message_listener(topic="orders", consumer_group="own", retry=["3s"])
    def own(message: str) -> None:
        fail("own")

    @message_listener(topic="orders", consumer_group="level", delay_level_when_next_consume=1, max_reconsume_times=2)
    def level(message: str) -> None:
        fail("level")

    settings = {"rocketmq.name-server": "embedded:memory", "mqtemplate.listener.retry": ["7s", "90s"]}
    with MQApplication(default, own, level, settings=settings, clock=clock) as app:
        app.template.sync_send("orders", "bad")
        Harness(app, raise_handler_errors=False).advance("10m")

    assert tries == {"default": [0, 7_000, 97_000], "own": [0, 3_000], "level": [0, 1_000, 2_000]}
