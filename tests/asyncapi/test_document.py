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
    MessageRequestMode,
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
from tests.golden import check_script, scripts_in

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


@message_listener("orders", "audit", request_mode=MessageRequestMode.POP)
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


@message_listener("orders", "other", selector_expression="paid")
def other(payload: dict[str, str]) -> None: ...


COMPONENTS: dict[str, Any] = {each.__name__: each for each in (bill, price, audit, other, clean, Statistics, Shop)}


class DocumentScript:
    """The commands of a script: parts of the document of an application."""

    def application(self, *names: str, **settings: str) -> None:
        """Create the document of an application with these components."""
        self.document = document_of(*(COMPONENTS[name] for name in names), **settings)

    def show(self, *path: str) -> list[str]:
        """Print a part of the document: a text alone, a list by item, an object by member."""
        part: Any = self.document
        for name in path:
            part = part.get(name, "missing")
        if isinstance(part, dict):
            return [f"{name}: {json.dumps(value)}" for name, value in part.items()]
        return [json.dumps(part)]

    def members(self) -> list[str]:
        return [" ".join(self.document)]


@pytest.mark.parametrize("script", scripts_in(HERE / "scripts"), ids=lambda path: path.stem)
def test_the_document_has_what_the_script_says(script: Path) -> None:
    check_script(script, DocumentScript())


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
