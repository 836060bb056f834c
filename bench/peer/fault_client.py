"""A producer or a consumer of this library with default settings, for `bench.cluster_faults`. `Faults.java` is alike.

    python -m bench.peer.fault_client producer NAME_SERVERS PREFIX PAUSE_MS
    python -m bench.peer.fault_client consumer NAME_SERVERS PREFIX

The producer has three streams: ``plain`` (synchronous), ``async``, and ``keys`` (synchronous, with a hash key). A
consumer has a concurrent listener for the first two and an ORDERLY one for the third. They print a line for each event:

    ok END_MS START_MS ID, fail END_MS START_MS ID     a send
    got MS BROKER/QUEUE ID                             a message that a handler has received
"""

from __future__ import annotations

import itertools
import logging
import sys
import threading
import time
from collections.abc import Callable

from mqtemplate.brokers import RemoteBroker, RemoteSettings
from mqtemplate.converter import JsonMessageConverter
from mqtemplate.errors import MQTemplateError
from mqtemplate.listener import ConsumeMode, ListenerRegistry, message_listener
from mqtemplate.message import MessageExt
from mqtemplate.results import SendResult, SendStatus
from mqtemplate.template import RocketMQTemplate

KEYS = 8
_lock = threading.Lock()


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def write(line: str) -> None:
    with _lock:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


class Producer:
    """The three streams of sends."""

    def __init__(self, template: RocketMQTemplate, prefix: str, pause_ms: int) -> None:
        self._template = template
        self._prefix = prefix
        self._pause_s = pause_ms / 1_000

    def start(self) -> None:
        for stream in (self._plain, self._async, self._keyed):
            threading.Thread(target=self._run, args=(stream,), daemon=True).start()

    def _run(self, send: Callable[[int], None]) -> None:
        for number in itertools.count():
            send(number)
            time.sleep(self._pause_s)

    def _plain(self, number: int) -> None:
        id_ = f"plain/{number}"
        self._reported(id_, lambda: self._template.sync_send(f"{self._prefix}-plain", id_))

    def _keyed(self, number: int) -> None:
        key = f"k{number % KEYS}"
        id_ = f"keys/{key}/{number}"
        self._reported(id_, lambda: self._template.sync_send(f"{self._prefix}-keys", id_, hash_key=key))

    def _async(self, number: int) -> None:
        id_, start_ms = f"async/{number}", now_ms()
        future = self._template.async_send(f"{self._prefix}-plain", id_)
        future.add_done_callback(
            lambda done: _report(id_, start_ms, None if done.exception() else done.result(), done.exception())
        )

    def _reported(self, id_: str, send: Callable[[], SendResult]) -> None:
        start_ms = now_ms()
        try:
            _report(id_, start_ms, send(), None)
        except MQTemplateError as exc:
            _report(id_, start_ms, None, exc)


def _report(id_: str, start_ms: int, result: SendResult | None, error: BaseException | None) -> None:
    is_ok = result is not None and result.send_status is SendStatus.SEND_OK
    if error is not None:
        print(id_, error, file=sys.stderr, flush=True)
    write(f"{'ok' if is_ok else 'fail'} {now_ms()} {start_ms} {id_}")


def consume(broker: RemoteBroker, prefix: str) -> None:
    """Start the two listeners."""

    @message_listener(
        topic=f"{prefix}-plain",
        consumer_group=f"{prefix}-plain-group",
        consume_from_where="CONSUME_FROM_FIRST_OFFSET",
    )
    def on_plain(message: MessageExt) -> None:
        got(message)

    @message_listener(
        topic=f"{prefix}-keys",
        consumer_group=f"{prefix}-keys-group",
        consume_from_where="CONSUME_FROM_FIRST_OFFSET",
        consume_mode=ConsumeMode.ORDERLY,
    )
    def on_keyed(message: MessageExt) -> None:
        got(message)

    def got(message: MessageExt) -> None:
        write(f"got {now_ms()} {message.broker_name}/{message.queue_id} {message.body.decode()}")

    registry = ListenerRegistry(broker, JsonMessageConverter())
    registry.register(on_plain)
    registry.register(on_keyed)
    registry.start()


def main(role: str, name_servers: str, prefix: str, pause_ms: str = "20") -> None:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    with RemoteBroker(RemoteSettings(name_servers=tuple(name_servers.split(";")))) as broker:
        if role == "producer":
            Producer(RocketMQTemplate(broker), prefix, int(pause_ms)).start()
        else:
            consume(broker, prefix)
        write("ready")
        threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
