"""One process of an application that sends, cancels and receives delayed messages. A test controls it by lines of JSON.

``python -m tests.server.shop_process <name server>`` prints ``"ready"``. It reads one request in a line, such as
``["cancel", "<handle>"]``, and prints one response; ``["received"]`` returns the bodies that its listener got. All
processes are members of one group.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from types import TracebackType
from typing import Any, Self

from mqtemplate import MQApplication, message_listener

_TOPIC = "orders"
_received: list[str] = []
_lock = threading.Lock()


@message_listener(topic=_TOPIC, consumer_group="billing")
def bill(body: str) -> None:
    with _lock:
        _received.append(body)


def main(name_server: str) -> None:
    logging.disable(logging.CRITICAL)
    with MQApplication(bill, settings={"rocketmq.name-server": name_server, "rocketmq.producer.group": "shop"}) as app:
        template = app.template
        verbs = {
            "send": lambda key: template.sync_send(_TOPIC, key, delay="1d", keys=key).handle,
            "cancel": lambda handle: template.cancel(handle).status.name,
            "cancel_key": lambda key: template.cancel(key=key, topic=_TOPIC).status.name,
            "deliver_now": lambda handle: template.reschedule(handle).status.name,
            "pending": lambda: [message.keys for message in template.pending(_TOPIC, max_count=1_000).messages],
            "count": lambda: template.count_pending(_TOPIC).total,
            "received": lambda: list(_received),
        }
        _answer("ready")
        for line in sys.stdin:
            verb, *arguments = json.loads(line)
            _answer(verbs[verb](*arguments))


def _answer(value: object) -> None:
    print("answer " + json.dumps(value), file=sys.__stdout__, flush=True)


class ShopProcess:
    """A process of the application, used by a test."""

    def __init__(self, name_server: object) -> None:
        command = [sys.executable, "-m", "tests.server.shop_process", str(name_server)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def wait_until_ready(self) -> None:
        assert self._read() == "ready"

    def ask(self, verb: str, *arguments: str) -> Any:
        """Return the response to a request."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([verb, *arguments]) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        """Return the next response; log lines are skipped."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        raise AssertionError("the process has ended")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._process.kill()
        self._process.communicate()


if __name__ == "__main__":
    main(*sys.argv[1:])
