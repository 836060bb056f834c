"""Registry: listeners are checked, enabled, started and stopped together."""

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
    from tests.listener.conftest import App


def listener(
    received: list[str] | None = None, topic: Any = "orders", group: str = "billing", **attributes: Any
) -> Callable[..., None]:
    attributes.setdefault("id", f"{group}-{topic}-{len(attributes)}")

    @message_listener(topic=topic, consumer_group=group, **attributes)
    def handle(body: str) -> None:
        if received is not None:
            received.append(body)

    return handle


# --- checks of subscriptions -------------------------------------------------------------------------


@pytest.mark.feature("U14", "X14")
@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ({"topic": "refunds"}, r"different subscriptions: orders:\* and refunds:\*"),
        ({"selector_expression": "paid"}, r"different subscriptions: orders:\* and orders:paid"),
        ({"topic": ["orders", "refunds"]}, r"orders:\* and orders:\*, refunds:\*"),
        ({"message_model": MessageModel.BROADCASTING}, "different message models: CLUSTERING and BROADCASTING"),
        ({"consume_mode": ConsumeMode.ORDERLY}, "different consume modes: CONCURRENTLY and ORDERLY"),
    ],
)
def test_listeners_of_one_group_must_have_equal_subscriptions(app: App, other: dict[str, Any], difference: str) -> None:
    """With different subscriptions each one would lose the messages in the other's queues without an error."""
    app.registry.register(listener(id="one"))
    app.registry.register(listener(id="two", **other))

    with pytest.raises(ListenerError, match=f"one and two are both of group 'billing' and .*{difference}.*give each"):
        app.registry.start()

    assert not any(container.is_running for container in app.registry)


def test_listeners_of_one_group_share_the_queues(app: App) -> None:
    first: list[str] = []
    second: list[str] = []
    app.listen(
        listener(first, id="one", selector_expression="paid||new"),
        listener(second, id="two", selector_expression="new || paid"),
    )

    for queue_id in range(4):
        app.send("orders", f"q{queue_id}", tag="paid", queue_id=queue_id)
    app.run_until_idle()

    assert sorted(first + second) == ["q0", "q1", "q2", "q3"]
    assert len(first) == len(second) == 2


def test_different_groups_each_get_everything(app: App) -> None:
    first: list[str] = []
    second: list[str] = []
    app.listen(listener(first, group="a"), listener(second, group="b", selector_expression="paid"))

    app.send("orders", "x", tag="paid")
    app.run_until_idle()

    assert first == second == ["x"]


def test_an_id_cannot_be_used_twice(app: App) -> None:
    app.registry.register(listener(id="bill"))

    with pytest.raises(ListenerError, match="two listeners have the id 'bill'"):
        app.registry.register(listener(id="bill", group="other"))


# --- disabled listeners ------------------------------------------------------------------------------


def test_a_disabled_listener_has_no_container(app: App) -> None:
    """Its subscription is not checked either."""
    assert app.registry.register(listener(enabled="${demo.on:false}")) == []

    app.listen(listener(topic="refunds"))

    assert len(app.registry.containers) == 1


def test_the_configuration_can_disable_single_listeners(app: App) -> None:
    """``rocketmq.consumer.listeners.<group>.<topic>: false``."""
    received: list[str] = []
    off = {("billing", "orders"), ("audit", "orders")}
    app.registry = ListenerRegistry(
        app.broker, JsonMessageConverter(), is_enabled=lambda group, topic: (group, topic) not in off
    )

    app.listen(listener(group="billing"), listener(received, group="audit", topic=["orders", "refunds"]))
    app.send("orders", "x")
    app.send("refunds", "y")
    app.run_until_idle()

    assert [container.endpoint.settings.topics for container in app.registry] == [("refunds",)]
    assert received == ["y"]


@pytest.mark.feature("U18")
def test_a_listener_without_auto_startup_is_started_by_hand(app: App) -> None:
    received: list[str] = []
    container = app.listen(listener(received, id="bill", auto_startup=False))
    app.send("orders", "x")
    app.run_until_idle()
    assert received == []
    assert app.registry.is_ready

    app.registry.container("bill").start()
    app.run_until_idle()

    assert received == ["x"]
    assert container.state is ContainerState.RUNNING


def test_the_error_for_an_unknown_id_names_the_known_ones(app: App) -> None:
    app.registry.register(listener(id="bill"))

    with pytest.raises(ListenerError, match="there is no listener 'bil'; registered are: bill"):
        app.registry.container("bil")


# --- start, pause, stop ------------------------------------------------------------------------------


@pytest.mark.feature("U18")
def test_no_message_is_handled_before_the_start_or_after_the_stop(app: App) -> None:
    received: list[str] = []
    app.registry.register(listener(received))
    app.send("orders", "before")
    app.run_until_idle()
    assert received == []
    assert not app.registry.is_ready

    app.registry.start()
    app.run_until_idle()
    assert received == ["before"]
    assert app.registry.is_ready

    app.registry.stop()
    app.send("orders", "after")
    app.run_until_idle()
    assert received == ["before"]


def test_a_restarted_container_continues_after_its_last_message(app: App) -> None:
    received: list[str] = []
    container = app.listen(listener(received))
    app.send("orders", "a")
    app.run_until_idle()

    container.stop()
    app.send("orders", "b")
    container.start()
    app.run_until_idle()

    assert received == ["a", "b"]


def test_a_paused_container_fetches_nothing_until_it_is_resumed(app: App) -> None:
    received: list[str] = []
    container = app.listen(listener(received))

    container.pause()
    app.send("orders", "x")
    app.run_until_idle()
    assert received == []
    assert container.is_running

    container.resume()
    app.run_until_idle()
    assert received == ["x"]


def test_a_handler_may_stop_its_own_container(app: App) -> None:
    """The messages that it did not handle stay uncommitted and are redelivered after the next start."""
    received: list[str] = []

    @message_listener(topic="orders", consumer_group="billing")
    def handle(body: str) -> None:
        received.append(body)
        if len(received) == 1:
            container.stop()

    container = app.listen(handle)
    app.send("orders", "a", "b")
    app.run_until_idle()
    assert received == ["a"]

    container.start()
    app.run_until_idle()
    assert received == ["a", "a", "b"]


def test_if_one_container_cannot_start_none_is_left_running(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    app.registry.register(listener(group="a"))
    [second] = app.registry.register(listener(group="b"))

    def fail() -> None:
        raise ListenerError("no")

    monkeypatch.setattr(second, "start", fail)
    with pytest.raises(ListenerError, match="no"):
        app.registry.start()

    assert [container.state for container in app.registry] == [ContainerState.STOPPED, ContainerState.CREATED]


def test_a_container_that_cannot_stop_does_not_keep_the_others_running(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All errors are raised together."""
    first = app.listen(listener(group="a"))
    [second] = app.registry.register(listener(group="b"))
    app.registry.start()

    def fail() -> None:
        raise RuntimeError("stuck")

    with monkeypatch.context() as patch:
        patch.setattr(second, "stop", fail)
        with pytest.raises(ExceptionGroup) as caught:
            app.registry.stop()

    assert [str(error) for error in caught.value.exceptions] == ["stuck"]
    assert first.state is ContainerState.STOPPED


def test_a_failed_fetch_is_reported_and_retried(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    start_ms = app.broker.clock.now_ms()
    received: list[str] = []
    container = app.listen(listener(received))
    poll = container.member.consumer.poll
    tries: list[int] = []

    def failing_poll(max_count: int, wait_ms: int = 0, **options: Any) -> Any:
        tries.append(app.broker.clock.now_ms() - start_ms)
        if len(tries) < 3:
            raise BrokerError("no connection")
        return poll(max_count, wait_ms, **options)

    monkeypatch.setattr(container.member.consumer, "poll", failing_poll)
    app.send("orders", "x")
    with capture_logs() as logs:
        app.advance(5_000)

    assert received == ["x"]
    assert tries[:3] == [0, 1_000, 2_000]
    assert [event["event"] for event in logs if event["log_level"] == "warning"] == ["listener.poll_failed"] * 2


def test_a_new_group_can_start_at_a_timestamp(app: App) -> None:
    received: list[str] = []
    app.send("orders", "old")
    app.advance(60_000)
    app.send("orders", "new")

    app.listen(
        listener(
            received,
            consume_from_where="CONSUME_FROM_TIMESTAMP",
            consume_timestamp=app.broker.clock.now_ms(),
        )
    )
    app.run_until_idle()

    assert received == ["new"]


def test_fetches_are_a_pull_interval_apart(app: App) -> None:
    start_ms = app.broker.clock.now_ms()
    received: list[int] = []

    @message_listener(topic="orders", consumer_group="billing", pull_interval=500, pull_batch_size=1)
    def handle(body: str) -> None:
        received.append(app.broker.clock.now_ms() - start_ms)

    app.listen(handle)
    app.send("orders", "a", "b", "c")
    app.advance(5_000)

    assert received == [0, 500, 1_000]
