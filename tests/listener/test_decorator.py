"""``@message_listener`` notes, and changes nothing."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from dependency_injector.wiring import Provide, inject

from mqtemplate.broker import ConsumeFromWhere, MessageModel
from mqtemplate.errors import ListenerError
from mqtemplate.listener import ConsumeMode, ListenerSpec, listener_specs, message_listener
from mqtemplate.selectors.tags import SelectorType


def test_a_decorated_function_is_the_same_function() -> None:
    def handle(message: str) -> None: ...

    decorated = message_listener(topic="orders", consumer_group="billing")(handle)

    assert decorated is handle
    assert listener_specs(handle) == (ListenerSpec(topics=("orders",), consumer_group="billing"),)


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


def test_the_defaults_are_those_of_the_spring_annotation() -> None:
    """Features 2.2: who leaves an attribute out gets what he knows."""
    spec = ListenerSpec(topics=("t",), consumer_group="g")

    assert spec.selector_type is SelectorType.TAG
    assert spec.selector_expression == "*"
    assert spec.consume_mode is ConsumeMode.CONCURRENTLY
    assert spec.message_model is MessageModel.CLUSTERING
    assert (spec.consume_thread_max, spec.consume_thread_number) == (64, 20)
    assert (spec.max_reconsume_times, spec.consume_timeout, spec.reply_timeout) == (-1, 15, 3_000)
    assert spec.access_key == "${rocketmq.consumer.access-key:}"
    assert spec.secret_key == "${rocketmq.consumer.secret-key:}"
    assert spec.enable_msg_trace is False
    assert spec.customized_trace_topic == "${rocketmq.consumer.customized-trace-topic:}"
    assert spec.name_server == "${rocketmq.name-server:}"
    assert spec.access_channel == "${rocketmq.access-channel:}"
    assert (spec.tls_enable, spec.namespace, spec.namespace_v2) == ("false", "", "")
    assert spec.delay_level_when_next_consume == 0
    assert spec.suspend_current_queue_time_millis == 1_000
    assert spec.await_termination_millis_when_shutdown == 1_000
    assert (spec.instance_name, spec.pull_interval, spec.pull_batch_size) == ("DEFAULT", 0, 32)
    assert spec.consume_message_batch_max_size == 1
    assert spec.consume_from_where is ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET


def test_the_decorator_and_its_record_have_the_same_attributes_and_defaults() -> None:
    """One is written for readers, the other for the machine; they must not drift apart."""
    parameters = inspect.signature(message_listener).parameters
    fields = inspect.signature(ListenerSpec).parameters

    assert {"topics" if name == "topic" else name for name in parameters} == set(fields)
    assert {name: parameters[name].default for name in fields if name != "topics"} == {
        name: field.default for name, field in fields.items() if name != "topics"
    }


def test_several_topics_are_one_subscription() -> None:
    @message_listener(topic=["orders", "refunds"], consumer_group="billing")
    def handle(message: str) -> None: ...

    assert listener_specs(handle)[0].topics == ("orders", "refunds")


def test_stacked_decorators_are_several_listeners_in_reading_order() -> None:
    @message_listener(topic="first", consumer_group="a")
    @message_listener(topic="second", consumer_group="b")
    def handle(message: str) -> None: ...

    assert [spec.topics for spec in listener_specs(handle)] == [("first",), ("second",)]


def test_a_subclass_is_not_a_listener_because_its_base_is() -> None:
    """Else a base class and its subclass would both join the group when a module is scanned."""

    @message_listener(topic="orders", consumer_group="billing")
    class Base:
        def on_message(self, message: str) -> None: ...

    class Child(Base): ...

    assert listener_specs(Child) == ()


def test_placeholders_stay_as_they_are_written() -> None:
    @message_listener(topic="${demo.topic:orders}", consumer_group="${demo.group}", consume_thread_number="${demo.n:4}")
    def handle(message: str) -> None: ...

    [spec] = listener_specs(handle)
    assert (spec.topics, spec.consumer_group, spec.consume_thread_number) == (
        ("${demo.topic:orders}",),
        "${demo.group}",
        "${demo.n:4}",
    )


# --- refused, with a way out --------------------------------------------------------------------------


def test_a_class_under_inject_is_refused_because_it_became_a_function() -> None:
    class Listener:
        def __init__(self, audit: object = Provide["audit"]) -> None: ...

        def on_message(self, message: str) -> None: ...

    with pytest.raises(ListenerError, match=r"Listener is a class that @inject turned into a function; remove @inject"):
        message_listener(topic="orders", consumer_group="billing")(inject(Listener))


def test_a_class_without_on_message_is_refused() -> None:
    class Silent: ...

    with pytest.raises(ListenerError, match=r"Silent has no method on_message; write 'def on_message\(self"):
        message_listener(topic="orders", consumer_group="billing")(Silent)


def test_what_cannot_be_called_is_refused() -> None:
    nothing: Any = 42

    with pytest.raises(ListenerError, match="42 cannot be called; decorate a function, or a class with on_message"):
        message_listener(topic="orders", consumer_group="billing")(nothing)


@pytest.mark.parametrize("topic", ["", " ", [], ["orders", ""], [7]])
def test_a_topic_must_be_named(topic: Any) -> None:
    with pytest.raises(ListenerError, match="topic must be a name or a list of names, got"):
        message_listener(topic=topic, consumer_group="billing")


def test_a_topic_is_named_once() -> None:
    with pytest.raises(ListenerError, match="names one topic twice"):
        message_listener(topic=["orders", "orders"], consumer_group="billing")
