"""Functions and hooks that may change the attributes of a listener before it joins its group."""

from __future__ import annotations

from typing import Any

import pytest

from mqtemplate import (
    ConsumeFromWhere,
    MQApplication,
    PreparedConsumer,
    VirtualClock,
    listener_enhancer,
    message_listener,
    scheduled,
)
from mqtemplate.errors import ListenerError
from mqtemplate.listener.declaration.decorator import MESSAGE_LISTENER
from mqtemplate.listener.declaration.settings import ListenerSettings
from mqtemplate.testing import Harness
from tests.kit import application

pytestmark = pytest.mark.feature("enhancers")


def app_of(*components: object) -> MQApplication:
    return application(*components, settings={"shop.suffix": "-berlin"})


def settings_of(*components: object) -> ListenerSettings:
    with app_of(*components) as app:
        [container] = app.containers
        return container.endpoint.settings


@message_listener("orders", "billing", consume_thread_number=4)
def bill(order: str) -> None: ...


# --- enhancers -----------------------------------------------------------------------------------


def test_an_enhancer_changes_attributes_before_the_placeholders_are_replaced() -> None:
    seen: list[object] = []

    @listener_enhancer()
    def in_berlin(attributes: dict[str, Any], listener: object) -> None:
        seen.append((dict(attributes), listener))
        attributes["consumer_group"] += "${shop.suffix}"
        attributes["pull_batch_size"] = 8

    settings = settings_of(bill, in_berlin)

    assert seen == [({"topic": ["orders"], "consumer_group": "billing", "consume_thread_number": 4}, bill)]
    assert (settings.group, settings.pull_batch_size, settings.consume_thread_number) == ("billing-berlin", 8, 4)


def test_enhancers_run_in_their_order_and_may_return_other_attributes() -> None:
    @listener_enhancer(order=2)
    def second(attributes: dict[str, Any], listener: object) -> dict[str, Any]:
        return {**attributes, "topic": [*attributes["topic"], "returns"]}

    @listener_enhancer(order=1)
    def first(attributes: dict[str, Any], listener: object) -> dict[str, Any]:
        return {"topic": "sales", "consumer_group": attributes["consumer_group"]} | {"topic": ["sales"]}

    settings = settings_of(bill, second, first)

    assert (settings.topics, settings.consume_thread_number) == (("sales", "returns"), 20)


def test_an_enhancer_may_be_a_class_that_the_application_builds() -> None:
    class Suffix:
        text = "-test"

    @listener_enhancer()
    class InTestGroups:
        def __init__(self, suffix: Suffix) -> None:
            self.suffix = suffix.text

        def __call__(self, attributes: dict[str, Any], listener: object) -> None:
            attributes["consumer_group"] += self.suffix

    InTestGroups.__init__.__annotations__["suffix"] = Suffix
    assert settings_of(bill, Suffix, InTestGroups).group == "billing-test"


def test_the_listeners_of_schedules_are_not_changed() -> None:
    seen: list[object] = []

    @listener_enhancer()
    def note(attributes: dict[str, Any], listener: object) -> None:
        seen.append(attributes["consumer_group"])

    @scheduled(every="10m")
    def report() -> None: ...

    with app_of(bill, note, report) as app:
        assert len(app.containers) == 2
    assert seen == ["billing"]


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ({"topic": ["orders"]}, "the enhancer .*wrong returned .*; return the attributes, a dict with 'topic'"),
        ("no dict", "the enhancer .*wrong returned 'no dict'"),
        (
            {"topic": "orders", "consumer_group": "g", "consume_threadnumber": 3},
            (
                "the enhancer .*wrong: @message_listener has no attribute 'consume_threadnumber'; did you mean "
                "'consume_thread_number'"
            ),
        ),
        ({"topic": [], "consumer_group": "g"}, "topic must be a name or a list of names, got"),
    ],
)
def test_a_wrong_result_of_an_enhancer_is_an_error(result: object, text: str) -> None:
    @listener_enhancer()
    def wrong(attributes: dict[str, Any], listener: object) -> Any:
        return result

    with pytest.raises(ListenerError, match=text):
        app_of(bill, wrong).start()


# --- prepare_start -------------------------------------------------------------------------------


def test_a_listener_prepares_its_own_consumer() -> None:
    """It reads resolved attributes and defaults, and sets others; its constructor was injected by then."""
    seen: list[object] = []

    @message_listener("orders", "billing", pull_batch_size="${shop.size:16}")
    class Billing:
        def __init__(self, clock: VirtualClock) -> None:
            self.clock = clock

        def prepare_start(self, consumer: PreparedConsumer) -> None:
            seen.append((consumer.topic, consumer.consumer_group, consumer.pull_batch_size, consumer.pull_interval))
            consumer.consume_from_where = "CONSUME_FROM_TIMESTAMP"
            consumer.consume_timestamp = self.clock.now_ms()
            consumer.selector_expression = "paid"

        def on_message(self, order: str) -> None: ...

    settings = settings_of(Billing)

    assert seen == [(("orders",), "billing", 16, 0)]
    assert settings.consume_from_where is ConsumeFromWhere.CONSUME_FROM_TIMESTAMP
    assert settings.selector.expression == "paid"


def test_what_the_hook_sets_is_used() -> None:
    """Here the start position of a new group: with the default the first message would be left out."""
    received: list[str] = []

    @message_listener("orders", "billing")
    class Billing:
        def prepare_start(self, consumer: PreparedConsumer) -> None:
            consumer.consume_from_where = ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET

        def on_message(self, order: str) -> None:
            received.append(order)

    with app_of(Billing) as app:
        app.template.sync_send("orders", "tea")
        Harness(app).run_until_idle()

    assert received == ["tea"]


class _Base:
    def on_message(self, order: str) -> None: ...


@message_listener("orders", "billing")
class SetsTheGroup(_Base):
    def prepare_start(self, consumer: PreparedConsumer) -> None:
        consumer.consumer_group = "other"


@message_listener("orders", "billing")
class SetsTooMuch(_Base):
    def prepare_start(self, consumer: PreparedConsumer) -> None:
        consumer.consume_thread_number = 0


@message_listener("orders", "billing")
class IsAsync(_Base):
    async def prepare_start(self, consumer: PreparedConsumer) -> None: ...


@message_listener("orders", "billing")
class TakesNothing(_Base):
    def prepare_start(self) -> None: ...


@pytest.mark.parametrize(
    ("listener", "text"),
    [
        (SetsTheGroup, "prepare_start cannot change consumer_group; an enhancer can: @listener_enhancer()"),
        (SetsTooMuch, "consume_thread_number must be a whole number from 1 to 1000, got 0"),
        (IsAsync, "IsAsync.prepare_start is 'async def', and the listener waits for its result; write 'def'"),
        (TakesNothing, "TakesNothing.prepare_start is called with the consumer: too many positional arguments"),
    ],
)
def test_a_wrong_hook_is_refused_at_the_start(listener: type, text: str) -> None:
    with pytest.raises(ListenerError) as raised:
        app_of(listener).start()

    assert text in str(raised.value)


def test_an_unknown_attribute_of_the_consumer_is_an_error() -> None:
    consumer = PreparedConsumer("listener x", ("orders",), "billing", {"pull_interval": 0}, MESSAGE_LISTENER)

    with pytest.raises(AttributeError, match="a listener has no attribute 'pul_interval'; it has pull_interval"):
        consumer.pul_interval  # noqa: B018 (reading it is the test)
    with pytest.raises(TypeError, match="@message_listener has no attribute 'pul_interval'; did you mean"):
        consumer.pul_interval = 1
