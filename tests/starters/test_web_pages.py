"""The programs and tests in docs/web run as they stand."""

from __future__ import annotations

import re
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.programs import run_python

ROOT = Path(__file__).parents[2]
WEB = ROOT / "docs" / "web"

DJANGO_SETTINGS = """
from pathlib import Path

BASE_DIR = Path(__file__).parent
SECRET_KEY = "test"
ROOT_URLCONF = "urls"
ALLOWED_HOSTS = ["testserver"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": BASE_DIR / "shop.db"}}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
"""
DJANGO_CONFTEST = """
import os

import pytest

os.environ["DJANGO_SETTINGS_MODULE"] = "settings"
import django

django.setup()
from django.test.utils import setup_databases, teardown_databases


@pytest.fixture
def db():
    databases = setup_databases(verbosity=0, interactive=False)
    yield
    teardown_databases(databases, verbosity=0)
"""
DJANGO_MODELS = """
from django.db import models


class Order(models.Model):
    state = models.TextField(default="new")
"""
DJANGO_TEST = """
from django.test import Client
from orders.models import Order


def test_an_order_is_billed(db, mqtemplate_applications, mqtemplate_harness):
    number = Client().post("/orders").json()["order"]
    mqtemplate_harness.run_until_idle()

    assert Order.objects.get(pk=number).state == "billed"
"""
DJANGO_TASKS = """
import sys
from importlib.util import find_spec

if find_spec("django.tasks") is None:
    import django_tasks

    sys.modules["django.tasks"] = django_tasks  # as in Django 6
"""
DJANGO_TASKS_TEST = """
from datetime import UTC, datetime, timedelta

from django.test import override_settings
from mqtemplate_starter_django import outbox
from orders.tasks import remind


@override_settings(MQTEMPLATE={"rocketmq.name-server": "embedded:memory"})
def test_the_calls_of_the_page(db, mqtemplate_applications):
    # block
    result.refresh()
    assert result.status == "FAILED"  # cancelled


"""


def blocks(page: Path, language: str) -> list[str]:
    """Return the fenced blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", ["fastapi.md", "flask.md"])
def test_the_program_of_a_page_passes_its_test(page: str, tmp_path: Path) -> None:
    (tmp_path / "test_web.py").write_text("\n\n".join(blocks(WEB / page, "python")), "utf-8")

    done = run_python(tmp_path, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", ".", bare=True)

    assert "1 passed" in done.stdout, done.stdout + done.stderr


def write_files(folder: Path, **files: str) -> None:
    """Write modules of a Django project; two underscores in a name are a slash."""
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, "utf-8")


def run_project(folder: Path) -> str:
    """Run the tests of a Django project, and return what pytest prints."""
    write_files(folder, conftest=DJANGO_CONFTEST)
    done = run_python(
        folder, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", ".", MQTEMPLATE_LISTENER_ENABLED="true"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def with_apps(settings: str, *apps: str) -> str:
    """Return the settings of a page with the reader's own apps in the place of the dots."""
    assert "...," in settings
    return DJANGO_SETTINGS + settings.replace("...,", "".join(f"{app!r}, " for app in apps))


def test_the_project_of_the_page_on_django_bills_an_order_after_its_commit(tmp_path: Path) -> None:
    """Over a broker in memory, on a virtual clock, in a process of its own."""
    pytest.importorskip("django")
    settings, listeners, views = blocks(WEB / "django.md", "python")
    write_files(
        tmp_path,
        settings=with_apps(settings, "orders"),
        urls="from django.urls import path\nfrom orders.views import place\nurlpatterns = [path('orders', place)]",
        orders__models=DJANGO_MODELS,
        orders__listeners=listeners,
        orders__views=views,
        test_orders=DJANGO_TEST,
    )

    assert "1 passed" in run_project(tmp_path)


def test_the_project_of_the_page_on_tasks_reminds_after_three_hours(tmp_path: Path) -> None:
    pytest.importorskip("django")
    if find_spec("django.tasks") is None:
        pytest.importorskip("django_tasks", reason="this Django is older than 6 and has no tasks")
    settings, tasks, calls, once, test = blocks(WEB / "django-tasks.md", "python")
    backends, bill = once.split("\n\n\n")
    assert tasks.count("-> str: ...") == 1
    write_files(
        tmp_path,
        settings=with_apps(settings, *([] if find_spec("django.tasks") else ["django_tasks"]), "orders") + backends,
        urls="urlpatterns = []",
        orders__models=DJANGO_MODELS,
        orders__tasks=DJANGO_TASKS + tasks.replace("-> str: ...", "-> str:\n    return 'sent'") + "\n\n" + bill,
        test_tasks=DJANGO_TASKS_TEST.replace("    # block\n", textwrap.indent(calls, "    ")) + test,
    )

    assert "2 passed" in run_project(tmp_path)
