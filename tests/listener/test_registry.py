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
        app.advance("5s")

    assert received == ["x"]
    assert tries[:3] == [0, 1_000, 2_000]
    assert [event["event"] for event in logs if event["log_level"] == "warning"] == ["listener.poll_failed"]
