"""AsyncAPI documents of applications. Each one is valid by the official JSON schema, which is in this folder.

``asyncapi-3.0.0.json`` is ``3.0.0-without-$id.json`` of the npm package ``@asyncapi/specs`` 6.11.1 (Apache 2.0) without
white space.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from pydantic import BaseModel

from examples.shop import app as shop
from examples.shop.sales import Sales
from mqtemplate import (
    ConsumeMode,
    MessageExt,
    MQApplication,
    Send,
    message_listener,
    on_tag,
    publishes,
    scheduled,
    service,
)
from mqtemplate.asyncapi import asyncapi_document, documents_send
from mqtemplate.errors import ConfigurationError, DependencyError, DestinationError
from mqtemplate_starter_fastapi import MQTemplate

HERE = Path(__file__).parent
MEMORY = {"rocketmq.name-server": "embedded:memory"}


class Order(BaseModel):
    id: int
    articles: list[str] = []


@dataclass
class Bill:
    cents: int


@message_listener("orders", "billing", selector_expression="paid || refunded")
@publishes("bills:new", delay="5s")
def bill(order: Order) -> Bill | None:
    """Write a bill.

    It may be for several articles.
    """
    return Bill(order.id)


@message_listener("prices", "pricing")
def price(article: str) -> dict[str, int]:
    return {article: 320}


@message_listener("orders", "audit")
def audit(message: MessageExt) -> None: ...


@message_listener("orders", "statistics", consume_mode=ConsumeMode.ORDERLY)
class Statistics:
    """Count orders."""

    @on_tag("paid")
    def paid(self, order: Order) -> None: ...

    @on_tag("lost")
    def lost(self, order: dict[str, int]) -> Send | None: ...


@service
class Shop:
    @documents_send("orders:paid", Order)
    @documents_send("${shop.topic:reminders}:late", Order, delay="${shop.delay:3h}")
    def place(self) -> None:
        """Place an order."""

    @documents_send("quotes", str, reply=Bill, delay_level=3)
    def quote(self) -> None: ...


@scheduled(every="10m")
def clean() -> None: ...


@cache
def schema() -> Any:
    return json.loads((HERE / "asyncapi-3.0.0.json").read_text("utf-8"))


def document_of(*components: object, **options: Any) -> dict[str, Any]:
    """Return the document of an application, which is valid and can be written as JSON."""
    app = MQApplication(*components, settings={**MEMORY, **options})
    app.check()
    document = asyncapi_document(app, title="shop", version="1.2.0")
    jsonschema.validate(document, schema())
    assert json.loads(json.dumps(document)) == document
    return document


def test_a_listener_is_an_operation_that_receives_its_tags() -> None:
    document = document_of(bill)

    assert document["operations"]["bill"] == {
        "action": "receive",
        "channel": {"$ref": "#/channels/orders"},
        "summary": "Write a bill.",
        "messages": [{"$ref": "#/channels/orders/messages/paid"}, {"$ref": "#/channels/orders/messages/refunded"}],
        "x-consumer-group": "billing",
        "x-dead-letter-topic": "%DLQ%billing",
    }
    assert document["channels"]["orders"]["messages"]["paid"] == {
        "name": "paid",
        "title": "Order",
        "contentType": "application/json",
        "payload": {"$ref": "#/components/schemas/Order"},
        "x-tag": "paid",
    }
    assert document["components"]["schemas"]["Order"]["required"] == ["id"]


def test_what_a_handler_publishes_is_an_operation_with_its_delay() -> None:
    document = document_of(bill)

    sent = document["operations"]["bill-publishes"]
    assert sent["messages"] == [{"$ref": "#/channels/bills/messages/new"}]
    assert sent["x-delay"] == "5s"
    assert document["channels"]["bills"]["messages"]["new"]["payload"] == {"$ref": "#/components/schemas/Bill"}


def test_a_listener_that_returns_a_value_replies() -> None:
    """The address of the reply is in the request, so the channel has no address."""
    document = document_of(price)

    reply = document["operations"]["price"]["reply"]
    assert reply["channel"] == {"$ref": "#/channels/prices-reply"}
    assert document["channels"]["prices-reply"]["address"] is None
    [message] = document["channels"]["prices-reply"]["messages"].values()
    assert message["payload"] == {"type": "object", "additionalProperties": {"type": "integer"}}
    assert document["channels"]["prices"]["messages"]["str"]["contentType"] == "text/plain"


def test_methods_for_tags_have_their_own_payloads() -> None:
    document = document_of(Statistics)

    messages = document["channels"]["orders"]["messages"]
    operation = document["operations"]["Statistics"]
    assert messages["paid"]["payload"] == {"$ref": "#/components/schemas/Order"}
    assert messages["lost"]["payload"]["type"] == "object"
    assert operation["x-consume-mode"] == "ORDERLY"
    assert operation["summary"] == "Count orders."
    assert "reply" not in operation


def test_two_payloads_of_one_tag_are_two_messages() -> None:
    @message_listener("orders", "other", selector_expression="paid")
    def other(payload: dict[str, str]) -> None: ...

    document = document_of(bill, other)

    assert list(document["channels"]["orders"]["messages"]) == ["paid", "refunded", "paid-dict-str-str"]


def test_a_listener_of_whole_messages_knows_no_payload() -> None:
    document = document_of(audit)

    assert document["channels"]["orders"]["messages"] == {"message": {"name": "message", "title": "message"}}
    assert "components" not in document


def test_what_code_sends_is_declared() -> None:
    document = document_of(Shop)

    assert document["operations"]["Shop-place-2"]["x-delay"] == "3h"
    assert document["channels"]["reminders"]["address"] == "reminders"
    assert document["operations"]["Shop-quote"]["x-delay-level"] == 3
    assert document["operations"]["Shop-quote"]["reply"]["messages"] == [
        {"$ref": "#/channels/quotes-reply/messages/Bill"}
    ]


def test_schedules_are_listed_and_their_topic_is_not_a_channel() -> None:
    document = document_of(clean)

    assert document["x-schedules"] == [{"name": "clean", "trigger": "every 10m"}]
    assert document["channels"] == {}


def test_the_servers_are_the_name_servers_of_the_cluster() -> None:
    document = document_of(bill, **{"rocketmq.name-server": "mq1:9876;mq2:9876"})

    assert [server["host"] for server in document["servers"].values()] == ["mq1:9876", "mq2:9876"]


def test_classes_of_one_name_have_two_schemas() -> None:
    order = type("Order", (BaseModel,), {"__annotations__": {"code": str}, "__module__": "other"})

    def other(payload: Any) -> None: ...

    other.__annotations__["payload"] = order
    document = document_of(bill, message_listener("others", "others")(other))

    channels = document["channels"]
    refs = [
        channels["orders"]["messages"]["paid"]["payload"]["$ref"],
        channels["others"]["messages"]["Order"]["payload"]["$ref"],
    ]
    assert len(set(refs)) == 2
    assert all(ref.rpartition("/")[2] in document["components"]["schemas"] for ref in refs)


def test_the_official_schema_finds_a_wrong_document() -> None:
    """A guard that cannot fail proves nothing."""
    document = document_of(bill)
    document["operations"]["bill"]["action"] = "wait"

    with pytest.raises(jsonschema.ValidationError, match="'wait'"):
        jsonschema.validate(document, schema())


def test_an_application_that_was_neither_checked_nor_started_is_an_error() -> None:
    with pytest.raises(DependencyError, match="the application is not started"):
        asyncapi_document(MQApplication(bill, settings=MEMORY))


def test_a_placeholder_without_a_value_names_the_function() -> None:
    @service
    class Sender:
        @documents_send("orders", delay="${no.delay}")
        def send(self) -> None: ...

    with pytest.raises(ConfigurationError, match=r"@documents_send on .*Sender.send: .*no\.delay"):
        document_of(Sender)


def test_a_destination_is_text() -> None:
    with pytest.raises(DestinationError, match="@documents_send: destination must be 'topic' or 'topic:tag', got 7"):
        documents_send(7)  # type: ignore[arg-type]


def test_the_document_of_the_shop_is_valid_and_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with its Spark listener; neither the database nor the store is created."""
    monkeypatch.chdir(tmp_path)
    app = MQTemplate(*shop.COMPONENTS, Sales, config_folder=shop.HERE).new_application()
    app.check()

    document = asyncapi_document(app, title="shop", version="1.0.0")

    jsonschema.validate(document, schema())
    assert list(tmp_path.iterdir()) == []
    assert document["operations"]["Sales"]["x-spark"] is True
    assert document["operations"]["ReceiptDesk-receipt"]["reply"] == document["operations"]["Receipts"]["reply"]
    assert set(document["channels"]["orders"]["messages"]) == {"placed", "cancelled", "paid"}
