"""Tag selectors as users write them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqtemplate import Message, RocketMQTemplate, on_tag
from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import VirtualClock
from mqtemplate.errors import DestinationError, ListenerError, MessageError, SelectorError
from mqtemplate.listener import message_listener, resolve_spec
from mqtemplate.listener.declaration.decorator import listener_specs
from mqtemplate.selectors.creation import make_selector
from mqtemplate.selectors.sql92 import Sql92Selector
from mqtemplate.selectors.tags import SelectorType, TagSelector
from mqtemplate.template.options import parse_destination


@pytest.mark.parametrize(
    ("expression", "fix"),
    [
        ("paid | shipped", "paid || shipped"),
        ("paid|shipped", "paid || shipped"),
        ("paid,shipped", "paid || shipped"),
        ("paid, shipped || new", "paid || shipped || new"),
        ("paid; shipped", "paid || shipped"),
        ("paid or shipped", "paid || shipped"),
        ("paid OR shipped", "paid || shipped"),
        ("paid ||| shipped", "paid || shipped"),
        ("paid shipped", "paid || shipped"),
        ("paid\tshipped || new", "paid || shipped || new"),
        ("paid&&shipped", "paid || shipped"),
        ("paid && shipped", "paid || shipped"),
        ("paid and shipped", "paid || shipped"),
    ],
)
def test_another_separator_is_refused_with_the_fix(expression: str, fix: str) -> None:
    """It would be one tag, which no message has: the listener would be silent."""
    with pytest.raises(ListenerError) as refused:
        make_selector(SelectorType.TAG, expression)

    assert repr(expression) in str(refused.value)
    assert f"write {fix!r}" in str(refused.value)


@pytest.mark.parametrize(
    "expression",
    ["*", "", "paid", "paid || shipped", "paid||shipped", "or", "order", "a-b_c.d", "eu:paid", "R&D", "v1/x"],
)
def test_tags_with_two_bars_between_them_are_allowed(expression: str) -> None:
    assert make_selector(SelectorType.TAG, expression) == TagSelector(expression)


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("TAGS='a'", "it is no list of tags but SQL92; set the selector type to SQL92"),
        ("price > 5", "it is no list of tags but SQL92"),
        ("region = 'north' || a", "it is no list of tags but SQL92"),
        ("TAGS IS NOT NULL", "it is no list of tags but SQL92"),
        ("NOT paid", "it is no list of tags but SQL92"),
        ("a || *", "* beside tags is itself a tag; write '*' alone for all messages"),
        ("pay*", "the tag contains '*', and tags have no separators, blanks, wildcards"),
        ("!paid", "the tag contains '!'"),
        ("(a || b)", "the tag contains '('"),
        ("a\x01", "the tag contains '\\x01'"),
        ("\ud800", "the tag contains '\\ud800'"),
    ],
)
def test_an_expression_that_selects_nothing_is_refused(expression: str, reason: str) -> None:
    """RocketMQ takes it as the name of a tag, so the listener would start and be silent."""
    with pytest.raises(ListenerError) as refused:
        make_selector(SelectorType.TAG, expression)

    assert "would match no message, since " in str(refused.value)
    assert reason in str(refused.value)


@pytest.mark.parametrize("expression", ["a||", "||a", "a || || b", "||"])
def test_an_empty_alternative_is_refused(expression: str) -> None:
    with pytest.raises(ListenerError, match="has an empty tag; write 'a || b', or '\\*' for all"):
        make_selector(SelectorType.TAG, expression)


@pytest.mark.parametrize("kind", SelectorType)
@pytest.mark.parametrize("expression", [None, 5, b"a", ["a", "b"]])
def test_an_expression_that_is_no_text_is_refused(kind: SelectorType, expression: Any) -> None:
    with pytest.raises(ListenerError, match="selector expression must be text such as 'a || b', got"):
        make_selector(kind, expression)


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("paid", "a property alone matches no message; .* for the tag paid use the selector type TAG"),
        ("( paid )", "a property alone matches no message"),
        ("a || b", "write OR \\(|| is for tags\\)"),
        ("*", "for all messages use the tag selector"),
        ("", "something is missing"),
        ("1 = 2", "it matches no message, whatever its properties; compare a property"),
        ("FALSE", "it matches no message"),
        ("NULL", "it matches no message"),
        ("NOT TRUE", "it matches no message"),
        ("1 = 2 AND region = 'north'", "it matches no message"),
        ("region = '\ud800'", "a surrogate is no character"),
    ],
)
def test_a_condition_that_selects_nothing_is_refused(expression: str, reason: str) -> None:
    """Also a tag that is given where SQL92 is expected."""
    with pytest.raises(SelectorError, match=reason):
        make_selector(SelectorType.SQL92, expression)


@pytest.mark.parametrize("expression", ["TRUE", "1 = 1", "TAGS = 'a'", "NOT (a = 1)", "a IS NULL", "a = 1 OR 1 = 2"])
def test_a_condition_that_can_be_true_is_allowed(expression: str) -> None:
    assert make_selector(SelectorType.SQL92, expression) == Sql92Selector(expression)


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
        broker.send(Message("orders", b"x", {"TAGS": "a,b"}), None, 3_000)
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
