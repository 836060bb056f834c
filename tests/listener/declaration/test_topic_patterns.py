"""A listener with a pattern reads all topics that match, also those that are created later."""

from __future__ import annotations

import pytest

from mqtemplate import Message, MessageExt, message_listener
from mqtemplate.errors import ListenerError
from mqtemplate.listener.declaration.resolution import is_pattern, matching
from mqtemplate.testing import Harness
from tests.kit import application

pytestmark = pytest.mark.feature("topic-patterns")

received: list[tuple[str, bytes]] = []


@message_listener("orders-*", "audit", id="audit", consume_from_where="CONSUME_FROM_FIRST_OFFSET")
def audit(message: MessageExt) -> None:
    received.append((message.topic, message.body))


@pytest.fixture(autouse=True)
def nothing_received() -> None:
    received.clear()


def test_topics_that_exist_and_those_that_are_created_later_are_read() -> None:
    """A new topic is found within half a minute, and read from its first message on."""
    with application(audit) as app:
        harness = Harness(app)
        app.template.sync_send("orders-berlin", "tea")
        app.template.sync_send("invoices-berlin", "1")
        harness.advance("30s")
        app.template.sync_send("orders-paris", "milk")
        app.template.sync_send("orders-berlin", "bread")
        harness.advance("30s")

        assert app.containers[0].endpoint.settings.topics == ("orders-berlin", "orders-paris")
    assert sorted(received) == [("orders-berlin", b"bread"), ("orders-berlin", b"tea"), ("orders-paris", b"milk")]


def test_a_name_may_stand_beside_a_pattern() -> None:
    @message_listener(["returns", "orders-?"], "audit", consume_from_where="CONSUME_FROM_FIRST_OFFSET")
    def note(message: MessageExt) -> None:
        received.append((message.topic, message.body))

    with application(note) as app:
        harness = Harness(app)
        app.broker.create_topic("orders-1", 1)
        app.broker.create_topic("orders-12", 1)
        harness.advance("30s")
        for topic in ("returns", "orders-1", "orders-12"):
            app.broker.sends.send(Message(topic, topic.encode()))
        harness.advance("1s")

    assert sorted(body for _, body in received) == [b"orders-1", b"returns"]


def test_a_retry_of_a_message_survives_a_new_topic() -> None:
    attempts: list[str] = []

    @message_listener("orders-*", "audit", retry=["45s"], consume_from_where="CONSUME_FROM_FIRST_OFFSET")
    def fail_once(message: MessageExt) -> None:
        attempts.append(message.topic)
        if len(attempts) == 1:
            raise OSError("no answer")

    with application(fail_once) as app:
        harness = Harness(app, raise_handler_errors=False)
        app.template.sync_send("orders-berlin", "tea")
        harness.advance("31s")
        app.template.sync_send("orders-paris", "milk")
        harness.advance("2m")

    assert sorted(attempts) == ["orders-berlin", "orders-berlin", "orders-paris"]


def test_members_of_a_group_must_have_equal_patterns() -> None:
    @message_listener("orders-b*", "audit")
    def other(message: MessageExt) -> None: ...

    with pytest.raises(ListenerError, match=r"have different subscriptions: orders-\*:\* and orders-b\*:\*"):
        application(audit, other).start()


def test_only_these_characters_make_a_pattern() -> None:
    assert [name for name in ("orders", "orders-*", "orders-?", "orders-[ab]", "%DLQ%x") if is_pattern(name)] == [
        "orders-*",
        "orders-?",
        "orders-[ab]",
    ]
    assert matching(["orders-[ab]"], ["orders-a", "orders-c", "xorders-a"]) == ("orders-a",)
