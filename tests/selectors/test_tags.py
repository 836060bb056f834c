"""Tag selectors as users write them."""

from __future__ import annotations

import pytest

from mqtemplate.errors import ListenerError
from mqtemplate.listener import message_listener, resolve_spec
from mqtemplate.listener.decorator import listener_specs
from mqtemplate.selectors.creation import make_selector
from mqtemplate.selectors.tags import SelectorType, TagSelector


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
    ],
)
def test_another_separator_is_refused_with_the_fix(expression: str, fix: str) -> None:
    """It would be one tag, which no message has: the listener would be silent."""
    with pytest.raises(ListenerError) as refused:
        make_selector(SelectorType.TAG, expression)

    assert repr(expression) in str(refused.value)
    assert f"write {fix!r}" in str(refused.value)


@pytest.mark.parametrize("expression", ["*", "", "paid", "paid || shipped", "paid||shipped", "or", "order", "a-b_c.d"])
def test_tags_with_two_bars_between_them_are_allowed(expression: str) -> None:
    assert make_selector(SelectorType.TAG, expression) == TagSelector(expression)


def test_the_error_names_the_listener() -> None:
    @message_listener(topic="orders", consumer_group="billing", selector_expression="paid,shipped", id="bill")
    def bill(message: str) -> None: ...

    with pytest.raises(ListenerError, match=r"listener bill: selector expression 'paid,shipped' would match"):
        resolve_spec(listener_specs(bill)[0])


def test_a_client_of_rocketmq_may_select_such_a_tag() -> None:
    assert TagSelector("a,b").matches({"TAGS": "a,b"})
