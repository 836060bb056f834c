"""RocketMQ's own client and tools, and an application of rocketmq-spring, each in a JVM that stays: see ``java/``."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

from bench.peer.jvm import PeerError, command_line, lines

__all__ = ["JavaClient", "JavaLines", "PeerMessage", "SpringApp"]


class PeerMessage(NamedTuple):
    """A message as RocketMQ's client read it.

    Attributes:
        handled_timestamp: When a push consumer was given it, epoch milliseconds.
        thread: The thread of the push consumer that was given it.
        store_size: Bytes of its record in the commit log.
    """

    topic: str
    queue_id: int
    queue_offset: int
    physical_offset: int
    msg_id: str
    keys: str | None
    tags: str | None
    flag: int
    sys_flag: int
    born_timestamp: int
    store_timestamp: int
    reconsume_times: int
    body: bytes
    properties: dict[str, str]
    handled_timestamp: int | None = None
    thread: str | None = None
    store_size: int | None = None


class HasAddress(Protocol):
    """A name server: RocketMQ's or ours."""

    @property
    def address(self) -> str: ...


class JavaLines:
    """A Java program that answers lines of JSON; it ends with the block, or with this process."""

    def __init__(self, version: str, main: str, *arguments: str) -> None:
        self._version = version
        self._main = main
        self._arguments = arguments

    def __enter__(self) -> Self:
        self._home = Path(tempfile.mkdtemp(prefix=f"rocketmq-{self._main.lower()}-"))
        self._errors = (self._home / "client.out").open("wb")
        self._process = subprocess.Popen(
            command_line(self._version, self._home, self._main, *self._arguments, heap_mib=128),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=self._home,
        )
        return self

    def kill(self) -> None:
        """SIGKILL, as a crash."""
        self._process.kill()
        self._process.wait()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._process.kill()  # it keeps nothing
        self._process.communicate()
        self._errors.close()
        shutil.rmtree(self._home, ignore_errors=True)

    def ask(self, do: str, **question: object) -> Any:
        """One question; gives the answer, or raises `PeerError`."""
        questions, answers = self._process.stdin, self._process.stdout
        assert questions is not None
        assert answers is not None
        given = {name: value for name, value in question.items() if value is not None}
        questions.write(json.dumps({"do": do, **given}).encode() + b"\n")
        questions.flush()
        line = answers.readline()
        answer = json.loads(line) if line else {"error": "the client ended"}
        if "error" in answer:
            printed = lines(self._home / "client.out")
            raise PeerError("\n".join([f"{do} {question}: {answer['error']}", *printed[-30:]]))
        return answer["answer"]


class JavaClient(JavaLines):
    """RocketMQ's own client, and with 5.5.0 its tools.

    Call `connect` for each broker anew.
    """

    def __init__(self, name_server: HasAddress, version: str = "5.5.0") -> None:
        super().__init__(version, "Client", name_server.address)

    def connect(self) -> None:
        """Forget the last broker, and talk to the one that runs now."""
        self.ask("connect")

    # --- sending ---------------------------------------------------------------------------------------

    def send(self, *messages: Mapping[str, object], mode: str = "sync") -> list[dict[str, Any]]:
        """Send one after the other, "sync", "async" or "oneway" (then without results).

        A message is a mapping: topic, body (bytes); tags, keys, flag, level, delay_sec, delay_ms, deliver_ms,
        properties, and queue_id or hash_key.
        """
        return list(self.ask("send", mode=mode, messages=[_with_text_body(message) for message in messages]))

    def send_batch(self, *messages: Mapping[str, object]) -> dict[str, Any]:
        return dict(self.ask("send_batch", messages=[_with_text_body(message) for message in messages]))

    def request(self, message: Mapping[str, object], timeout_ms: int) -> bytes:
        """Send a request, and give the body of the answer."""
        answer = self.ask("request", message=_with_text_body(message), timeout_ms=timeout_ms)
        return base64.b64decode(answer["body"])

    def transaction(self, message: Mapping[str, object], local: str, checks: Sequence[str] = ()) -> dict[str, Any]:
        """Send a message in a transaction: what the local part comes to, and what each check is told (the last for all
        that follow): "commit", "rollback" or "unknown"."""
        return dict(self.ask("transaction", message=_with_text_body(message), local=local, checks=list(checks)))

    def checks(self, count: int, timeout_ms: int) -> list[PeerMessage]:
        """The messages that brokers asked about, once there are *count* or the time has passed."""
        return [_message(found) for found in self.ask("checks", count=count, timeout_ms=timeout_ms)]

    def recall(self, topic: str, handle: str) -> str:
        return str(self.ask("recall", topic=topic, handle=handle))

    # --- receiving -------------------------------------------------------------------------------------

    def read(self, topic: str, count: int = 0, timeout_ms: int = 0, *, until: bytes | None = None) -> list[PeerMessage]:
        """All messages of *topic*, queue by queue, once there are *count* of them and one with the body *until*, or the
        time has passed."""
        answer = self.ask("read", topic=topic, count=count, until=until and _text(until), timeout_ms=timeout_ms)
        return [_message(found) for found in answer]

    def consume(
        self, group: str, topic: str, count: int, timeout_ms: int, *, fail: Sequence[bytes] = (), linger: bool = False
    ) -> list[PeerMessage]:
        """Be a push consumer of *group* until *count* messages were handled; *fail* are given back once.

        Args:
            linger: Stay another second, to see whether more comes.
        """
        question = {"group": group, "topic": topic, "count": count, "timeout_ms": timeout_ms}
        found = self.ask("consume", **question, fail=[_text(body) for body in fail], linger=linger, **{"from": "first"})
        return [_message(one) for one in found]

    def join(self, group: str, topic: str, **options: object) -> str:
        """Become a push consumer; gives the member's name. The options: see ``java/client/Member.java``."""
        for name in ("fail", "fail_always"):
            bodies = options.pop(name, ())
            assert isinstance(bodies, list | tuple)
            options[name] = [_text(body) for body in bodies]
        return str(self.ask("join", group=group, topic=topic, **{"from": "first"} | options))

    def handled(
        self, member: str, count: int, timeout_ms: int, *, came: bool = False, begins: str = ""
    ) -> list[PeerMessage]:
        """What a member is done with, once it is *count* or the time has passed.

        Args:
            came: With what it gave back.
            begins: Only bodies that begin so.
        """
        found = self.ask("handled", member=member, count=count, timeout_ms=timeout_ms, came=came, begins=begins)
        return [_message(one) for one in found]

    def assigned(self, member: str, topic: str, count: int, timeout_ms: int) -> list[int]:
        """The ids of the queues a member has, once they are *count* or the time has passed."""
        return list(self.ask("assigned", member=member, topic=topic, count=count, timeout_ms=timeout_ms))

    def leave(self, member: str) -> None:
        self.ask("leave", member=member)

    def lite_pull(
        self, group: str, topic: str, count: int, timeout_ms: int, *, commit: bool = True, **selector: str
    ) -> list[PeerMessage]:
        """Poll as a lite pull consumer until *count* messages came; *selector*: ``tags`` or ``sql``."""
        question = {"group": group, "topic": topic, "count": count, "timeout_ms": timeout_ms}
        return [_message(found) for found in self.ask("lite_pull", **question, commit=commit, **selector)]

    # --- queries and tools -----------------------------------------------------------------------------

    def by_id(self, topic: str, message_id: str) -> PeerMessage:
        """By the id a broker gives or the sender's."""
        return _message(self.ask("by_id", topic=topic, id=message_id))

    def by_key(self, topic: str, key: str) -> list[PeerMessage]:
        return [_message(found) for found in self.ask("by_key", topic=topic, key=key)]

    def committed(self, group: str, topic: str) -> dict[int, int]:
        """Queue id -> the group's offset."""
        return {int(queue): offset for queue, offset in self.ask("committed", group=group, topic=topic).items()}

    def topic_status(self, topic: str) -> dict[int, tuple[int, int]]:
        """Queue id -> first offset and end, of the queues that have messages."""
        status = self.ask("topic_status", topic=topic)
        return {int(queue): (low, high) for queue, (low, high) in status.items()}

    def create_topic(self, topic: str, queues: int = 4) -> None:
        self.ask("create_topic", topic=topic, queues=queues)

    def reset_offset(self, group: str, topic: str, timestamp_ms: int) -> dict[int, int]:
        """Set a group back, or forward; gives queue id -> its new offset."""
        answer = self.ask("reset_offset", group=group, topic=topic, timestamp_ms=timestamp_ms)
        return {int(queue): offset for queue, offset in answer.items()}

    def members(self, group: str) -> list[str]:
        """The client ids that the broker knows of a group."""
        return list(self.ask("members", group=group))

    def mqadmin(self, *arguments: str) -> str:
        """What a tool of ``mqadmin`` prints."""
        return str(self.ask("mqadmin", arguments=arguments))


class SpringApp(JavaLines):
    """An application of rocketmq-spring: see ``java/spring/``. Asked for methods of its template, or what it saw."""

    def __init__(self, name_server: HasAddress) -> None:
        super().__init__(
            "spring",
            "SpringApp",
            f"--rocketmq.name-server={name_server.address}",
            "--rocketmq.producer.group=spring-producer",
            "--rocketmq.producer.send-message-timeout=10000",
            "--rocketmq.pull-consumer.group=spring-pull-group",
            "--rocketmq.pull-consumer.topic=spring-pulled",
            "--spring.main.banner-mode=off",
            "--logging.level.root=warn",
        )

    def seen(self, listener: str, count: int, timeout_ms: int) -> list[dict[str, Any]]:
        """What a listener noted, once it is *count* or the time has passed."""
        return list(self.ask("seen", listener=listener, count=count, timeout_ms=timeout_ms))


def _text(body: bytes) -> str:
    return base64.b64encode(body).decode()


def _with_text_body(message: Mapping[str, object]) -> dict[str, object]:
    body = message["body"]
    assert isinstance(body, bytes)
    return {**message, "body": _text(body)}


def _message(found: Mapping[str, Any]) -> PeerMessage:
    fields: dict[str, Any] = {**found, "body": base64.b64decode(found["body"]), "properties": dict(found["properties"])}
    values: dict[str, Any] = {name: fields.get(name) for name in PeerMessage._fields}
    return PeerMessage(**values)
