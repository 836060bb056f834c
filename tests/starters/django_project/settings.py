"""Settings of the project that runs the tests of Django's tasks: a copy of this folder in a process of its own."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

BASE_DIR = Path(__file__).parent
SECRET_KEY = "test"
INSTALLED_APPS = [
    "mqtemplate_starter_django",
    "mqtemplate_starter_django.tasks",
    "mqtemplate.outbox.django",
    *(["django_tasks"] if find_spec("django.tasks") is None else []),
    "jobs",
]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": BASE_DIR / "jobs.db"}}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
ALLOWED_HOSTS = ["*"]
ROOT_URLCONF = "urls"
BACKEND = "mqtemplate_starter_django.MQTemplateBackend"
TASKS = {
    "default": {"BACKEND": BACKEND, "QUEUES": ["default", "queue_1"], "OPTIONS": {"THREADS": 1}},
    "once": {"BACKEND": BACKEND, "OPTIONS": {"EFFECT_ONCE": True, "MAX_ATTEMPTS": 2}},
    "any": {"BACKEND": BACKEND, "QUEUES": []},
}
MQTEMPLATE = {
    "rocketmq.name-server": "embedded:./store",
    "CONFIG_FOLDER": BASE_DIR,
}
