"""Sessions with a template, for golden scripts: lines of Python, and what they return or raise."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

from pydantic import BaseModel

from mqtemplate import (
    EmbeddedBroker,
    JsonMessageConverter,
    Message,
    MessageExt,
    MessageModel,
    SelectorType,
    TransactionState,
    VirtualClock,
    message_listener,
    transaction_listener,
)
from mqtemplate.listener import ListenerRegistry
from mqtemplate.message import MessageQueue
from mqtemplate.template.options import parse_destination, select_queue_by_hash
from mqtemplate.testing import Harness, RecordingTemplate, SentMessage, messages_in
from tests.hostile import FIRST, ZONES, Silent, Zone
from tests.sessions import Session
from tests.template.ledger import Ledger, check_async


class Order(BaseModel):
    id: int


class Price(BaseModel):
    article: str
    cents: int


class Plain:
    """A converter without charsets."""

    def to_body(self, payload: object) -> tuple[bytes, str | None]:
        return b"x", None

    def from_body(self, body: bytes, target_type: object, properties: object) -> object:
        return body

    def __repr__(self) -> str:
        return "Plain()"


class Callback:
    """A callback with the names of Spring."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def onSuccess(self, result: Price) -> None:
        self.calls.append(result)

    def onException(self, error: BaseException) -> None:
        self.calls.append(type(error).__name__)


def options_of(sent: SentMessage) -> dict[str, Any]:
    """Return the options that a call set."""
    return {name: value for name, value in sent.options.items() if value not in (None, 0, ())}


QUEUES = [MessageQueue("orders", "broker-a", queue_id) for queue_id in range(4)]
NOW_MS = VirtualClock().now_ms()
CLASSES = (
    *(
        Callback,
        Future,
        Ledger,
        Plain,
        Price,
        Message,
        MessageExt,
        MessageModel,
        MessageQueue,
        Order,
        SelectorType,
        Silent,
        Zone,
        datetime,
        timedelta,
    ),
)
NAMES: dict[str, Any] = {each.__name__: each for each in CLASSES} | {
    **TransactionState.__members__,
    "FIRST": FIRST,
    "NOW": datetime.fromtimestamp(NOW_MS / 1_000, UTC),
    "NOW_MS": NOW_MS,
    "ZONES": ZONES,
    "TOO_LARGE": bytes(4 * 1024 * 1024 + 1),
    "check_async": check_async,
    "messages_in": messages_in,
    "transaction_listener": transaction_listener,
    "parse_destination": parse_destination,
    "queue_of": lambda key: select_queue_by_hash(QUEUES, Message("orders", b""), key).queue_id,
    "options_of": options_of,
    "utc_minus_7": timezone(timedelta(hours=-7)),
}


class TemplateSession(Session):
    """Lines of Python over a template ``t``, its ``broker`` in memory and a ``harness``; values are shown, not None."""

    def __init__(self, undo: contextlib.ExitStack, logs: list[Any], names: Mapping[str, Any] | None = None) -> None:
        super().__init__(NAMES | dict(names or {}))
        self._undo = undo
        self._logs = logs
        self._known = dict(self.names)

    def template(self, **settings: str) -> None:
        """Open a broker and a template with a consumer and a producer group; the ones before are closed."""
        self._undo.close()
        self._broker = self._undo.enter_context(EmbeddedBroker(None, clock=VirtualClock()))
        self.names = self._known | {"broker": self._broker, "harness": Harness(self._broker), "another": self._another}
        given = {name: eval(text, self.names) for name, text in settings.items()}
        self.names["t"] = self._another(**given)
        self._logs.clear()

    def _another(self, **settings: Any) -> RecordingTemplate:
        groups = {"producer_group": "shop", "consumer_group": "billing", "consumer_topic": "orders"}
        return self._undo.enter_context(RecordingTemplate(self._broker, **groups | settings))

    def called(self, text: str) -> list[str]:
        """Run lines, each a send, and print which verb each one called with which options."""
        list(self.show(text))
        calls: list[SentMessage] = self.names["t"].sent
        return [f"{sent.verb} {sent.destination} {sent.payload} {options_of(sent)}" for sent in calls]

    def listen(self, *topics: str) -> None:
        """Start listeners that reply: ``prices``, and ``offers``, which itself requests a price."""
        template: RecordingTemplate = self.names["t"]

        def price_of(article: str) -> Price:
            return Price(article=article, cents=320)

        def make_offer(article: str) -> str:
            return f"{article} for {template.send_and_receive('prices', article, Price).cents}"

        registry = ListenerRegistry(self._broker, JsonMessageConverter())
        for topic in topics:
            handler: Any = price_of if topic == "prices" else make_offer
            [container] = registry.register(message_listener(topic, topic)(handler))
            self.names["harness"].add(container)
        self._undo.callback(registry.stop)
        registry.start()

    def stored(self, topic: str, *fields: str) -> list[str]:
        """Print the bodies of a topic, with these fields of each message."""
        messages = messages_in(self._broker, topic)
        return [
            " ".join([message.body.decode(), *(f"{name}={getattr(message, name)}" for name in fields)])
            for message in messages
        ] or ["nothing"]

    def logs(self, *fields: str) -> list[str]:
        """Print the errors in the log, with these fields."""
        events = [each for each in self._logs if each["log_level"] == "error"]
        return [
            " ".join([each["event"], *(f"{name}={each[name]}" for name in fields if name in each)]) for each in events
        ]
