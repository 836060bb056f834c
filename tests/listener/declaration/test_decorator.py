"""``@message_listener`` notes a spec on its object and changes nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from dependency_injector.wiring import Provide, inject

from mqtemplate.errors import ListenerError
from mqtemplate.listener import ListenerSpec, listener_specs, message_listener


def test_a_decorated_function_is_the_same_function() -> None:
    def handle(message: str) -> None: ...

    decorated = message_listener(topic="orders", consumer_group="billing")(handle)

    assert decorated is handle
    assert listener_specs(handle) == (ListenerSpec(topics=("orders",), consumer_group="billing", attributes={}),)


@pytest.mark.feature("B15")
def test_a_decorated_class_is_the_same_class() -> None:
    """Topic, group and a typed on_message are all that a listener class needs."""

    class ScheduleListener:
        def on_message(self, message: str) -> None: ...

    decorated = message_listener("schedule-message-topic", "schedule-consumer-group")(ScheduleListener)

    assert decorated is ScheduleListener
    assert isinstance(decorated(), ScheduleListener)
    [spec] = listener_specs(ScheduleListener)
    assert (spec.topics, spec.consumer_group) == (("schedule-message-topic",), "schedule-consumer-group")


def test_several_topics_are_one_subscription() -> None:
    @message_listener(topic=["orders", "refunds"], consumer_group="billing")
    def handle(message: str) -> None: ...

    assert listener_specs(handle)[0].topics == ("orders", "refunds")


def test_stacked_decorators_are_several_listeners_in_reading_order() -> None:
    @message_listener(topic="first", consumer_group="a")
    @message_listener(topic="second", consumer_group="b")
    def handle(message: str) -> None: ...

    assert [spec.topics for spec in listener_specs(handle)] == [("first",), ("second",)]


def test_a_subclass_does_not_inherit_the_decorator_of_its_base() -> None:
    """Otherwise both classes would join the group when a module is scanned."""

    @message_listener(topic="orders", consumer_group="billing")
    class Base:
        def on_message(self, message: str) -> None: ...

    class Child(Base): ...

    assert listener_specs(Child) == ()


def test_the_decorator_does_not_replace_placeholders() -> None:
    @message_listener(topic="${demo.topic:orders}", consumer_group="${demo.group}", consume_thread_number="${demo.n:4}")
    def handle(message: str) -> None: ...

    [spec] = listener_specs(handle)
    assert (spec.topics, spec.consumer_group) == (("${demo.topic:orders}",), "${demo.group}")
    assert spec.attributes == {"consume_thread_number": "${demo.n:4}"}


# --- errors ------------------------------------------------------------------------------------------


def test_a_class_that_inject_turned_into_a_function_is_refused() -> None:
    class Listener:
        def __init__(self, audit: object = Provide["audit"]) -> None: ...

        def on_message(self, message: str) -> None: ...

    with pytest.raises(ListenerError, match=r"Listener is a class that @inject turned into a function; remove @inject"):
        message_listener(topic="orders", consumer_group="billing")(inject(Listener))


def test_a_class_without_on_message_is_refused() -> None:
    class Silent: ...

    with pytest.raises(ListenerError, match=r"Silent has no method on_message; write 'def on_message\(self"):
        message_listener(topic="orders", consumer_group="billing")(Silent)


def test_an_object_that_cannot_be_called_is_refused() -> None:
    nothing: Any = 42

    with pytest.raises(ListenerError, match="42 cannot be called; decorate a function, or a class with on_message"):
        message_listener(topic="orders", consumer_group="billing")(nothing)
