"""The example celery_eta: the same reminders by Celery, by the bridge, and by a listener."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.celery_eta.after import Orders, remind
from mqtemplate import ScheduleChangeStatus
from mqtemplate.testing import Harness, StartApp
from tests.programs import run_python

BRIDGED = """
import pytest
from examples.celery_eta.bridged import celery, messages, paid, place_order, place_order_until_monday

pytestmark = pytest.mark.mqtemplate(start="now")

def tasks():
    with celery.connection_for_read() as connection:
        channel = connection.default_channel
        celery.amqp.default_queue.bind(channel).declare()
        found = []
        while (message := channel.basic_get("celery", no_ack=True)) is not None:
            found.append((message.headers["task"], message.payload[0]))
        return found

def test_a_reminder_waits_and_can_be_cancelled(mqtemplate_applications, mqtemplate_harness):
    messages.start()
    place_order("1", "Ada")
    place_order_until_monday("2", "Bob")
    cancelled = place_order("3", "Cleo")

    assert paid(cancelled).status.name == "CANCELLED"
    assert tasks() == []
    mqtemplate_harness.advance("3h 1m")
    assert tasks() == [("remind", ["1", "Ada"])]
    mqtemplate_harness.advance("3d")
    assert tasks() == [("remind", ["2", "Bob"])]
    messages.stop()
"""


def test_the_bridge_holds_the_reminders_back(tmp_path: Path) -> None:
    """In a process of its own: the Celery application of the example belongs to a process."""
    (tmp_path / "test_bridged.py").write_text(BRIDGED, "utf-8")

    done = run_python(
        tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", ".", bare=True, CELERY_BROKER="memory://"
    )

    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_the_listener_reminds_and_a_payment_cancels(
    mqtemplate_app: StartApp, mqtemplate_harness: Harness, capsys: pytest.CaptureFixture[str]
) -> None:
    orders = mqtemplate_app(remind, Orders).get(Orders)
    orders.place_order("1", "Ada")
    orders.place_order("2", "Bob")

    answer = orders.paid("2")
    mqtemplate_harness.advance("3h")

    assert answer.status is ScheduleChangeStatus.CANCELLED
    assert capsys.readouterr().out == "Ada, please pay order 1\n"
