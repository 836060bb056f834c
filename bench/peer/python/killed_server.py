"""Send, receive, acknowledge and change the invisible time while the server is killed and started again.

Arguments: proxy, topic and group to receive from, topic to send to, seed. It prints one JSON line before each request
and one after its answer. The line ``drain`` on standard input ends the sends, and all messages are acknowledged then;
the end of standard input ends the program.

It runs in the environment of `bench.peer.python_client`.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import threading
import time

from rocketmq import (  # type: ignore[import-not-found]
    ClientConfiguration,
    Credentials,
    FilterExpression,
    Message,
    Producer,
    SimpleConsumer,
)

_AWAIT_S = 5
_INVISIBLE_S = 10
_PAUSE_S = 0.02
_PAUSE_AFTER_ERROR_S = 0.2


def now_ms() -> int:
    return int(time.time() * 1_000)


class Program:
    """A producer and a simple consumer, which go on after each failure."""

    def __init__(self, proxy: str, received: str, sent: str, seed: str) -> None:
        self._configuration = ClientConfiguration(proxy, Credentials())
        self._received, self._sent, self._name = received, sent, seed
        self._chance = random.Random(seed)
        self._lock = threading.Lock()
        self.is_draining = False

    def _print(self, event: str, **fields: object) -> None:
        with self._lock:
            print(json.dumps({"event": event, **fields}), flush=True)

    def send(self) -> None:
        """Send numbered messages, one after the other."""
        producer = self._started(lambda: Producer(self._configuration, (self._sent,)))
        for number in itertools.count():
            if self.is_draining:
                return
            message = Message()
            message.topic, body = self._sent, f"p-{self._name}-{number}"
            message.body = body.encode()
            try:
                producer.send(message)
            except Exception as error:
                self._print("failed", request="send", error=f"{type(error).__name__}: {error}")
                time.sleep(_PAUSE_AFTER_ERROR_S)
            else:
                self._print("sent", body=body)
            time.sleep(_PAUSE_S)

    def receive(self) -> None:
        """Receive messages, and handle them in all ways of this client."""
        subscription = {self._received: FilterExpression()}
        consumer = self._started(
            lambda: SimpleConsumer(self._configuration, self._received, subscription, await_duration=_AWAIT_S)
        )
        for number in itertools.count():
            started_ms = now_ms()
            try:
                messages = consumer.receive(self._chance.choice((1, 4, 16)), _INVISIBLE_S) or ()
            except Exception as error:
                self._print("failed", request="receive", error=f"{type(error).__name__}: {error}")
                time.sleep(_PAUSE_AFTER_ERROR_S)
                continue
            for message in messages:
                self._print(
                    "received",
                    body=message.body.decode(),
                    handle=message.receipt_handle,
                    attempt=message.delivery_attempt,
                    started_ms=started_ms,
                    number=number,
                )
            for message in messages:
                self._handle(consumer, message)

    def _handle(self, consumer: SimpleConsumer, message: Message) -> None:
        body, handle, chance = message.body.decode(), message.receipt_handle, self._chance.random()
        if self.is_draining or chance < 0.7:
            self._print("acking", body=body, handle=handle)
            if self._did(lambda: consumer.ack(message), "ack", body, handle):
                self._print("acked", body=body)
        elif chance < 0.95:
            seconds = self._chance.choice((1, 2))
            self._print("changing", body=body, visible_ms=now_ms() + seconds * 1_000)
            if self._did(lambda: consumer.change_invisible_duration(message, seconds), "change", body, handle):
                self._print("changed", body=body, handle=handle, changed=message.receipt_handle)

    def _did(self, request: object, name: str, body: str, handle: str) -> bool:
        """Return True if a request was answered by OK."""
        try:
            request()
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            self._print("failed", request=name, body=body, handle=handle, error=text, now_ms=now_ms())
            return False
        return True

    def _started(self, create: object) -> object:
        """Return a client that has started. The server must be there: a start without it leaves a useless client."""
        while True:
            client = create()
            try:
                client.startup()
            except Exception as error:
                self._print("failed", request="startup", error=f"{type(error).__name__}: {error}")
                time.sleep(_PAUSE_AFTER_ERROR_S)
            else:
                self._print("started")
                return client


def main(proxy: str, received: str, sent: str, seed: str) -> None:
    program = Program(proxy, received, sent, seed)
    for work in (program.send, program.receive):
        threading.Thread(target=work, daemon=True).start()
    for line in sys.stdin:
        if line.strip() == "drain":
            program.is_draining = True


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # The client's threads may still run.
