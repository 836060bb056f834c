"""Tag selectors as users write them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqtemplate import Message, RocketMQTemplate, on_tag
from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import VirtualClock
from mqtemplate.errors import DestinationError, ListenerError, MessageError
from mqtemplate.listener import message_listener, resolve_spec
from mqtemplate.listener.declaration.decorator import listener_specs
from mqtemplate.selectors.sql92 import Sql92Selector, make_selector
from mqtemplate.selectors.tags import SelectorType, TagSelector
from mqtemplate.template.options import parse_destination


@pytest.mark.parametrize("kind", SelectorType)
@pytest.mark.parametrize("expression", [None, 5, b"a", ["a", "b"]])
def test_an_expression_that_is_not_text_is_refused(kind: SelectorType, expression: Any) -> None:
    with pytest.raises(ListenerError, match="selector expression must be text such as 'a || b', got"):
        make_selector(kind, expression)


@pytest.mark.parametrize("expression", ["FALSE", "paid", "1 = 2"])
def test_a_client_of_rocketmq_may_send_a_condition_that_is_never_true(expression: str) -> None:
    assert not Sql92Selector(expression).matches({"paid": "true"})


# --- one rule for what is sent and what is selected ---------------------------------------------------------


@given(
    tag=st.text(
        st.sampled_from("ab01-_.:/&|,;*=<>()'\"! \t\n\u00a0\x00\x01\ud800é中#@+?%$~^[]{}\\"), min_size=1, max_size=6
    )
)
def test_a_tag_can_be_sent_if_and_only_if_it_can_be_selected(tag: str) -> None:
    """``orders:a,b`` was sent, and no listener of the library could name its tag."""
    try:
        sent = parse_destination(f"orders:{tag}").tag
    except DestinationError:
        sent = None
    try:
        selected = make_selector(SelectorType.TAG, tag)
    except ListenerError:
        selected = None

    if sent is None:
        assert selected is None or not selected.matches({"TAGS": tag}) or selected.selects_all or tag != tag.strip()
    else:
        assert selected is not None
        assert selected.matches({"TAGS": tag})
        assert not selected.selects_all
        on_tag(tag)


@pytest.mark.parametrize("tag", ["a,b", "a b", "a|b", "a;b", "*", "a&&b", "a='b'", " a", "a\t", "\ud800", "a\x1b"])
def test_a_tag_that_no_listener_can_name_is_refused_in_each_place(tag: str) -> None:
    with EmbeddedBroker(clock=VirtualClock()) as broker, pytest.raises(MessageError) as refused:
        RocketMQTemplate(broker).sync_send("orders", b"x", headers={"TAGS": tag})
    assert "header 'TAGS'" in str(refused.value)
    assert "TAGS" in str(refused.value)
    with pytest.raises(DestinationError, match="the tag (contains|starts or ends)"):
        parse_destination(f"orders:{tag}")
    with pytest.raises(ListenerError, match="tags must be names, got"):
        on_tag(tag)


def test_a_message_of_another_client_with_such_a_tag_is_received() -> None:
    """By a listener for all tags, and by a condition; only its tag alone cannot be named."""
    with EmbeddedBroker(clock=VirtualClock()) as broker:
        broker.sends.send(Message("orders", b"x", {"TAGS": "a,b"}), None, 3_000)
        template = RocketMQTemplate(broker, consumer_group="all", consumer_topic="orders")
        by_sql = RocketMQTemplate(
            broker,
            consumer_group="sql",
            consumer_topic="orders",
            selector_type=SelectorType.SQL92,
            selector_expression="TAGS = 'a,b'",
        )
        with template, by_sql:
            assert template.receive(bytes, 1) == [b"x"]
            assert by_sql.receive(bytes, 1) == [b"x"]


def test_the_error_names_the_listener() -> None:
    @message_listener(topic="orders", consumer_group="billing", selector_expression="paid,shipped", id="bill")
    def bill(message: str) -> None: ...

    with pytest.raises(ListenerError, match=r"listener bill: selector expression 'paid,shipped' would match"):
        resolve_spec(listener_specs(bill)[0])


def test_a_client_of_rocketmq_may_select_such_a_tag() -> None:
    assert TagSelector("a,b").matches({"TAGS": "a,b"})
