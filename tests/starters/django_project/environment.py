"""``conftest.py`` of the copy: Django is set up, each test has empty tables and a virtual clock."""

# ruff: noqa: E402  # models are imported when Django is set up

from __future__ import annotations

import os

import pytest

os.environ["DJANGO_SETTINGS_MODULE"] = "settings"
import django

django.setup()

from django.test.utils import override_settings, setup_databases, teardown_databases
from jobs import tasks
from jobs.models import Effect

from mqtemplate.outbox.django.models import InboxMessage, OutboxMessage
from mqtemplate_starter_django.project import messages, outbox
from mqtemplate_starter_django.tasks.models import TaskRecord


@pytest.fixture(scope="session")
def database():
    databases = setup_databases(verbosity=0, interactive=False)
    yield
    teardown_databases(databases, verbosity=0)


@pytest.fixture(autouse=True)
def empty_tables(database):
    for model in (TaskRecord, Effect, InboxMessage, OutboxMessage):
        model.objects.all().delete()
    tasks.RAN.clear()


@pytest.fixture
def worker(empty_tables, mqtemplate_applications, mqtemplate_harness):
    """The application with the listeners of the tasks, in virtual time. It returns the harness."""
    with override_settings(MQTEMPLATE={"rocketmq.name-server": "embedded:memory", "mqtemplate.listener.enabled": True}):
        mqtemplate_harness.add(outbox().relay)
        yield mqtemplate_harness
        messages().stop()


@pytest.fixture
def sender(empty_tables, mqtemplate_applications, mqtemplate_harness):
    """The application of a process that only enqueues."""
    with override_settings(MQTEMPLATE={"rocketmq.name-server": "embedded:memory"}):
        yield mqtemplate_harness
        messages().stop()
