"""``convert_and_send``, the verb of Spring's messaging templates."""

from __future__ import annotations

import pytest

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.errors import DestinationError, MessageError
from mqtemplate.message import Message
from mqtemplate.results import SendStatus
from mqtemplate.template import RocketMQTemplate
from mqtemplate.testing import RecordingTemplate, messages_in
from tests.kit import Kit


def test_a_payload_is_sent_with_headers(kit: Kit) -> None:
    result = kit.template.convert_and_send("orders:paid", {"id": 1}, {"KEYS": "4466"})

    [message] = messages_in(kit.broker, "orders")
    assert result.send_status is SendStatus.SEND_OK
    assert (message.body, message.tags, message.keys) == (b'{"id":1}', "paid", "4466")


def test_a_payload_alone_goes_to_the_default_destination(mqtemplate_broker: EmbeddedBroker) -> None:
    template = RocketMQTemplate(mqtemplate_broker, default_destination="orders:paid")

    template.convert_and_send({"id": 1}, headers={"region": "EU"})

    [message] = messages_in(mqtemplate_broker, "orders")
    assert (message.body, message.tags, message.properties["region"]) == (b'{"id":1}', "paid", "EU")


def test_a_payload_alone_without_a_default_destination_is_refused(mqtemplate_template: RecordingTemplate) -> None:
    with pytest.raises(DestinationError, match="give the template default_destination, or call convert_and_send"):
        mqtemplate_template.convert_and_send({"id": 1})


def test_a_post_processor_may_change_the_message(kit: Kit) -> None:
    def stamp(message: Message) -> Message:
        message.properties["stamped"] = "yes"
        return message

    kit.template.convert_and_send("orders", {"id": 1}, {"region": "EU"}, stamp)

    [message] = messages_in(kit.broker, "orders")
    assert message.user_properties == {"region": "EU", "stamped": "yes", "contentType": "application/json"}


@pytest.mark.feature("G9")
def test_the_result_of_a_post_processor_is_checked(mqtemplate_template: RecordingTemplate) -> None:
    def set_reserved_name(message: Message) -> Message:
        message.properties["REAL_TOPIC"] = "bills"
        return message

    with pytest.raises(MessageError, match="REAL_TOPIC belongs to the broker"):
        mqtemplate_template.convert_and_send("orders", b"body", post_processor=set_reserved_name)
    with pytest.raises(MessageError, match="must return a Message, it returned NoneType"):
        mqtemplate_template.convert_and_send("orders", b"body", post_processor=lambda message: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(MessageError, match="takes one message, got a list"):
        mqtemplate_template.convert_and_send("orders", [b"body"], post_processor=set_reserved_name)
