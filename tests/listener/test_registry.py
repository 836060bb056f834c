"""All listeners of an application: checked, switched, started and stopped together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from mqtemplate.broker import MessageModel
from mqtemplate.converter import JsonMessageConverter
from mqtemplate.errors import BrokerError, ListenerError
from mqtemplate.listener import ConsumeMode, ContainerState, ListenerRegistry, message_listener

if TYPE_CHECKING:
    from tests.listener.conftest import World


def listener(
    heard: list[str] | None = None, topic: Any = "orders", group: str = "billing", **attributes: Any
) -> Callable[..., None]:
    attributes.setdefault("id", f"{group}-{topic}-{len(attributes)}")

    @message_listener(topic=topic, consumer_group=group, **attributes)
    def handle(body: str) -> None:
        if heard is not None:
            heard.append(body)

    return handle


# --- the lint ----------------------------------------------------------------------------------------


@pytest.mark.feature("U14", "X14")
@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ({"topic": "refunds"}, r"subscribe to different things: orders:\* and refunds:\*"),
        ({"selector_expression": "paid"}, r"subscribe to different things: orders:\* and orders:paid"),
        ({"topic": ["orders", "refunds"]}, r"orders:\* and orders:\*, refunds:\*"),
        ({"message_model": MessageModel.BROADCASTING}, "different message models: CLUSTERING and BROADCASTING"),
        ({"consume_mode": ConsumeMode.ORDERLY}, "different consume modes: CONCURRENTLY and ORDERLY"),
    ],
)
def test_listeners_of_one_group_must_want_the_same(world: World, other: dict[str, Any], difference: str) -> None:
    """With different subscriptions each would lose what the other's queues hold, and nobody would know."""
    world.registry.register(listener(id="one"))
    world.registry.register(listener(id="two", **other))

    with pytest.raises(ListenerError, match=f"one and two are both of group 'billing' and .*{difference}.*Give each"):
        world.registry.start()

    assert not any(container.is_running for container in world.registry)


def test_listeners_of_one_group_that_want_the_same_share_the_work(world: World) -> None:
    first: list[str] = []
    second: list[str] = []
    world.listen(
        listener(first, id="one", selector_expression="paid||new"),
        listener(second, id="two", selector_expression="new || paid"),
    )

    for queue_id in range(4):
        world.send("orders", f"q{queue_id}", tag="paid", queue_id=queue_id)
    world.confirm()

    assert sorted(first + second) == ["q0", "q1", "q2", "q3"]
    assert len(first) == len(second) == 2


def test_different_groups_each_get_everything(world: World) -> None:
    first: list[str] = []
    second: list[str] = []
    world.listen(listener(first, group="a"), listener(second, group="b", selector_expression="paid"))

    world.send("orders", "x", tag="paid")
    world.confirm()

    assert first == second == ["x"]


def test_an_id_is_given_once(world: World) -> None:
    world.registry.register(listener(id="bill"))

    with pytest.raises(ListenerError, match="two listeners have the id 'bill'"):
        world.registry.register(listener(id="bill", group="other"))


# --- switches ----------------------------------------------------------------------------------------


def test_a_listener_that_is_not_enabled_has_no_container(world: World) -> None:
    """It does not take part in the lint either: it is not there."""
    assert world.registry.register(listener(enabled="${demo.on:false}")) == []

    world.listen(listener(topic="refunds"))

    assert len(world.registry.containers) == 1


def test_configuration_switches_single_listeners_off(world: World) -> None:
    """Features 2.3: rocketmq.consumer.listeners.<group>.<topic>=false."""
    heard: list[str] = []
    off = {("billing", "orders"), ("audit", "orders")}
    world.registry = ListenerRegistry(
        world.broker, JsonMessageConverter(), is_enabled=lambda group, topic: (group, topic) not in off
    )

    world.listen(listener(group="billing"), listener(heard, group="audit", topic=["orders", "refunds"]))
    world.send("orders", "x")
    world.send("refunds", "y")
    world.confirm()

    assert [container.endpoint.settings.topics for container in world.registry] == [("refunds",)]
    assert heard == ["y"]


@pytest.mark.feature("U18")
def test_a_listener_may_wait_to_be_started(world: World) -> None:
    """Auto_startup=False."""
    heard: list[str] = []
    container = world.listen(listener(heard, id="bill", auto_startup=False))
    world.send("orders", "x")
    world.confirm()
    assert heard == []
    assert world.registry.is_ready

    world.registry.container("bill").start()
    world.confirm()

    assert heard == ["x"]
    assert container.state is ContainerState.RUNNING


def test_an_unknown_id_is_told_what_is_known(world: World) -> None:
    world.registry.register(listener(id="bill"))

    with pytest.raises(ListenerError, match="there is no listener 'bil'; registered are: bill"):
        world.registry.container("bil")


# --- start, pause, stop ------------------------------------------------------------------------------


@pytest.mark.feature("U18")
def test_nothing_is_consumed_before_the_start_and_after_the_stop(world: World) -> None:
    """The application decides when it is ready."""
    heard: list[str] = []
    world.registry.register(listener(heard))
    world.send("orders", "before")
    world.confirm()
    assert heard == []
    assert not world.registry.is_ready

    world.registry.start()
    world.confirm()
    assert heard == ["before"]
    assert world.registry.is_ready

    world.registry.stop()
    world.send("orders", "after")
    world.confirm()
    assert heard == ["before"]


def test_a_container_goes_on_where_it_stopped(world: World) -> None:
    heard: list[str] = []
    container = world.listen(listener(heard))
    world.send("orders", "a")
    world.confirm()

    container.stop()
    world.send("orders", "b")
    container.start()
    world.confirm()

    assert heard == ["a", "b"]


def test_a_pause_fetches_nothing_and_a_resume_goes_on(world: World) -> None:
    heard: list[str] = []
    container = world.listen(listener(heard))

    container.pause()
    world.send("orders", "x")
    world.confirm()
    assert heard == []
    assert container.is_running

    container.resume()
    world.confirm()
    assert heard == ["x"]


def test_a_handler_may_stop_its_own_container(world: World) -> None:
    """What it did not get to stays uncommitted, and comes at the next start."""
    heard: list[str] = []

    @message_listener(topic="orders", consumer_group="billing")
    def handle(body: str) -> None:
        heard.append(body)
        if len(heard) == 1:
            container.stop()

    container = world.listen(handle)
    world.send("orders", "a", "b")
    world.confirm()
    assert heard == ["a"]

    container.start()
    world.confirm()
    assert heard == ["a", "a", "b"]


def test_if_one_cannot_start_none_is_left_running(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.registry.register(listener(group="a"))
    [second] = world.registry.register(listener(group="b"))

    def fail() -> None:
        raise ListenerError("no")

    monkeypatch.setattr(second, "start", fail)
    with pytest.raises(ListenerError, match="no"):
        world.registry.start()

    assert [container.state for container in world.registry] == [ContainerState.STOPPED, ContainerState.CREATED]


def test_one_that_cannot_stop_does_not_keep_the_others_running(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no error is lost: they come together."""
    first = world.listen(listener(group="a"))
    [second] = world.registry.register(listener(group="b"))
    world.registry.start()

    def fail() -> None:
        raise RuntimeError("stuck")

    with monkeypatch.context() as patch:
        patch.setattr(second, "stop", fail)
        with pytest.raises(ExceptionGroup) as caught:
            world.registry.stop()

    assert [str(error) for error in caught.value.exceptions] == ["stuck"]
    assert first.state is ContainerState.STOPPED


def test_a_fetch_that_fails_is_reported_and_tried_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    start_ms = world.broker.clock.now_ms()
    heard: list[str] = []
    container = world.listen(listener(heard))
    poll = container._consumer.poll
    tries: list[int] = []

    def failing_poll(max_count: int, wait_ms: int = 0, **options: Any) -> Any:
        tries.append(world.broker.clock.now_ms() - start_ms)
        if len(tries) < 3:
            raise BrokerError("no connection")
        return poll(max_count, wait_ms, **options)

    monkeypatch.setattr(container._consumer, "poll", failing_poll)
    world.send("orders", "x")
    with capture_logs() as logs:
        world.advance(5_000)

    assert heard == ["x"]
    assert tries[:3] == [0, 1_000, 2_000]
    assert [event["event"] for event in logs if event["log_level"] == "error"] == ["listener.poll_failed"] * 2


def test_where_a_new_group_begins_is_its_own_choice(world: World) -> None:
    """Features 2.2, consumeFromWhere: here, from a time on."""
    heard: list[str] = []
    world.send("orders", "old")
    world.advance(60_000)
    world.send("orders", "new")

    world.listen(
        listener(
            heard,
            consume_from_where="CONSUME_FROM_TIMESTAMP",
            consume_timestamp=world.broker.clock.now_ms(),
        )
    )
    world.confirm()

    assert heard == ["new"]


def test_fetches_keep_their_interval(world: World) -> None:
    start_ms = world.broker.clock.now_ms()
    heard: list[int] = []

    @message_listener(topic="orders", consumer_group="billing", pull_interval=500, pull_batch_size=1)
    def handle(body: str) -> None:
        heard.append(world.broker.clock.now_ms() - start_ms)

    world.listen(handle)
    world.send("orders", "a", "b", "c")
    world.advance(5_000)

    assert heard == [0, 500, 1_000]
