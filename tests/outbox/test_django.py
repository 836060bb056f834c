"""Outbox and inbox in Django. Django's settings belong to a process, so each test runs a program of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.feature("X15")

SET_UP = """
import sys
import django
from django.conf import settings
from django.core.management import call_command
from django.db import connection, models, transaction

engine, name, port = sys.argv[1:]
address = {"USER": "postgres", "HOST": "127.0.0.1", "PORT": port}
database = {"ENGINE": f"django.db.backends.{engine}", "NAME": name, **address}
settings.configure(INSTALLED_APPS=["mqtemplate.outbox.django"], DATABASES={"default": database}, USE_TZ=True)
django.setup()
call_command("migrate", verbosity=0)
call_command("makemigrations", "--check", "--dry-run", verbosity=0)  # the migrations match the models

from mqtemplate import EmbeddedBroker, MQApplication, MessageExt, RocketMQTemplate, message_listener, service
from mqtemplate.outbox.django import DjangoInbox, DjangoOutbox
from mqtemplate.outbox.django.models import InboxMessage, OutboxMessage

IN_MEMORY = {"rocketmq.name-server": "embedded:memory"}
"""

OUTBOX = """
import queue
received = queue.Queue()

@message_listener(topic="orders", consumer_group="billing")
def bill(text: str) -> None:
    received.put(text)

@service
def outbox(template: RocketMQTemplate) -> DjangoOutbox:
    return DjangoOutbox(template)

with MQApplication(bill, outbox, settings=IN_MEMORY, environment={}) as app:
    outbox = app.get(DjangoOutbox)
    try:
        with transaction.atomic():
            outbox.send("orders", "rolled back")
            raise OSError
    except OSError:
        pass
    with transaction.atomic():
        outbox.send("orders", "committed", keys="7")
        print("rows before the commit:", OutboxMessage.objects.count())
    print("received:", received.get(timeout=60))
print("rows left:", OutboxMessage.objects.count(), "more received:", received.qsize())
"""

CHANGES = """
from mqtemplate.clock import VirtualClock
from mqtemplate.errors import ConfigurationError
from mqtemplate.testing import Harness
from mqtemplate.testing.recording import messages_in

@service
def outbox(template: RocketMQTemplate) -> DjangoOutbox:
    return DjangoOutbox(template)

with MQApplication(outbox, settings=IN_MEMORY, environment={}, clock=VirtualClock()) as app:
    outbox, template, harness = app.get(DjangoOutbox), app.template, Harness(app)
    with transaction.atomic():
        for key in "abcdef":
            outbox.send("orders", key, delay="2h", keys=key)
        outbox.cancel(key="a")
        outbox.reschedule(key="b", delay="5h")
    try:
        with transaction.atomic():
            outbox.cancel(key="c")
            raise OSError
    except OSError:
        pass
    print("cancelled:", template.cancel(key="d").status.name)
    with transaction.atomic():
        outbox.cancel(key="f")
        outbox.send("orders", "the next f", delay="2h", keys="f")
        print("moved:", template.reschedule(key="e", delay="5h").status.name)
    harness.add(outbox.relay)
    for span in ("3h", "3h"):
        harness.advance(span)
        print("delivered:", sorted(message.body.decode() for message in messages_in(app.broker, "orders")))
    print("rows left:", OutboxMessage.objects.count())
    call_command("migrate", "mqtemplate_outbox", "0001", verbosity=0)
    try:
        outbox.on_start()
    except ConfigurationError as error:
        print(error)
    call_command("migrate", verbosity=0)
    outbox.on_start()
"""

INBOX = """
from mqtemplate.errors import ConfigurationError

inbox = DjangoInbox()
for attempt in range(3):
    try:
        with transaction.atomic():
            print("new:", inbox.is_new("A1", "billing"))
            if attempt == 0:
                raise OSError
    except OSError:
        print("rolled back")
try:
    inbox.is_new("A2", "billing")
except ConfigurationError as error:
    print(error)
print("recorded:", InboxMessage.objects.count())
"""


MIDDLEWARE = """
import threading
from mqtemplate import ConsumeStatus, Message
from mqtemplate.errors import ListenerError
from mqtemplate.outbox.django import DjangoInboxMiddleware

calls, done = [], threading.Event()

def bill(text: str) -> ConsumeStatus:
    calls.append(text)
    OutboxMessage.objects.create(msg_id=text, topic="effect", properties="", body=b"", created_ms=0)
    if len(calls) == 1:
        raise OSError("after the effect, before the commit")
    if text == "the end":
        threading.Timer(0, done.set).start()
    return ConsumeStatus.RECONSUME_LATER if len(calls) == 2 else ConsumeStatus.CONSUME_SUCCESS

once = DjangoInboxMiddleware()
decorate = message_listener("orders", "billing", consume_mode="ORDERLY", retry=["10ms", "10ms"], middlewares=[once])

with MQApplication(decorate(bill), settings=IN_MEMORY, environment={}) as app:
    for key, body in (("A1", b"paid"), ("A1", b"paid"), ("A2", b"the end")):
        app.broker.sends.send(Message("orders", body, {"UNIQ_KEY": key}), app.broker.queues("orders")[0])
    done.wait(60)
print("calls:", calls)
print("effects:", list(OutboxMessage.objects.order_by("id").values_list("msg_id", flat=True)))
print("recorded:", InboxMessage.objects.count())

async def receive(text: str) -> None: ...
def receive_batch(texts: list[str]) -> None: ...

for handler in (receive, receive_batch):
    try:
        MQApplication(decorate(handler), settings=IN_MEMORY, environment={}).start()
    except ListenerError as error:
        print(str(error).partition(": ")[2])
"""


@pytest.fixture(params=["sqlite3", "postgresql"])
def arguments(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """Engine, name and port of an empty database."""
    if request.param == "sqlite3":
        return ["sqlite3", str(tmp_path / "shop.db"), ""]
    url: str = request.getfixturevalue("postgres")
    port = url.rpartition(":")[2].partition("/")[0]
    name = f"django_{request.node.originalname[5:12]}"
    subprocess.run(["createdb", "-h", "127.0.0.1", "-p", port, "-U", "postgres", name], check=True)
    return ["postgresql", name, port]


def run(program: str, arguments: list[str], folder: Path) -> list[str]:
    (folder / "shop.py").write_text(SET_UP + program, "utf-8")
    done = subprocess.run(
        [sys.executable, "shop.py", *arguments], cwd=folder, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_messages_are_sent_after_the_commit_only(arguments: list[str], tmp_path: Path) -> None:
    assert run(OUTBOX, arguments, tmp_path) == [
        "rows before the commit: 1",
        "received: committed",
        "rows left: 0 more received: 0",
    ]


def test_cancels_and_moves_are_part_of_the_transaction(arguments: list[str], tmp_path: Path) -> None:
    """And the template changes what is in the outbox; in a transaction also what is not committed yet."""
    assert run(CHANGES, arguments, tmp_path) == [
        "cancelled: CANCELLED",
        "moved: RESCHEDULED",
        "delivered: ['c', 'the next f']",
        "delivered: ['b', 'c', 'e', 'the next f']",
        "rows left: 0",
        (
            "table mqtemplate_outbox has no column change_key, since an older version created it; upgrade it with "
            "Alembic or 'manage.py migrate', or execute 'ALTER TABLE mqtemplate_outbox ADD COLUMN change_key "
            "VARCHAR(255)'"
        ),
    ]


def test_a_repeat_is_recognised_after_the_commit_only(arguments: list[str], tmp_path: Path) -> None:
    """Without a transaction the record and the effect would be separate."""
    assert run(INBOX, arguments, tmp_path) == [
        "new: True",
        "rolled back",
        "new: True",
        "new: False",
        "an inbox needs the transaction of the effect; write 'with transaction.atomic():' around both",
        "recorded: 1",
    ]


def test_the_middleware_stores_effect_and_id_together(arguments: list[str], tmp_path: Path) -> None:
    """The first call raises, the second one requests its message again, the third one succeeds; a repeat is dropped."""
    assert run(MIDDLEWARE, arguments, tmp_path) == [
        "calls: ['paid', 'paid', 'paid', 'the end']",
        "effects: ['paid', 'the end']",
        "recorded: 2",
        "transactions of Django are not async; write the handler with 'def'",
        (
            "the middleware of an inbox handles one message in one transaction, and the handler takes batches; "
            "call is_new of the inbox for each message in the handler"
        ),
    ]
