"""The examples of web frameworks, with the test clients of the frameworks and a virtual clock."""

from __future__ import annotations

from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from examples.fastapi_orders.app import web
from examples.flask_orders.app import create_app
from mqtemplate import MQApplication
from mqtemplate.testing import Harness
from tests.programs import run_python

DJANGO = """
import pytest
from django.test import Client
from examples.django_orders.orders.models import Order

def test_an_order_is_reminded(mqtemplate_applications, mqtemplate_harness, db, capsys):
    assert Client().get("/orders/ada").json() == {"order": 1}
    mqtemplate_harness.advance("3h")

    assert "please pay order 1 of ada" in capsys.readouterr().out
    assert Order.objects.get().is_reminded
"""

CONFTEST = """
import os
import pytest

os.environ["DJANGO_SETTINGS_MODULE"] = "examples.django_orders.settings"
import django
django.setup()

@pytest.fixture
def db():
    from django.test.utils import setup_databases, teardown_databases
    databases = setup_databases(verbosity=0, interactive=False)
    yield
    teardown_databases(databases, verbosity=0)
"""


def test_fastapi_reminds_and_cancels(
    mqtemplate_applications: list[MQApplication], mqtemplate_harness: Harness, capsys: pytest.CaptureFixture[str]
) -> None:
    with TestClient(web) as client:
        for order_id in ("A1", "A2"):
            client.post(f"/orders/{order_id}", json={"customer": "Ada", "cents": 320}).raise_for_status()
        cancelled = client.delete("/orders/A2/reminder").json()
        mqtemplate_harness.advance("3h")

    assert cancelled == {"status": "cancelled"}
    assert capsys.readouterr().out == "Ada, please pay 3.20 for order A1\n"


def test_flask_reminds(
    mqtemplate_applications: list[MQApplication], mqtemplate_harness: Harness, capsys: pytest.CaptureFixture[str]
) -> None:
    response = create_app().test_client().post("/orders/A1", json={"customer": "Ada"})
    mqtemplate_harness.advance("3h")

    assert response.status_code == 202
    assert capsys.readouterr().out == "Ada, please pay order A1 in EUR\n"


def test_django_reminds(tmp_path: Path) -> None:
    """In a process of its own: the settings of Django belong to a process."""
    (tmp_path / "conftest.py").write_text(CONFTEST, "utf-8")
    (tmp_path / "test_orders.py").write_text(DJANGO, "utf-8")

    done = run_python(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", ".", bare=True)

    assert "1 passed" in done.stdout, done.stdout + done.stderr
