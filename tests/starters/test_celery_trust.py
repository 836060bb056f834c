"""Starter of Celery: which messages in the topic of the tasks are published, and which ones are not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery

from mqtemplate import MQApplication
from mqtemplate.errors import ConfigurationError, MessageError
from mqtemplate.message import Message
from mqtemplate.testing import Harness, messages_in
from mqtemplate_starter_celery import MQTemplate, delay_tasks, task_forwarder
from mqtemplate_starter_celery.tasks import StoredTask, TaskTrust
from tests.starters.test_celery import Queues

pytestmark = pytest.mark.mqtemplate(start="now", raise_handler_errors=False)

KEY, FORMER = "0123456789abcdef", "fedcba9876543210"
FORGED: dict[str, Any] = {
    "body": "[[], {}, {}]",
    "is_binary": False,
    "content_type": "application/json",
    "content_encoding": "utf-8",
    "headers": {"task": "shop.remind", "id": "1", "lang": "py", "eta": None},
    "queue": None,
    "exchange": "",
    "routing_key": "celery",
    "compression": None,
    "delivery_mode": 2,
    "properties": {},
}

Start = Callable[..., MQTemplate]


@pytest.fixture
def celery() -> Celery:
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.task_default_queue = f"celery-{uuid4()}"

    @app.task(name="shop.remind", shared=False)
    def remind(*_: object) -> None: ...

    return app


@pytest.fixture
def queues(celery: Celery) -> Queues:
    return Queues(celery)


@pytest.fixture
def start(celery: Celery, mqtemplate_applications: list[MQApplication]) -> Iterator[Start]:
    """Function that starts the starter, as the main process of a worker does."""
    started: list[MQTemplate] = []

    def start(**options: Any) -> MQTemplate:
        messages = MQTemplate(app=celery, **options)
        messages.start()
        started.append(messages)
        return messages

    yield start
    for messages in started:
        messages.stop()


def forge(celery: Celery, **changed: Any) -> bytes:
    """Return the body of a task that another program writes."""
    queue = celery.conf.task_default_queue
    return json.dumps({**FORGED, "queue": queue, "routing_key": queue, **changed}).encode()


def deliver(messages: MQTemplate, *bodies: bytes, **properties: str) -> list[str]:
    """Send messages to the topic of the tasks, and return why they were dead letters."""
    broker = messages.template.broker
    for body in bodies:
        broker.sends.send(Message("celery-eta", body, properties))
    Harness(messages.application, raise_handler_errors=False).advance("1m")
    return [each.user_properties["dead_letter_message"] for each in messages_in(broker, "%DLQ%celery-eta")]


def test_a_content_type_that_the_application_does_not_accept_is_a_dead_letter(
    celery: Celery, queues: Queues, start: Start
) -> None:
    """A worker that accepted it would run what another program wrote."""
    for_pickle = forge(celery, content_type="application/x-python-serialize", is_binary=True, body="gASVAAAA")
    yaml = forge(celery, content_type="application/x-yaml", body="[[], {}, {}]")
    other = forge(celery, content_type="text/html")

    reasons = deliver(start(), for_pickle, yaml, other)

    assert queues.take() == []
    assert len(reasons) == 3
    assert sum("is pickled, and a pickled body runs code of who wrote it" in each for each in reasons) == 1
    assert sum("accepts application/json; add it to accept_content" in each for each in reasons) == 2


def test_pickle_is_refused_without_a_key_though_the_application_accepts_it(
    celery: Celery, queues: Queues, start: Start
) -> None:
    celery.conf.accept_content = ["json", "pickle"]
    messages = start()

    reasons = deliver(messages, forge(celery, content_type="application/x-python-serialize", is_binary=True, body=""))

    assert len(reasons) == 1
    assert queues.take() == []
    with pytest.raises(MessageError, match=r"is pickled, .*; give MQTemplate a signing_key="):
        celery.tasks["shop.remind"].apply_async((1,), countdown=60, serializer="pickle")


def test_a_queue_that_the_application_does_not_have_is_a_dead_letter(
    celery: Celery, queues: Queues, start: Start
) -> None:
    celery.conf.task_create_missing_queues = False
    messages = start()

    queue, exchange = deliver(messages, forge(celery, queue="admin"), forge(celery, queue=None, exchange="amq.topic"))

    assert {"the queue of the task is 'admin'", "the exchange of the task is 'amq.topic'"} == {
        text.partition(",")[0] for text in (queue, exchange)
    }


def test_an_exchange_that_is_not_of_the_queue_is_a_dead_letter(celery: Celery, start: Start) -> None:
    """Also where the application may create queues."""
    [reason] = deliver(start(), forge(celery, queue="mails", exchange="amq.topic"))

    assert "the exchange of the task is 'amq.topic'" in reason


def test_with_a_key_only_signed_tasks_are_published(celery: Celery, queues: Queues, start: Start) -> None:
    messages = start(signing_key=KEY)
    celery.tasks["shop.remind"].apply_async((1,), countdown=30)

    reasons = deliver(messages, forge(celery), forge(celery, body="[[2], {}, {}]"))

    assert [task.payload[0] for task in queues.take()] == [[1]]
    assert len(reasons) == 2
    assert all("has no signature of a signing_key: another program sent it" in each for each in reasons)


def test_a_signature_covers_each_byte_of_the_task_and_the_topic(
    celery: Celery, queues: Queues, start: Start, mqtemplate_applications: list[MQApplication]
) -> None:
    """A program that can read the topic cannot change a task, or run it in another application with the same key."""
    messages = start(signing_key=KEY)
    celery.tasks["shop.remind"].apply_async((1,), countdown=3_600)
    [pending] = messages.template.pending(topic="celery-eta").messages
    broker = messages.template.broker
    [stored] = broker.reader.messages_by_key("rmq_sys_wheel_timer", pending.msg_id, 1, unique=True)
    signature = stored.properties["celery_signature"]
    elsewhere = start(signing_key=KEY, topic="other-eta")

    changed = stored.body.replace(b"[1]", b"[2]")
    reasons = deliver(messages, changed, celery_signature=signature)
    elsewhere.template.broker.sends.send(Message("other-eta", stored.body, {"celery_signature": signature}))
    Harness(elsewhere.application, raise_handler_errors=False).advance("1m")

    assert changed != stored.body
    assert len(reasons) == 1
    assert len(messages_in(elsewhere.template.broker, "%DLQ%other-eta")) == 1
    assert queues.take() == []


@pytest.mark.parametrize("signature", ["", "0" * 64, "\u00e9", "x"])
def test_another_signature_is_refused(celery: Celery, queues: Queues, start: Start, signature: str) -> None:
    reasons = deliver(start(signing_key=KEY), forge(celery), **({"celery_signature": signature} if signature else {}))

    assert len(reasons) == 1
    assert queues.take() == []


def test_a_key_is_changed_without_losing_the_tasks_that_wait(celery: Celery, queues: Queues, start: Start) -> None:
    """The former key stands behind the new one until its tasks are due."""
    body = forge(celery, body="[[1], {}, {}]")
    former = TaskTrust("celery-eta", FORMER).headers(StoredTask.read(body), body)

    reasons = deliver(start(signing_key=[KEY, FORMER]), body, **former)

    assert reasons == []
    assert [task.payload[0] for task in queues.take()] == [[1]]


def test_a_short_key_is_refused(celery: Celery) -> None:
    with pytest.raises(ConfigurationError, match="must have 16 characters or more, one has 5; create one with"):
        MQTemplate(app=celery, signing_key="short")
    with pytest.raises(ConfigurationError, match="must have 16 characters or more"):
        delay_tasks(celery, lambda: None, signing_key=[KEY, ""])  # type: ignore[arg-type,return-value]
    with pytest.raises(ConfigurationError, match="must have 16 characters or more"):
        task_forwarder(celery, signing_key="short")


def wrong_bodies(celery: Celery) -> Iterator[bytes]:
    yield from (b"", b"null", b"[]", b"\xff", b"[" * 100_000, b'{"a":' * 50_000, b"9" * 5_000, b"{}")
    wrong: dict[str, list[Any]] = {
        "body": [None, 1, []],
        "is_binary": [1, None, "true"],
        "content_type": [None, 1],
        "content_encoding": [None, "rot13", 1],
        "headers": [None, [], {}, {"task": 1}],
        "queue": [1, []],
        "exchange": [None, 1],
        "routing_key": [1],
        "compression": ["zip", 1],
        "delivery_mode": [3, "x"],
        "properties": [None, [], {"serializer": "pickle"}, {"headers": {}}, {"exchange": "x"}, {"declare": []}],
    }
    for name, values in wrong.items():
        yield from (forge(celery, **{name: value}) for value in values)
    yield forge(celery, is_binary=True, body="no base64!")
    yield forge(celery, more=1)


def test_each_body_that_no_call_of_celery_stores_is_a_dead_letter(celery: Celery, queues: Queues, start: Start) -> None:
    """Not an error that is tried again, and nothing that ends the forwarder."""
    bodies = list(wrong_bodies(celery))
    messages = start()

    reasons = deliver(messages, *bodies)
    celery.tasks["shop.remind"].apply_async((1,), countdown=30)
    Harness(messages.application, raise_handler_errors=False).advance("1m")

    assert len(reasons) == len(bodies)
    assert all(reason.startswith("the message is not a task of Celery: ") for reason in reasons)
    assert [task.payload[0] for task in queues.take()] == [[1]]
