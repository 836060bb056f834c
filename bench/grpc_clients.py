"""The clients of `bench.grpc_kill`: threads with raw calls of the gRPC protocol, and RocketMQ's own Python client."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc

from bench.grpc_ledger import Delivery, Entry, Kind, Ledger
from bench.killed_server import (
    DELAYED,
    FIFO,
    PYTHON,
    PYTHON_SENT,
    RETRIES,
    STOP_S,
    TRANSACTIONS,
    KilledServer,
    now_ms,
)
from bench.peer import python_client
from mqtemplate.engine.pop.receipt_handle import ReceiptHandle
from mqtemplate.grpc_protos.enums import ClientType, Code, GrpcMessageType, TransactionResolution
from mqtemplate.topics import DLQ_TOPIC_PREFIX
from tests.server.grpc_api.grpc_tool import GrpcTool, Telemetry, consumer_settings, message, producer_settings

_MESSAGE_GROUPS = "abcdef"
_INVISIBLE_S = 10.0
"""The shortest time that a receive may have. Changes make it shorter, and longer."""
_EXTENDED_S = 12.0
_SHORTEST_S, _LONGEST_S = 0.05, 0.8
_LONGEST_DELAY_S = 2.0
_START_S = 60.0


class World:
    """What all clients share.

    Attributes:
        is_sending: False: producers send no more.
        is_draining: True: consumers acknowledge everything.
        is_over: True: clients end.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.ledger = Ledger({topic: retries + 1 for topic, retries in RETRIES.items()})
        self.server = KilledServer(folder, self.ledger)
        self.seed = seed
        self.is_sending = True
        self.is_draining = False
        self.is_over = False
        self.receives = itertools.count(1)


class Client(threading.Thread):
    """A client in a thread of its own: it connects, works until its connection is lost, and connects again."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.world = world
        self.ledger = world.ledger
        self.chance = random.Random(f"{world.seed} {name}")

    def run(self) -> None:
        while not self.world.is_over:
            generation, was_up = self.world.server.generation, self.world.server.is_up
            if not was_up:
                time.sleep(0.02)
                continue
            try:
                # With its own threads grpcio 1.85 left one receive of thousands waiting, long after its deadline.
                with GrpcTool(self.world.server.address, self.name, polls=True) as tool:
                    self.work(tool, tool.telemetry())
            except (grpc.RpcError, StopIteration) as exc:
                if self.world.server.is_up and generation == self.world.server.generation:
                    self.ledger.fault(Kind.UNEXPECTED, f"{self.name}: {exc!r}"[:500])
                time.sleep(0.02)
            except Exception as exc:
                self.ledger.fault(Kind.UNEXPECTED, f"{self.name}: {exc!r}"[:500])
                raise

    def work(self, tool: GrpcTool, telemetry: Telemetry) -> None:
        """Work until the server is gone, or all is over."""
        raise NotImplementedError

    def pause(self, longest_s: float) -> None:
        """Pause for a random time."""
        time.sleep(self.chance.uniform(0, longest_s))

    def is_ok(self, answer: Any, what: str, action: str = "") -> bool:
        """Return True for OK. Another answer is a fault, but for a flush that took too long."""
        self.world.server.answered(action)
        code = answer.status.code
        if code not in (Code.OK, Code.MASTER_PERSISTENCE_TIMEOUT):
            self.ledger.fault(Kind.UNEXPECTED, f"{self.name}: {what} was answered by {code} {answer.status.message}")
        return bool(code == Code.OK)


class Sender(Client):
    """Producer of messages, ordered and delayed ones too; it recalls some.

    Args:
        topics: Topics of the messages that are neither ordered nor delayed.
    """

    def __init__(self, world: World, topics: Sequence[str]) -> None:
        super().__init__(world, "sender")
        self._topics = topics
        self._numbers = itertools.count()
        self._of_group = dict.fromkeys(_MESSAGE_GROUPS, 0)

    def work(self, tool: GrpcTool, telemetry: Telemetry) -> None:
        telemetry.report(producer_settings(*self._topics, FIFO, DELAYED))
        sends = [self._send_normal, self._send_ordered, self._send_delayed]
        while not self.world.is_over:
            if self.world.is_sending:
                self.chance.choice(sends)(tool)
            self.pause(0.015)

    def _send_normal(self, tool: GrpcTool) -> None:
        topic = self.chance.choice(self._topics)
        bodies = [f"n-{next(self._numbers)}" for _ in range(self.chance.choice((1, 1, 3)))]
        for body in bodies:
            self.ledger.sending(Entry(body, topic))
        answer = tool.send(*(message(topic, body.encode(), body) for body in bodies))
        if self.is_ok(answer, "a send", "send"):
            for body in bodies:
                self.ledger.sent(body)

    def _send_ordered(self, tool: GrpcTool) -> None:
        group = self.chance.choice(_MESSAGE_GROUPS)
        body = f"f-{group}-{self._of_group[group]}"
        self.ledger.sending(Entry(body, FIFO, series=(group, self._of_group[group])))
        self._of_group[group] += 1
        sent = message(FIFO, body.encode(), body, message_type=GrpcMessageType.FIFO, message_group=group)
        if self.is_ok(tool.send(sent), "an ordered send", "send"):
            self.ledger.sent(body)

    def _send_delayed(self, tool: GrpcTool) -> None:
        body, due_ms = f"d-{next(self._numbers)}", now_ms() + self.chance.randrange(int(_LONGEST_DELAY_S * 1_000))
        self.ledger.sending(Entry(body, DELAYED, due_ms=due_ms))
        sent = message(DELAYED, body.encode(), body, message_type=GrpcMessageType.DELAY)
        sent.system_properties.delivery_timestamp.FromMilliseconds(due_ms)
        answer = tool.send(sent)
        if self.is_ok(answer, "a delayed send", "send"):
            self.ledger.sent(body)
            if self.chance.random() < 0.2 and (handle := answer.entries[0].recall_handle):
                self._recall(tool, body, handle)

    def _recall(self, tool: GrpcTool, body: str, handle: str) -> None:
        self.ledger.ending(body, is_wanted=False)
        answer = tool.recall(DELAYED, handle)
        if answer.status.code == Code.OK:
            self.ledger.ended(body, now_ms(), "recalled")
        elif answer.status.code == Code.INTERNAL_SERVER_ERROR:  # it was delivered before
            self.ledger.not_recalled(body)
        else:
            self.is_ok(answer, "a recall")


class TransactionSender(Client):
    """Producer of transactions. It commits, rolls back, or leaves them open until the server checks them."""

    def __init__(self, world: World) -> None:
        super().__init__(world, "transaction-sender")
        self._numbers = itertools.count()

    def work(self, tool: GrpcTool, telemetry: Telemetry) -> None:
        telemetry.report(producer_settings(TRANSACTIONS))
        checks = threading.Thread(target=self._answer_checks, args=(tool, telemetry), daemon=True)
        checks.start()
        try:
            while not self.world.is_over:
                if self.world.is_sending:
                    self._send(tool)
                self.pause(0.05)
        finally:
            telemetry.cancel()
            checks.join(STOP_S)

    def _send(self, tool: GrpcTool) -> None:
        body, is_wanted = f"t-{next(self._numbers)}", self.chance.random() < 0.6
        self.ledger.sending(Entry(body, TRANSACTIONS, is_wanted=is_wanted))
        answer = tool.send(message(TRANSACTIONS, body.encode(), body, message_type=GrpcMessageType.TRANSACTION))
        if self.is_ok(answer, "a half message", "send"):
            self.ledger.sent(body)
            if self.chance.random() < 0.65:
                self.pause(0.02)
                self._end(tool, body, answer.entries[0].transaction_id, is_wanted=is_wanted)

    def _end(self, tool: GrpcTool, body: str, transaction_id: str, *, is_wanted: bool) -> None:
        self.ledger.ending(body, is_wanted=is_wanted)
        resolution = TransactionResolution.COMMIT if is_wanted else TransactionResolution.ROLLBACK
        if self.is_ok(tool.end_transaction(TRANSACTIONS, transaction_id, resolution), f"the end of {body}", "end"):
            self.ledger.ended(body, now_ms(), "committed" if is_wanted else "rolled back")

    def _answer_checks(self, tool: GrpcTool, telemetry: Telemetry) -> None:
        try:
            while True:
                command = telemetry.next()
                if command.HasField("recover_orphaned_transaction_command"):
                    check = command.recover_orphaned_transaction_command
                    body = check.message.body.decode()
                    stored_ms = check.message.system_properties.store_timestamp.ToMilliseconds()
                    is_wanted = self.ledger.checked(body, stored_ms)
                    if self.chance.random() < 0.8:  # else the server checks again
                        self._end(tool, body, check.transaction_id, is_wanted=is_wanted)
        except (grpc.RpcError, StopIteration, ValueError):
            return  # the server is gone, or the channel is closed: the other thread notices it


class Receiver(Client):
    """Consumer of one topic, which handles messages in all ways that the protocol has.

    Args:
        is_renewed: The server renews its deliveries, as for a push consumer; else it is a simple consumer.
    """

    def __init__(self, world: World, topic: str, number: int, *, is_renewed: bool = False) -> None:
        super().__init__(world, f"receiver-{topic}-{number}")
        self._topic = topic
        self._is_renewed = is_renewed
        self._attempt_id = ""
        self._later: list[tuple[float, str, ReceiptHandle]] = []  # time, body and handle of what is acknowledged later
        self._left: list[tuple[str, ReceiptHandle]] = []

    def work(self, tool: GrpcTool, telemetry: Telemetry) -> None:
        kind = ClientType.PUSH_CONSUMER if self._is_renewed else ClientType.SIMPLE_CONSUMER
        telemetry.report(consumer_settings(self._topic, self._topic, kind=kind))
        while not self.world.is_over:
            self._end_later(tool)
            self._receive(tool)

    def _receive(self, tool: GrpcTool) -> None:
        number, started_ms = next(self.world.receives), now_ms()
        self._attempt_id = self._attempt_id or f"{self.name}-{number}"
        count = self.chance.choice((1, 2, 8, 32))
        try:
            found = tool.receive(
                *(self._topic, self._topic),
                count=count,
                invisible_s=None if self._is_renewed else _INVISIBLE_S,
                auto_renew=self._is_renewed,
                attempt_id=self._attempt_id,
            )
        except grpc.RpcError:
            self.ledger.receive_failed(self._topic)
            raise
        self._attempt_id = ""
        if found.messages:
            self.world.server.answered("receive")
        if found.code is not Code.MESSAGE_NOT_FOUND and not self.is_ok(found, "a receive"):
            return
        deliveries = []
        for each in found.messages:
            system = each.system_properties
            handle = ReceiptHandle.parse(system.receipt_handle)
            stored_ms = system.store_timestamp.ToMilliseconds()
            delivery = Delivery(each.body.decode(), handle, system.delivery_attempt, started_ms, stored_ms, number)
            self.ledger.delivered(self._topic, delivery, is_renewed=self._is_renewed)
            deliveries.append(delivery)
        for at, delivery in enumerate(deliveries):
            try:
                self._end_delivery(tool, delivery.body, delivery.handle)
            except grpc.RpcError:
                self._keep([(each.body, each.handle) for each in deliveries[at:]])
                raise

    def _keep(self, interrupted: list[tuple[str, ReceiptHandle]]) -> None:
        """Keep messages whose requests were interrupted: a push consumer has them, and the server renews them."""
        if self._is_renewed:
            self._left += interrupted

    def _end_delivery(self, tool: GrpcTool, body: str, handle: ReceiptHandle) -> None:
        chance = self.chance.random()
        if self.world.is_draining or chance < 0.55:
            self._ack(tool, body, handle)
        elif chance < 0.70:
            self._change(tool, body, handle, self.chance.uniform(_SHORTEST_S, _LONGEST_S), counts=True)
        elif chance < 0.78:
            self._change(tool, body, handle, self.chance.uniform(_SHORTEST_S, _LONGEST_S), counts=False)
        elif chance < 0.88:
            changed = self._change(tool, body, handle, _EXTENDED_S, counts=True)
            if changed is not None:
                self._later.append((time.monotonic() + self.chance.uniform(0, 1), body, changed))
        elif chance < 0.93:
            self._later.append((time.monotonic() + self.chance.uniform(0, 1), body, handle))
        elif chance < 0.97:
            self._forward(tool, body, handle)
        else:
            self._left.append((body, handle))

    def _end_later(self, tool: GrpcTool) -> None:
        """Handle the messages whose time has come: some are acknowledged, the time of others is made shorter."""
        now_s = time.monotonic()
        due = [each for each in self._later if each[0] <= now_s or self.world.is_draining]
        for each in due:
            self._later.remove(each)
            _, body, handle = each
            try:
                if self.world.is_draining or self.chance.random() < 0.6:
                    self._ack(tool, body, handle)
                else:
                    self._change(tool, body, handle, self.chance.uniform(_SHORTEST_S, _LONGEST_S), counts=True)
            except grpc.RpcError:
                self._keep([(body, handle)])
                raise
        while self.world.is_draining and self._left:
            self._ack(tool, *self._left.pop())

    def _ack(self, tool: GrpcTool, body: str, handle: ReceiptHandle) -> None:
        self.ledger.acking(body, handle)
        answer = tool.ack(self._topic, self._topic, handle.text)
        if self._is_valid(answer, body, handle, "an acknowledgement", "ack"):
            self.ledger.acked(body, "acknowledged")

    def _forward(self, tool: GrpcTool, body: str, handle: ReceiptHandle) -> None:
        self.ledger.acking(body, handle, is_forwarded=True)
        answer = tool.forward(self._topic, self._topic, handle.text)
        if self._is_valid(answer, body, handle, "a move to the dead letters", "forward"):
            self.ledger.acked(body, "moved to the dead letters")

    def _change(
        self, tool: GrpcTool, body: str, handle: ReceiptHandle, invisible_s: float, *, counts: bool
    ) -> ReceiptHandle | None:
        self.ledger.changing(body, now_ms() + int(invisible_s * 1_000), counts=counts)
        answer = tool.change(self._topic, self._topic, handle.text, invisible_s, suspend=not counts)
        if not self._is_valid(answer, body, handle, "a change of the invisible time", "change"):
            return None
        changed = ReceiptHandle.parse(answer.receipt_handle)
        action = "extended" if invisible_s == _EXTENDED_S else "shortened"
        self.ledger.changed(body, handle, changed, action, counts=counts)
        return changed

    def _is_valid(self, answer: Any, body: str, handle: ReceiptHandle, what: str, action: str) -> bool:
        """Return True for OK, and note the refusal of a handle that is not valid any more."""
        if answer.status.code == Code.INVALID_RECEIPT_HANDLE:
            self.ledger.refused(body, handle, now_ms())
            return False
        return self.is_ok(answer, what, action)


class DeadLetterReceiver(Client):
    """Simple consumer of the dead letters of one group."""

    def __init__(self, world: World, group: str) -> None:
        super().__init__(world, f"dead-letters-{group}")
        self._topic = DLQ_TOPIC_PREFIX + group

    def work(self, tool: GrpcTool, telemetry: Telemetry) -> None:
        telemetry.report(consumer_settings("dead-letters", self._topic))
        while not self.world.is_over:
            found = tool.receive("dead-letters", self._topic, invisible_s=_INVISIBLE_S)
            if found.code is Code.TOPIC_NOT_FOUND:
                time.sleep(0.5)
            for each in found.messages:
                self.ledger.dead_letter(each.body.decode())
                self.is_ok(tool.ack("dead-letters", self._topic, each.system_properties.receipt_handle), "an ack")


class PythonClient:
    """RocketMQ's Python client in a process: a producer, and a simple consumer of a topic that `Sender` sends to.

    Attributes:
        sent: Bodies whose send was answered. The client repeats a send without an answer, so they may be stored twice.
    """

    def __init__(self, world: World, folder: Path) -> None:
        self.sent: list[str] = []
        self._world = world
        self._ledger = world.ledger
        self._folder = folder
        self._starts = 0
        self._started = threading.Semaphore(0)

    def start(self) -> None:
        """Start it, and wait until producer and consumer have connected. It must not run."""
        self._starts += 1
        program = Path(__file__).parent / "peer" / "python" / "killed_server.py"
        arguments = (str(self._world.server.address), PYTHON, PYTHON_SENT, f"{self._world.seed}-{self._starts}")
        with (self._folder / "python.log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(python_client.PYTHON), str(program), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=self._folder,
                env=os.environ | {"HOME": str(self._folder)},  # the client writes its log there
            )
        self._reader = threading.Thread(target=self._read, name="python-client", daemon=True)
        self._reader.start()
        for _ in range(2):
            assert self._started.acquire(timeout=_START_S), "RocketMQ's Python client does not start"

    def restart(self) -> None:
        """End the process, and start another one: the client does not always recover from the loss of its server."""
        self.end()
        self._ledger.receive_failed(PYTHON)  # it may have ended while it received messages
        self.start()

    def drain(self) -> None:
        """Let it send no more, and acknowledge all that it receives."""
        assert self._process.stdin is not None
        self._process.stdin.write("drain\n")
        self._process.stdin.flush()

    def end(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(STOP_S)
        self._reader.join(STOP_S)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._note(json.loads(line))

    def _note(self, found: dict[str, Any]) -> None:
        """Note one line in the ledger."""
        event, body, ledger = found["event"], found.get("body", ""), self._ledger
        handle = ReceiptHandle.parse(found["handle"]) if "handle" in found else None
        if event == "started":
            self._started.release()
        elif event == "sent":
            self.sent.append(body)
            ledger.counts["sent by the Python client"] += 1
        elif event == "changing":
            ledger.changing(body, found["visible_ms"], counts=True)
        elif event == "acked":
            ledger.acked(body, "acknowledged by the Python client")
        elif event == "failed" and found["request"] == "receive":
            ledger.receive_failed(PYTHON)
        elif handle is None:
            ledger.counts["failed requests of the Python client"] += 1
        elif event == "received":
            attempt, number = found["attempt"], -found["number"]
            ledger.delivered(PYTHON, Delivery(body, handle, attempt, found["started_ms"], 0, number))
        elif event == "acking":
            ledger.acking(body, handle)
        elif event == "changed":
            changed = ReceiptHandle.parse(found["changed"])
            ledger.changed(body, handle, changed, "shortened by the Python client", counts=True)
        elif "receipt handle" in found["error"]:
            ledger.refused(body, handle, found["now_ms"])
        else:
            ledger.counts["failed requests of the Python client"] += 1
