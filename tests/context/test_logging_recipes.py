"""The dictionary of docs/logging.md in the programs that the page names: each line is shown once, with its text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.fences import DOCS, fences
from tests.programs import OF_AN_APPLICATION, ForkedPython

BLOCKS = [fence.text for fence in fences(DOCS / "logging.md") if "LOGGING" in fence.text]
SENTRY = next(fence.text for fence in fences(DOCS / "logging.md") if "def by_event" in fence.text)
WORK = """
import logging
import logging.config
from mqtemplate import MQApplication, message_listener

@message_listener("orders", "billing")
def bill(order: str) -> None:
    logging.getLogger("shop").info("paid %s", order)
    raise LookupError("no stock")

def work() -> None:
    from mqtemplate.testing import Harness
    from mqtemplate.clock import VirtualClock

    settings = {"rocketmq.name-server": "embedded:memory"}
    with MQApplication(bill, settings=settings, clock=VirtualClock()) as app:
        app.template.sync_send("orders", "A-1")
        Harness(app, raise_handler_errors=False).run_until_idle()
"""
PROGRAMS = {
    "a script": "logging.config.dictConfig(LOGGING)",
    "Django": "import django.conf; django.conf.settings.configure(LOGGING=LOGGING); import django; django.setup()",
    "uvicorn": "import uvicorn; uvicorn.Config('shop:app', log_config=LOGGING)",
    "gunicorn": """
from gunicorn.config import Config
from gunicorn.glogging import Logger
config = Config()
config.set("logconfig_dict", LOGGING | {"loggers": {}})
Logger(config)
""",
}
MODULES = {"Django": "django", "uvicorn": "uvicorn", "gunicorn": "gunicorn"}


@pytest.fixture(scope="module")
def python() -> Iterator[ForkedPython]:
    with ForkedPython(modules=OF_AN_APPLICATION) as python:
        yield python


def lines_of(python: ForkedPython, folder: Path, dictionary: str, configure: str) -> list[dict[str, Any]]:
    done = python.run(folder, f"{WORK}\n{dictionary}\n{configure}\nwork()")
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stderr.splitlines()]


@pytest.mark.parametrize("program", PROGRAMS)
def test_each_program_shows_its_own_lines_and_those_of_the_library(
    python: ForkedPython, tmp_path: Path, program: str
) -> None:
    if program in MODULES:
        pytest.importorskip(MODULES[program])

    lines = lines_of(python, tmp_path, BLOCKS[0], PROGRAMS[program])

    events = [line["event"] for line in lines if line["logger"].startswith(("shop", "mqtemplate"))]
    assert events == ["application.ready", "paid A-1", "listener.failed"]
    paid = next(line for line in lines if line["logger"] == "shop")
    assert (paid["topic"], paid["group"]) == ("orders", "billing")


def test_python_json_logger_shows_the_text_of_an_event_as_its_message(python: ForkedPython, tmp_path: Path) -> None:
    pytest.importorskip("pythonjsonlogger", reason="python-json-logger is not installed")

    ready, paid, failed = lines_of(python, tmp_path, "\n".join(BLOCKS[:2]), PROGRAMS["a script"])

    assert ready["message"].startswith("application.ready broker=")
    assert paid["message"] == "paid A-1"
    assert failed["message"].startswith("listener.failed listener=")
    assert (failed["topic"], failed["group"]) == ("orders", "billing")


def test_sentry_gets_the_exception_of_a_handler_and_groups_other_errors_by_their_event(
    python: ForkedPython, tmp_path: Path
) -> None:
    pytest.importorskip("sentry_sdk", reason="sentry-sdk is not installed")
    setup = SENTRY.replace("before_send=by_event", "transport=lambda each: None, before_send=note")
    note = """
import json, sys, sentry_sdk
def note(event, hint):
    event = by_event(event, hint)
    kinds = [each["type"] for each in event.get("exception", {}).get("values", ())]
    print(json.dumps({"fingerprint": event.get("fingerprint"), "exception": kinds}), file=sys.stderr)
"""
    log = """
from mqtemplate.event_log import get_logger
get_logger("mqtemplate.store").error("store.flush_failed", offset=7)
logging.getLogger("mqtemplate").propagate = False  # the events are read here, not the lines
"""
    done = python.run(tmp_path, f"{WORK}\n{note}\n{setup}\n{log}\nwork()")

    found = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    assert found == [
        {"fingerprint": ["mqtemplate.store", "store.flush_failed"], "exception": []},
        {"fingerprint": None, "exception": ["LookupError"]},
    ]
