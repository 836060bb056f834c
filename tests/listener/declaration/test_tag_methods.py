"""Methods of one listener class that handle the messages of their tags."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from mqtemplate import MessageExt, message_listener, on_tag
from mqtemplate.errors import ListenerError
from mqtemplate.testing import Harness
from tests.kit import application

pytestmark = pytest.mark.feature("tag-methods")


@dataclass
class Payment:
    amount: int


class Received:
    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []


@message_listener("orders", "billing")
class Billing:
    def __init__(self, received: Received) -> None:
        self.calls = received.calls

    @on_tag("paid")
    def paid(self, payment: Payment) -> None:
        self.calls.append(("paid", payment))

    @on_tag("refunded", "returned")
    async def refunded(self, order: str, message: MessageExt) -> None:
        self.calls.append((f"refunded by {message.tags}", order))


def test_each_method_gets_the_messages_of_its_tags_in_its_own_type() -> None:
    """A plain and an ``async`` method stand side by side, each with parameters of its own."""
    with application(Received, Billing) as app:
        app.template.sync_send("orders:paid", Payment(7))
        app.template.sync_send("orders:returned", "tea")
        app.template.sync_send("orders:refunded", "milk")
        Harness(app).run_until_idle()

        assert sorted(app.get(Received).calls, key=str) == [
            ("paid", Payment(7)),
            ("refunded by refunded", "milk"),
            ("refunded by returned", "tea"),
        ]


def test_the_listener_subscribes_to_the_tags_of_its_methods() -> None:
    with application(Received, Billing) as app:
        assert app.containers[0].endpoint.settings.selector.expression == "paid || refunded || returned"


def test_on_message_beside_them_gets_all_other_messages() -> None:
    class Rest(Billing):
        def on_message(self, body: bytes) -> None:
            self.calls.append(("other", body))

    with application(Received, message_listener("orders", "billing")(Rest)) as app:
        for tag in (":paid", ":unknown", ""):
            app.template.sync_send(f"orders{tag}", '{"amount": 1}')
        Harness(app).run_until_idle()

        assert app.containers[0].endpoint.settings.selector.expression == "*"
        assert sorted(kind for kind, _ in app.get(Received).calls) == ["other", "other", "paid"]


def test_a_message_without_a_method_is_a_dead_letter() -> None:
    """An SQL92 selector may select more than the methods handle; a retry would not help."""

    @message_listener("orders", "billing", selector_type="SQL92", selector_expression="TAGS IS NOT NULL")
    class Paid:
        @on_tag("paid")
        def paid(self, order: str) -> None: ...

    with application(Paid) as app:
        harness = Harness(app, raise_handler_errors=False)
        app.template.sync_send("orders:lost", "tea")
        harness.advance("1s")

        [letter] = harness.assert_dead_lettered("billing", 1)
        assert "no method of the listener handles the tag 'lost'" in letter.properties["dead_letter_message"]


def test_a_failed_method_is_retried_with_its_tag() -> None:
    attempts: list[int] = []

    @message_listener("orders", "billing", retry=["1s"])
    class Failing:
        @on_tag("paid")
        def paid(self, order: str, message: MessageExt) -> None:
            attempts.append(message.reconsume_times)
            if len(attempts) == 1:
                raise OSError("no answer")

    with application(Failing) as app:
        app.template.sync_send("orders:paid", "tea")
        Harness(app, raise_handler_errors=False).advance("2s")

    assert attempts == [0, 1]


@message_listener("orders", "billing")
class TwiceTheTag:
    @on_tag("paid")
    def one(self, order: str) -> None: ...

    @on_tag("paid")
    def two(self, order: str) -> None: ...


@message_listener("orders", "billing")
class Batches:
    @on_tag("paid")
    def all_paid(self, orders: list[str]) -> None: ...


@message_listener("orders", "billing", selector_expression="paid")
class SelectsLess:
    @on_tag("paid")
    def paid(self, order: str) -> None: ...

    @on_tag("refunded")
    def refunded(self, order: str) -> None: ...


@pytest.mark.parametrize(
    ("listener", "text"),
    [
        (TwiceTheTag, "TwiceTheTag: one and two both handle the tag 'paid'; give each tag one method"),
        (Batches, "the method for the tag 'paid' takes a batch, and a batch may have several tags; take one message"),
        (SelectsLess, "selector_expression='paid' does not select 'refunded', for which there is a method; add it"),
    ],
)
def test_a_wrong_class_is_refused_at_the_start(listener: type, text: str) -> None:
    with pytest.raises(ListenerError) as raised:
        application(listener).start()

    assert text in str(raised.value)


@pytest.mark.parametrize("tags", [(), ("",), ("a || b",), (" paid",)])
def test_a_tag_is_a_name(tags: Sequence[str]) -> None:
    with pytest.raises(ListenerError, match="@on_tag: tags must be names, got"):
        on_tag(*tags)


def test_only_methods_have_tags() -> None:
    with pytest.raises(ListenerError, match="is not a method; decorate a method of a listener class"):
        on_tag("paid")(Billing)


def test_a_class_with_neither_is_refused_as_before() -> None:
    with pytest.raises(ListenerError, match="class .*Empty has no method on_message"):

        @message_listener("orders", "billing")
        class Empty: ...
