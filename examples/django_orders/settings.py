"""Settings of the project."""

from __future__ import annotations

import os
from pathlib import Path

OUT = Path("out/django_orders")
OUT.mkdir(parents=True, exist_ok=True)

SECRET_KEY = "only for this example"
DEBUG = True
ALLOWED_HOSTS = ["127.0.0.1", "localhost", "testserver"]
ROOT_URLCONF = "examples.django_orders.urls"
INSTALLED_APPS = [
    "mqtemplate_starter_django",
    "mqtemplate.outbox.django",
    "examples.django_orders.orders",
]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": OUT / "orders.db"}}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True

MQTEMPLATE = {
    # One process: it serves requests and runs listeners. For several ones see docs/web/django.md.
    "rocketmq.name-server": os.environ.get("ORDERS_BROKER", f"embedded:{OUT / 'store'}"),
    "mqtemplate.listener.enabled": True,
}
