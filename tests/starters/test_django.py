"""Starter of Django. Its settings belong to a process, so each test runs a program or ``manage.py`` of its own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.programs import PATHS, run_python
from tests.running.program import Program

SETTINGS = """
from pathlib import Path

BASE_DIR = Path(__file__).parent
SECRET_KEY = "test"
INSTALLED_APPS = ["mqtemplate_starter_django", "mqtemplate.outbox.django", "orders"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": BASE_DIR / "shop.db"}}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
ROOT_URLCONF = "urls"
ALLOWED_HOSTS = ["*"]
MQTEMPLATE = {"rocketmq.name-server": "embedded:./store", "CONFIG_FOLDER": BASE_DIR}
"""

MODELS = """
from django.db import models

class Order(models.Model):
    state = models.TextField(default="new")
"""

LISTENERS = """
import threading

from django.db import connection

from mqtemplate import MessageExt, message_listener
from orders.models import Order

@message_listener(topic="orders", consumer_group="billing")
def bill(order_id: int, message: MessageExt) -> None:
    Order.objects.filter(id=order_id).update(state="billed")
    print("billed", order_id, flush=True)

@message_listener(topic="orders", consumer_group="shipping")
async def ship(order_id: int) -> None:
    await Order.objects.filter(id=order_id).aupdate(state="shipped")
    print("shipped", order_id, flush=True)
"""

MANAGE = """
import os
import sys

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "settings")

if __name__ == "__main__":
    from django.core.management import execute_from_command_line

    execute_from_command_line(sys.argv)
"""

SET_UP = """
import os
os.environ["DJANGO_SETTINGS_MODULE"] = "settings"
import django
django.setup()
from django.core.management import call_command
from django.db import connection, transaction
from orders.models import Order
import mqtemplate_starter_django as mq
call_command("migrate", "--run-syncdb", verbosity=0)
"""

SEND = """
try:
    with transaction.atomic():
        mq.send_on_commit("orders", Order.objects.create().id)
        raise OSError
except OSError:
    print("rolled back")
with transaction.atomic():
    mq.send_on_commit("orders", Order.objects.create().id, on_sent=lambda result: print(result.send_status.value))
    print("in the transaction")
with transaction.atomic():
    mq.outbox().send("orders", Order.objects.create().id)
print("listeners:", len(mq.application().containers))
"""


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A Django project with the app ``orders``."""
    (tmp_path / "orders").mkdir()
    files = {"settings": SETTINGS, "urls": "urlpatterns = []", "manage": MANAGE, "orders/__init__": ""}
    files |= {"orders/models": MODELS, "orders/listeners": LISTENERS}
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text, "utf-8")
    return tmp_path


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in the project until it ends, with warnings as errors."""
    return run_python(folder, "-W", "error", *arguments, PYTHONPATH=f"{PATHS}:{folder}")


def lines(folder: Path, program: str) -> list[str]:
    """Run a program in the project, and return the lines that it prints."""
    done = python(folder, "-c", SET_UP + program)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_messages_are_sent_after_the_commit_and_listeners_run_in_a_process_of_their_own(shop: Path) -> None:
    """A process of a web server sends only; ``manage.py mqtemplate run`` handles."""
    printed = lines(shop, SEND)
    with Program(shop, "manage", "mqtemplate", "run") as program:
        program.wait_for(r"^billed \d$", 2)
        program.wait_for(r"^shipped \d$", 2)
        code = program.stop()

    assert printed == ["rolled back", "in the transaction", "SEND_OK", "listeners: 0"]
    assert code == 0
    assert program.output.count("billed") == 2  # not the one that was rolled back
    assert lines(shop, "print(Order.objects.filter(state='new').count())") == ["0"]


def test_the_listeners_of_all_apps_are_found_and_a_key_runs_them_in_any_process(shop: Path) -> None:
    text = SETTINGS.replace('"CONFIG_FOLDER"', '"mqtemplate.listener.enabled": True, "CONFIG_FOLDER"')
    (shop / "settings.py").write_text(text, "utf-8")

    printed = lines(shop, "print(sorted(each.endpoint.id for each in mq.application().containers))")

    assert printed == ["['orders.listeners.bill', 'orders.listeners.ship']"]


def test_old_connections_are_closed_around_handlers(shop: Path) -> None:
    """A thread of a listener ends no request, so Django itself would never do it."""
    program = """
from mqtemplate import MQApplication, message_listener
import queue
open_connections = queue.Queue()

@message_listener(topic="orders", consumer_group="billing", consume_thread_number=1, consume_thread_max=1)
def bill(order: str) -> None:
    open_connections.put(connection.connection is not None)
    Order.objects.count()

with MQApplication(bill, settings={"rocketmq.name-server": "embedded:memory"}, environment={}) as app:
    for order in ("A1", "A2"):
        app.template.sync_send("orders", order)
    print([open_connections.get(timeout=60) for _ in range(2)])
"""
    assert lines(shop, program) == ["[False, False]"]


def test_check_starts_nothing(shop: Path) -> None:
    done = python(shop, "manage.py", "check")

    assert (done.returncode, done.stdout) == (0, "System check identified no issues (0 silenced).\n"), done.stderr
    assert not (shop / "store").exists()


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ('{"rocketmq.name-servr": "x"}', "rocketmq.name-servr: no such key; did you mean 'rocketmq.name-server'?"),
        ('{"PROFILE": ["prod"]}', "settings.MQTEMPLATE has an unknown name 'PROFILE'; did you mean 'PROFILES'?"),
        ('{"XY": 1}', "has an unknown name 'XY'; allowed are COMPONENTS, CONFIG_FOLDER, PROFILES and keys of"),
        ('"embedded"', "settings.MQTEMPLATE must be a mapping, got 'embedded'; write {'rocketmq.name-server': ...}"),
    ],
)
def test_check_reports_invalid_settings(shop: Path, setting: str, text: str) -> None:
    (shop / "settings.py").write_text(f"{SETTINGS}\nMQTEMPLATE = {setting}\n", "utf-8")

    done = python(shop, "manage.py", "check")

    assert done.returncode == 1
    assert "(mqtemplate.E001)" in done.stderr
    assert text in done.stderr


def test_run_check_builds_the_application(shop: Path) -> None:
    done = python(shop, "manage.py", "mqtemplate", "run", "--check", "--listeners", "bill")

    assert done.returncode == 0, done.stderr
    assert "is valid: listener orders.listeners.bill;" in done.stdout
    assert not (shop / "store").exists()


def test_an_unknown_listener_is_an_error_of_the_command(shop: Path) -> None:
    done = python(shop, "manage.py", "mqtemplate", "run", "--check", "--listeners", "pack")

    assert done.returncode == 1
    assert "ListenerError: mqtemplate.listener.only selects 'pack'" in done.stderr


def test_the_outbox_needs_its_app(shop: Path) -> None:
    (shop / "settings.py").write_text(SETTINGS.replace('"mqtemplate.outbox.django", ', ""), "utf-8")
    program = """
from mqtemplate.errors import ConfigurationError
try:
    mq.outbox()
except ConfigurationError as error:
    print(error)
"""
    assert lines(shop, program) == [
        "the outbox needs its tables; add 'mqtemplate.outbox.django' to INSTALLED_APPS and run 'manage.py migrate'"
    ]


def test_the_template_cancels_what_is_in_the_outbox(shop: Path) -> None:
    """The first cancel is before the commit, so that no relay can have sent the message."""
    program = """
with transaction.atomic():
    mq.outbox().send("orders", 7, delay="1h", keys="7")
    change = mq.template().cancel(key="7")
    print(change.status.name, change.count)
with transaction.atomic():
    mq.outbox().send("orders", 8, delay="1h", keys="8")
    mq.outbox().cancel(key="8")
outbox = mq.outbox()
outbox.on_stop()
outbox.relay.step()
print(len(mq.template().pending("orders").messages))
"""
    assert lines(shop, program) == ["CANCELLED 1", "0"]


def test_a_changed_setting_is_read_again(shop: Path) -> None:
    """Django's tests change settings; the messages of the process follow."""
    program = """
from django.test.utils import override_settings
for name in ("a", "b"):
    with override_settings(MQTEMPLATE={"rocketmq.name-server": "embedded:memory", "rocketmq.producer.group": name}):
        print(mq.application().settings.rocketmq.producer.group)
"""
    assert lines(shop, program) == ["a", "b"]


def test_a_handler_uses_the_application_that_runs(shop: Path) -> None:
    """``template()`` in a handler does not start a second application, which could not open the same folder."""
    listeners = """
from mqtemplate import message_listener
import mqtemplate_starter_django as mq

@message_listener(topic="orders", consumer_group="billing")
def bill(order_id: int) -> None:
    if order_id < 3:
        mq.template().sync_send("orders", order_id + 1)
    print("billed", order_id, flush=True)
"""
    (shop / "orders" / "listeners.py").write_text(listeners, "utf-8")
    lines(shop, "mq.template().sync_send('orders', 1)")

    with Program(shop, "manage", "mqtemplate", "run") as program:
        program.wait_for("^billed 3$")
        code = program.stop()

    assert code == 0
    assert "StoreLockedError" not in program.output


def test_workers_share_the_directory_of_the_project(shop: Path) -> None:
    lines(shop, "mq.send_on_commit('orders', Order.objects.create().id)")
    with Program(shop, "manage", "mqtemplate", "run", "--workers", "2") as program:
        program.wait_for(r"is ready$", 2)
        program.wait_for("^billed 1$")
        code = program.stop()

    assert code == 0
