"""The example cloud_events: a converter for both content modes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.cloud_events.converter import CloudEvent, CloudEventConverter
from mqtemplate import MQApplication, RocketMQTemplate, VirtualClock, message_listener
from mqtemplate.errors import ConversionError
from mqtemplate.testing import Harness, messages_in
from tests.programs import run_python

ROOT = Path(__file__).parents[2]
EVENT = CloudEvent(
    id="7",
    type="shop.order.paid",
    source="/shop",
    subject="order 7",
    time="2026-01-01T00:00:00+00:00",
    data={"amount": 30},
    extensions={"tenant": "berlin"},
)


def app_of(*components: object) -> MQApplication:
    settings = {"rocketmq.name-server": "embedded:memory"}
    return MQApplication(*components, settings=settings, environment={}, clock=VirtualClock())


@pytest.mark.parametrize("mode", ["binary", "structured"])
@pytest.mark.parametrize("data", [{"amount": 30}, "text", b"\xff\x00", None])
def test_an_event_arrives_as_it_was_sent(mode: str, data: object) -> None:
    received: list[CloudEvent] = []

    @message_listener("events", "audit")
    def note(event: CloudEvent) -> None:
        received.append(event)

    sent = CloudEvent(id="7", type="paid", source="/shop", data=data, time=None, extensions={"tenant": "berlin"})
    with app_of(note, CloudEventConverter(mode)) as app:  # type: ignore[arg-type]
        app.template.sync_send("events", sent)
        Harness(app).run_until_idle()

    [event] = received
    assert (event.id, event.type, event.source, event.data) == ("7", "paid", "/shop", data)
    assert (event.extensions, event.specversion) == ({"tenant": "berlin"}, "1.0")


def test_in_the_binary_mode_the_attributes_are_properties_that_a_selector_sees() -> None:
    received: list[CloudEvent] = []

    @message_listener("events", "audit", selector_type="SQL92", selector_expression="CE_type = 'shop.order.paid'")
    def note(event: CloudEvent) -> None:
        received.append(event)

    with app_of(note, CloudEventConverter("binary")) as app:
        app.template.sync_send("events", EVENT, keys="order-7")
        app.template.sync_send("events", CloudEvent(type="shop.order.sent", source="/shop", data="x"))
        Harness(app).run_until_idle()

        message = messages_in(app.broker, "events")[0]
        assert message.body == b'{"amount":30}'
        assert message.keys == "order-7"
        named = {name: text for name, text in message.user_properties.items() if name.startswith("CE_")}
        assert named == {
            "CE_id": "7",
            "CE_type": "shop.order.paid",
            "CE_source": "/shop",
            "CE_subject": "order 7",
            "CE_time": "2026-01-01T00:00:00+00:00",
            "CE_specversion": "1.0",
            "CE_tenant": "berlin",
            "CE_contenttype": "application/json",
        }
    assert [event.id for event in received] == ["7"]


def test_in_the_structured_mode_the_body_has_everything() -> None:
    body, content_type = CloudEventConverter("structured").to_body(EVENT)

    assert content_type == "application/cloudevents+json"
    assert json.loads(body) == {
        "id": "7",
        "type": "shop.order.paid",
        "source": "/shop",
        "specversion": "1.0",
        "subject": "order 7",
        "time": "2026-01-01T00:00:00+00:00",
        "tenant": "berlin",
        "data": {"amount": 30},
    }


def test_a_message_that_is_no_event_is_an_error_and_other_types_are_read_as_before() -> None:
    converter = CloudEventConverter()

    with pytest.raises(ConversionError, match="not a CloudEvent: the attributes id, source, type, spec.* are missing"):
        converter.from_body(b"x", CloudEvent, {})
    assert converter.from_body(b'{"id": 7}', dict, {}) == {"id": 7}


def test_a_listener_may_have_the_converter_alone() -> None:
    received: list[CloudEvent] = []

    @message_listener("events", "audit", converter=CloudEventConverter())
    def note(event: CloudEvent) -> None:
        received.append(event)

    with app_of(note) as app:
        RocketMQTemplate(app.broker, converter=CloudEventConverter("structured")).sync_send("events", EVENT)
        Harness(app).run_until_idle()

    assert received == [EVENT]


def test_the_program_prints_both_events() -> None:
    run = run_python(ROOT, "-W", "error", "-m", "examples.cloud_events")

    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == ["shop.order.paid of /shop: {'id': 7, 'amount': 30}"] * 2
