"""Starter of Celery: delayed tasks on a virtual clock, over kombu's broker in memory; and in a real worker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery, chain, signals
from kombu.exceptions import OperationalError
from kombu.serialization import prepare_accept_content

from mqtemplate import MQApplication, ScheduleChangeStatus, VirtualClock
from mqtemplate.errors import StoreLockedError
from mqtemplate.testing import Harness, messages_in
from mqtemplate_starter_celery import MQTemplate, delay_tasks

pytestmark = pytest.mark.mqtemplate(start="now")


class Queues:
    """The queues of Celery's broker, as a worker would read them."""

    def __init__(self, app: Celery) -> None:
        self.app = app
        self._connection = app.connection_for_read()

    def take(self, queue: str | None = None) -> list[Any]:
        """Return the messages of a queue and remove them."""
        channel = self._connection.default_channel
        self.app.amqp.queues[queue or self.app.conf.task_default_queue].bind(channel).declare()
        found = []
        while (message := channel.basic_get(queue or self.app.conf.task_default_queue, no_ack=True)) is not None:
            message.accept = prepare_accept_content(["json", "yaml", "pickle"])
            found.append(message)
        return found

    def names(self, queue: str | None = None) -> list[str]:
        return [message.headers["task"] for message in self.take(queue)]


def new_celery() -> Celery:
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.task_default_queue = f"celery-{uuid4()}"  # kombu's memory is shared by all connections of the process
    app.conf.result_backend = "cache+memory://"
    app.conf.accept_content = ["json", "yaml", "pickle"]

    @app.task(name="shop.remind", bind=True, shared=False)
    def remind(self: Any, order: int, text: str = "please pay") -> str:
        return f"{text} {order}, planned for {self.request.get('mqtemplate_eta')}"

    @app.task(name="shop.bill", shared=False)
    def bill(*_: object) -> None: ...

    return app


@pytest.fixture
def celery() -> Celery:
    return new_celery()


@pytest.fixture
def remind(celery: Celery) -> Any:
    return celery.tasks["shop.remind"]


@pytest.fixture
def messages(celery: Celery, mqtemplate_applications: list[MQApplication]) -> Iterator[MQTemplate]:
    """The starter, as the main process of a worker runs it: it sends and forwards."""
    messages = MQTemplate(app=celery)
    messages.start()
    yield messages
    messages.stop()


@pytest.fixture
def queues(celery: Celery) -> Queues:
    return Queues(celery)


@pytest.mark.usefixtures("messages")
def test_a_task_with_a_countdown_waits_in_mqtemplate(queues: Queues, remind: Any, mqtemplate_harness: Harness) -> None:
    result = remind.apply_async((4466,), countdown=3_600)
    mqtemplate_harness.advance("59m 59s")
    early = queues.take()
    mqtemplate_harness.advance("1s 50ms")  # Celery counts from its own call, a moment after the start of the clock
    mqtemplate_harness.advance("30s")

    [task] = queues.take()
    assert early == []
    assert task.headers["id"] == result.id
    assert task.payload[0] == [4466]
    assert task.headers["eta"] is None
    assert datetime.fromisoformat(task.headers["mqtemplate_eta"]) > datetime.now(UTC) + timedelta(minutes=59)


@pytest.mark.usefixtures("messages")
def test_a_task_is_never_early(
    queues: Queues, remind: Any, mqtemplate_harness: Harness, mqtemplate_clock: VirtualClock
) -> None:
    """An eta has microseconds, a message milliseconds: it is rounded up."""
    at_ms = mqtemplate_clock.now_ms() + 86_400_000
    remind.apply_async((1,), eta=datetime.fromtimestamp(at_ms / 1_000, UTC) + timedelta(microseconds=1))

    mqtemplate_harness.advance("24h")
    early = queues.take()
    mqtemplate_harness.advance("1ms")

    assert early == []
    assert queues.names() == ["shop.remind"]


@pytest.mark.usefixtures("messages")
def test_a_task_without_an_eta_goes_to_celery_at_once(queues: Queues, remind: Any, mqtemplate_harness: Harness) -> None:
    remind.delay(1)
    remind.apply_async((2,), eta=datetime.now(UTC) - timedelta(hours=1))

    assert queues.names() == ["shop.remind"] * 2


@pytest.mark.usefixtures("messages")
def test_routing_serializer_priority_and_expiry_are_those_of_the_call(
    celery: Celery, queues: Queues, remind: Any, mqtemplate_harness: Harness
) -> None:
    queue = f"mails-{uuid4()}"
    remind.apply_async(
        (1,), {"text": "grüezi"}, countdown=60, queue=queue, serializer="yaml", compression="gzip", priority=7,
        expires=3_600, headers={"tenant": "a"},
    )  # fmt: skip
    mqtemplate_harness.advance("2m")

    [task] = queues.take(queue)
    assert task.payload[:2] == [[1], {"text": "grüezi"}]
    assert (task.content_type, task.headers["compression"]) == ("application/x-yaml", "application/x-gzip")
    assert task.properties["priority"] == 7
    assert task.headers["tenant"] == "a"
    assert datetime.fromisoformat(task.headers["expires"]) > datetime.now(UTC) + timedelta(minutes=59)


def test_a_binary_serializer_works(
    celery: Celery, queues: Queues, remind: Any, mqtemplate_applications: list[MQApplication]
) -> None:
    messages = MQTemplate(app=celery, signing_key="0123456789abcdef")
    messages.start()
    remind.apply_async((b"\xff",), countdown=60, serializer="pickle")
    Harness(messages.application).advance("2m")
    messages.stop()

    [task] = queues.take()
    assert task.decode()[0] == (b"\xff",)


@pytest.mark.usefixtures("messages")
def test_send_task_and_canvases_wait_too(celery: Celery, queues: Queues, mqtemplate_harness: Harness) -> None:
    celery.send_task("shop.elsewhere", countdown=60)
    chain(celery.tasks["shop.remind"].si(1), celery.tasks["shop.bill"].si()).apply_async(countdown=60)

    before = queues.take()
    mqtemplate_harness.advance("2m")

    found = queues.take()
    assert before == []
    assert sorted(task.headers["task"] for task in found) == ["shop.elsewhere", "shop.remind"]
    [first] = [task for task in found if task.headers["task"] == "shop.remind"]
    assert [each["task"] for each in first.payload[2]["chain"]] == ["shop.bill"]


@pytest.mark.usefixtures("messages")
def test_signals_see_the_call_and_not_the_forwarding(remind: Any, mqtemplate_harness: Harness) -> None:
    """So what reads the context of the caller, such as tracing, reads the right one; and it acts once."""
    seen: list[str] = []

    def note(sender: str, headers: dict[str, Any], **_: Any) -> None:
        headers["trace"] = "abc"
        seen.append(sender)

    signals.before_task_publish.connect(note)
    try:
        remind.apply_async((1,), countdown=60)
        at_the_call = list(seen)
        mqtemplate_harness.advance("2m")
    finally:
        signals.before_task_publish.disconnect(note)

    assert at_the_call == seen == ["shop.remind"]


@pytest.mark.usefixtures("messages")
def test_an_event_about_a_task_goes_to_celery(celery: Celery, remind: Any, mqtemplate_harness: Harness) -> None:
    """``task-sent`` is published at the call, for Flower and the like."""
    celery.conf.task_send_sent_event = True
    events = []
    with celery.connection_for_read() as connection:
        receiver = celery.events.Receiver(connection, handlers={"task-sent": events.append})
        with receiver.consumer_context() as (consumed, _, _):
            remind.apply_async((1,), countdown=60)
            consumed.drain_events(timeout=10)

    assert [event["name"] for event in events] == ["shop.remind"]


def test_a_waiting_task_is_cancelled_for_good(
    messages: MQTemplate, queues: Queues, remind: Any, mqtemplate_harness: Harness
) -> None:
    task = remind.apply_async((1,), countdown=60)

    answer = messages.cancel(task.id)
    mqtemplate_harness.advance("2m")

    assert answer.status is ScheduleChangeStatus.CANCELLED
    assert queues.take() == []


def test_a_waiting_task_gets_another_time(
    messages: MQTemplate, queues: Queues, remind: Any, mqtemplate_harness: Harness
) -> None:
    task = remind.apply_async((1,), countdown=3_600)

    messages.reschedule(task.id, countdown="10s")
    mqtemplate_harness.advance("10s")

    assert queues.names() == ["shop.remind"]


def test_waiting_tasks_are_listed_by_name_and_time(messages: MQTemplate, remind: Any) -> None:
    task = remind.apply_async((1,), countdown=3_600)

    [pending] = messages.template.pending(topic="celery-eta", tag="shop.remind").messages

    assert pending.keys == task.id


def test_a_broker_of_celery_that_is_down_delays_tasks_and_loses_none(
    celery: Celery,
    messages: MQTemplate,
    queues: Queues,
    remind: Any,
    mqtemplate_harness: Harness,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pauses do not count as attempts: after an hour the message has all its retries left."""
    remind.apply_async((1,), countdown=60)

    def refuse(*_: Any, **__: Any) -> Any:
        raise OperationalError("connection refused")

    with monkeypatch.context() as down:
        down.setattr(celery, "producer_or_acquire", refuse)
        mqtemplate_harness.advance("1h")
    mqtemplate_harness.advance("10s")

    assert queues.names() == ["shop.remind"]
    assert [message.reconsume_times for message in messages_in(messages.template.broker, "celery-eta")] == [0]


@pytest.mark.mqtemplate(start="now", raise_handler_errors=False)
def test_a_message_that_is_no_task_is_a_dead_letter(messages: MQTemplate, mqtemplate_harness: Harness) -> None:
    messages.template.sync_send("celery-eta", "tea")

    mqtemplate_harness.run_until_idle()

    [dead] = messages_in(messages.template.broker, "%DLQ%celery-eta")
    assert "the message is not a task of Celery" in dead.user_properties["dead_letter_message"]


def test_a_process_that_only_sends_has_no_listener(
    celery: Celery, remind: Any, mqtemplate_applications: list[MQApplication]
) -> None:
    """A web process, or a child of a worker: it connects with its first task, and forwards none."""
    messages = MQTemplate(app=celery)
    before = list(mqtemplate_applications)

    remind.apply_async((1,), countdown=60)

    [sender] = mqtemplate_applications
    assert before == []
    assert sender.containers == ()
    messages.stop()


def test_a_second_process_with_the_folder_of_the_worker_is_named(tmp_path: Path, celery: Celery) -> None:
    """The broker belongs in a server when several processes send; the error of the second one says so."""
    settings = {"rocketmq.name-server": f"embedded:{tmp_path}"}
    with MQApplication(settings=settings):
        MQTemplate(app=celery, settings=settings)

        with pytest.raises(StoreLockedError, match="is in use by process"):
            celery.tasks["shop.remind"].apply_async((1,), countdown=60)


def test_the_parts_work_without_the_starter(celery: Celery, queues: Queues, mqtemplate_template: Any) -> None:
    """For a program that has a template already."""
    delay_tasks(celery, lambda: mqtemplate_template, topic="tasks")

    celery.tasks["shop.remind"].apply_async((1,), countdown=60)

    [sent] = mqtemplate_template.sent
    assert sent.destination == "tasks:shop.remind"
    assert json.loads(sent.payload)["headers"]["task"] == "shop.remind"
    assert queues.take() == []
