"""Cases of the conformance tests with RocketMQ's Python client. `tests.conformance.grpc_clients.programs` has the list.

Arguments: ENDPOINT PREFIX CASES plain|tls [ACCESS_KEY SECRET_KEY]...
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from rocketmq import (  # type: ignore[import-not-found]
    ClientConfiguration,
    ConsumeResult,
    Credentials,
    FilterExpression,
    Message,
    MessageListener,
    Producer,
    PushConsumer,
    SimpleConsumer,
    TransactionChecker,
    TransactionResolution,
)
from rocketmq.grpc_protocol import FilterType  # type: ignore[import-not-found]

_TIMEOUT_S = 90
_AWAIT_S = 5
_INVISIBLE_S = 10
_CHANGED_S = 15
_PAUSE_S = 0.5


class Deliveries:
    """Deliveries of a consumer. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._found: list[dict] = []
        self._first_s: dict[str, float] = {}

    def add(self, message: Message, start_s: float) -> int:
        """Add a delivery by a call that started at *start_s*, and return how often its body was delivered."""
        body, now_s = message.body.decode(), time.time()
        with self._changed:
            first_s = self._first_s.setdefault(body, start_s)
            after_ms = int((now_s - first_s) * 1_000)
            self._found.append({"body": body, "attempt": message.delivery_attempt, "after_ms": after_ms})
            self._changed.notify_all()
            return sum(each["body"] == body for each in self._found)

    def wait(self, count: int) -> list[dict]:
        """Return the deliveries when there are *count* of them, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._found) >= count, _TIMEOUT_S)
            return list(self._found)

    def bodies(self, count: int) -> list[str]:
        return [each["body"] for each in self.wait(count)]


class Listener(MessageListener):
    """Listener that fails where *fails* says so, by body and number of the delivery."""

    def __init__(self, fails: Callable[[str, int], bool] = lambda body, delivery: False) -> None:
        self.deliveries = Deliveries()
        self._fails = fails

    def consume(self, message: Message) -> ConsumeResult:
        delivery = self.deliveries.add(message, time.time())
        return ConsumeResult.FAILURE if self._fails(message.body.decode(), delivery) else ConsumeResult.SUCCESS


class Checker(TransactionChecker):
    """Checker that commits each transaction."""

    def __init__(self) -> None:
        self.checked: list[str] = []

    def check(self, message: Message) -> TransactionResolution:
        self.checked.append(message.body.decode())
        return TransactionResolution.COMMIT


class Program:
    """The cases, each with clients of its own."""

    def __init__(self, endpoint: str, prefix: str, *, tls: bool, accounts: list[Credentials]) -> None:
        self._configuration = ClientConfiguration(endpoint, accounts[0])
        self._accounts = [Program(endpoint, prefix, tls=tls, accounts=[each]) for each in accounts[1:]]
        self._prefix = prefix
        self._tls = tls
        self._receive_s = 0.0
        self.receive_errors: list[str] = []

    # --- clients -----------------------------------------------------------------------------------

    @contextmanager
    def _started(self, client: object) -> Iterator[None]:
        client.startup()
        try:
            yield
        finally:
            client.shutdown()

    @contextmanager
    def _producer(self, case: str, checker: TransactionChecker | None = None) -> Iterator[Producer]:
        producer = Producer(self._configuration, (self._prefix + case,), checker=checker, tls_enable=self._tls)
        with self._started(producer):
            yield producer

    @contextmanager
    def _simple(
        self, case: str, group: str = "", expression: FilterExpression | None = None
    ) -> Iterator[SimpleConsumer]:
        subscription = {self._prefix + case: expression or FilterExpression()}
        name = f"{self._prefix}{group or case}-group"
        consumer = SimpleConsumer(
            self._configuration, name, subscription, await_duration=_AWAIT_S, tls_enable=self._tls
        )
        with self._started(consumer):
            yield consumer

    @contextmanager
    def _push(self, case: str, listener: Listener) -> Iterator[None]:
        subscription = {self._prefix + case: FilterExpression()}
        name = f"{self._prefix}{case}-group"
        with self._started(PushConsumer(self._configuration, name, listener, subscription, tls_enable=self._tls)):
            yield

    def _message(self, case: str, body: str, tag: str | None = None) -> Message:
        message = Message()
        message.topic = self._prefix + case
        message.body = body.encode()
        if tag:
            message.tag = tag
        return message

    def _received(self, consumer: SimpleConsumer) -> Iterator[Message]:
        """Receive messages until the time is over. A call that failed is repeated."""
        end_s = time.monotonic() + _TIMEOUT_S
        while time.monotonic() < end_s:
            self._receive_s = time.time()
            try:
                messages = consumer.receive(16, _INVISIBLE_S) or ()
            except Exception as error:
                self.receive_errors.append(f"{type(error).__name__}: {error}")
                threading.Event().wait(_PAUSE_S)
            else:
                yield from messages

    def _receive(self, consumer: SimpleConsumer, count: int) -> list[Message]:
        """Receive and acknowledge messages until there are *count* of them, or the time is over."""
        found: list[Message] = []
        for message in self._received(consumer):
            consumer.ack(message)
            found.append(message)
            if len(found) == count:
                break
        return found

    # --- cases -------------------------------------------------------------------------------------

    def normal(self) -> dict:
        message = self._message("normal", "hello", "paid")
        message.keys = "k-1"
        message.keys = "k-2"
        message.add_property("color", "red")
        with self._producer("normal") as producer:
            sent = producer.send(message)
        with self._simple("normal") as consumer:
            [found] = self._receive(consumer, 1)
        received = {
            "id": found.message_id,
            "body": found.body.decode(),
            "tag": found.tag,
            "keys": sorted(found.keys),
            "properties": dict(found.properties),
            "attempt": found.delivery_attempt,
        }
        return {"sent": sent.message_id, "received": received}

    def fifo(self) -> dict:
        with self._producer("fifo") as producer:
            for number in range(4):
                for group in "ab":
                    message = self._message("fifo", f"{group} {number}")
                    message.message_group = group
                    producer.send(message)
        listener = Listener()
        with self._push("fifo", listener):
            return {"received": listener.deliveries.bodies(8)}

    def delay(self) -> dict:
        message = self._message("delay", "delayed")
        message.delivery_timestamp = int(time.time()) + 4
        with self._producer("delay") as producer, self._simple("delay") as consumer:
            producer.send(message)
            [found] = self._receive(consumer, 1)
            received_ms = int(time.time() * 1_000)
        deliver_ms = message.delivery_timestamp * 1_000
        return {"deliver_ms": deliver_ms, "received_ms": received_ms, "body": found.body.decode()}

    def transaction(self) -> dict:
        checker = Checker()
        with self._producer("transaction", checker) as producer, self._simple("transaction") as consumer:
            for body in ("committed", "rolled back", "checked"):
                transaction = producer.begin_transaction()
                producer.send(self._message("transaction", body), transaction)
                if body == "committed":
                    transaction.commit()
                if body == "rolled back":
                    transaction.rollback()
            received = [message.body.decode() for message in self._receive(consumer, 2)]
        return {"received": sorted(received), "checked": checker.checked}

    def simple(self) -> dict:
        with self._producer("simple") as producer:
            for body in ("acked", "changed", "expires"):
                producer.send(self._message("simple", body))
        deliveries = Deliveries()
        with self._simple("simple") as consumer:
            for count, message in enumerate(self._received(consumer), 1):
                body, delivery = message.body.decode(), deliveries.add(message, self._receive_s)
                if body == "acked" or delivery > 1:
                    consumer.ack(message)
                elif body == "changed":
                    consumer.change_invisible_duration(message, _CHANGED_S)
                if count == 5:
                    break
        return {"deliveries": deliveries.wait(0)}

    def push(self) -> dict:
        with self._producer("push") as producer:
            for body in ("ok", "fails once", "fails always"):
                producer.send(self._message("push", body))
        listener = Listener(lambda body, delivery: body == "fails always" or (body == "fails once" and delivery == 1))
        with self._push("push", listener):
            return {"deliveries": listener.deliveries.wait(6)}

    def filter(self) -> dict:
        with self._producer("filter") as producer:
            for body, tag, amount in (("b", "open", "50"), ("a", "paid", "5"), ("c", "late", "500")):
                message = self._message("filter", body, tag)
                message.add_property("amount", amount)
                producer.send(message)
        found = {}
        for name, expression in (
            ("tags", FilterExpression("paid || late")),
            ("sql", FilterExpression("amount > 10", FilterType.SQL)),
        ):
            with self._simple("filter", f"filter-{name}", expression) as consumer:
                found[name] = sorted(message.body.decode() for message in self._receive(consumer, 2))
        return found

    def recall(self) -> dict:
        sent = []
        with self._producer("recall") as producer, self._simple("recall") as consumer:
            for body, seconds in (("recalled", 9), ("kept", 10)):
                message = self._message("recall", body)
                message.delivery_timestamp = int(time.time()) + seconds
                sent.append(producer.send(message))
            recalled = producer.recall_message(f"{self._prefix}recall", sent[0].recall_handle)
            received = [message.body.decode() for message in self._receive(consumer, 1)]
        return {"sent": sent[0].message_id, "recalled": recalled, "received": received}

    def rights(self) -> dict:
        programs = [self, *self._accounts]
        with ThreadPoolExecutor(len(programs)) as pool:
            return {"outcomes": list(pool.map(Program._outcomes, programs))}

    def _outcomes(self) -> dict:
        return {"send": _outcome(self._send_one), "receive": _outcome(self._receive_one)}

    def _send_one(self) -> None:
        with self._producer("rights") as producer:
            producer.send(self._message("rights", "hello"))

    def _receive_one(self) -> None:
        with self._simple("rights") as consumer:
            for message in self._received_once(consumer):
                consumer.ack(message)

    def _received_once(self, consumer: SimpleConsumer) -> list[Message]:
        """Call ``receive`` once more while RocketMQ's proxy has not read the settings, which come by another stream."""
        end_s = time.monotonic() + _TIMEOUT_S
        while True:
            try:
                return consumer.receive(1, _INVISIBLE_S) or []
            except Exception as error:
                if '"settings" is null' not in str(error) or time.monotonic() > end_s:
                    raise
                threading.Event().wait(_PAUSE_S)


def _outcome(call: Callable[[], None]) -> str:
    """Return "ok", or the error of a call."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "ok"


def _exit_with_standard_input() -> None:
    while os.read(0, 1_024):
        pass
    os._exit(1)


def main(endpoint: str, prefix: str, cases: str, transport: str, *keys: str) -> None:
    threading.Thread(target=_exit_with_standard_input, daemon=True).start()
    accounts = [Credentials(*pair) for pair in zip(keys[::2], keys[1::2], strict=True)] or [Credentials()]
    program = Program(endpoint, prefix, tls=transport == "tls", accounts=accounts)
    for case in cases.split(","):
        program.receive_errors.clear()
        try:
            result = getattr(program, case)() | {"receive_errors": program.receive_errors}
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"case": case} | result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # The client's threads may still run.
