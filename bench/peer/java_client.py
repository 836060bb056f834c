"""RocketMQ's client, its tools, and an application of rocketmq-spring. Each is one JVM that runs many commands."""

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

from bench.peer.fetch import fetch
from bench.peer.jvm import PeerError, command_line, lines


class PeerMessage(NamedTuple):
    """A message as RocketMQ's client read it.

    Attributes:
        handled_timestamp: Time at which a push consumer received it, epoch milliseconds.
        thread: Thread of the push consumer that received it.
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
    """A name server: RocketMQ's or this project's."""

    @property
    def address(self) -> str:
        """``host:port``."""


class JavaProcess:
    """A Java program that runs commands from standard input, one per line. It is killed at the end of the block.

    Attributes:
        home: Folder of the program, once started.
    """

    def __init__(self, version: str, main: str, *arguments: str) -> None:
        self._version = version
        self._main = main
        self._arguments = arguments

    def __enter__(self) -> Self:
        self.home = Path(tempfile.mkdtemp(prefix=f"rocketmq-{self._main.lower()}-"))
        (self.home / "conf").mkdir()
        (self.home / "conf/logback_tools.xml").write_text("<configuration/>")  # The tools of 4.9.7 need it.
        self._errors = (self.home / "client.out").open("wb")
        self._process = subprocess.Popen(
            command_line(self._version, self.home, self._main, *self._arguments, heap_mib=128),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=self.home,
        )
        return self

    def kill(self) -> None:
        """Kill the process with SIGKILL, as in a crash."""
        self._process.kill()
        self._process.wait()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._process.kill()  # The process has no state to save.
        self._process.communicate()
        self._errors.close()
        shutil.rmtree(self.home, ignore_errors=True)

    def exchange(self, line: str) -> bytes:
        """Send one line, and return the line that the program prints."""
        commands, results = self._process.stdin, self._process.stdout
        assert commands is not None
        assert results is not None
        commands.write(line.encode() + b"\n")
        commands.flush()
        if not (result := results.readline()):
            raise self.error(f"{self._main} ended")
        return result

    def error(self, text: str) -> PeerError:
        """Return an error with the last lines that the program printed."""
        return PeerError("\n".join([text, *lines(self.home / "client.out")[-30:]]))

    def call(self, command: str, **arguments: object) -> Any:
        """Run a command of ``java/commands/CommandLoop.java``, and return its result.

        Raises:
            PeerError: The command failed.
        """
        given = {name: value for name, value in arguments.items() if value is not None}
        result = json.loads(self.exchange(json.dumps({"command": command, **given})))
        if "error" in result:
            raise self.error(f"{command} {arguments}: {result['error']}")
        return result["result"]


class JavaClient(JavaProcess):
    """RocketMQ's client, and the tools of 5.5.0. Call `connect` for each new broker."""

    def __init__(self, name_server: HasAddress, version: str = "5.5.0") -> None:
        super().__init__(version, "Client", name_server.address)

    def connect(self) -> None:
        """Connect to the broker that is running now, without any state of the previous one."""
        self.call("connect")

    # --- sending ---------------------------------------------------------------------------------------

    def send(self, *messages: Mapping[str, object], mode: str = "sync") -> list[dict[str, Any]]:
        """Send messages one after the other. The mode "oneway" returns no results.

        Args:
            messages: Mappings: topic, body (bytes); tags, keys, flag, level, delay_sec, delay_ms, deliver_ms,
                properties, and queue_id or hash_key.
            mode: "sync", "async" or "oneway".
        """
        return list(self.call("send", mode=mode, messages=[_with_text_body(message) for message in messages]))

    def send_batch(self, *messages: Mapping[str, object]) -> dict[str, Any]:
        """Send a batch."""
        return dict(self.call("send_batch", messages=[_with_text_body(message) for message in messages]))

    def request(self, message: Mapping[str, object], timeout_ms: int) -> bytes:
        """Send a request, and return the body of the reply."""
        reply = self.call("request", message=_with_text_body(message), timeout_ms=timeout_ms)
        return base64.b64decode(reply["body"])

    def transaction(self, message: Mapping[str, object], local: str, checks: Sequence[str] = ()) -> dict[str, Any]:
        """Send a message in a transaction. The states are "commit", "rollback" and "unknown".

        Args:
            local: State of the local transaction.
            checks: State for each check. The last one is also for all later checks.
        """
        return dict(self.call("transaction", message=_with_text_body(message), local=local, checks=list(checks)))

    def checks(self, count: int, timeout_ms: int) -> list[PeerMessage]:
        """Return the checked messages when there are *count* of them, or after the timeout."""
        return self._messages("checks", count=count, timeout_ms=timeout_ms)

    def recall(self, topic: str, handle: str) -> str:
        """Recall a delayed message, and return its message ID."""
        return str(self.call("recall", topic=topic, handle=handle))

    # --- receiving -------------------------------------------------------------------------------------

    def read(self, topic: str, count: int = 0, timeout_ms: int = 0, *, until: bytes | None = None) -> list[PeerMessage]:
        """Return all messages of *topic*, queue by queue.

        Wait until there are *count* messages and one has the body *until*, at most for the timeout.
        """
        return self._messages("read", topic=topic, count=count, until=until and _text(until), timeout_ms=timeout_ms)

    def consume(
        self, group: str, topic: str, count: int, timeout_ms: int, *, fail: Sequence[bytes] = (), linger: bool = False
    ) -> list[PeerMessage]:
        """Run a push consumer of *group* until it has consumed *count* messages.

        Args:
            fail: Bodies that the listener sends back once.
            linger: Run one more second, to detect unexpected messages.
        """
        arguments = {"group": group, "topic": topic, "count": count, "timeout_ms": timeout_ms, "from": "first"}
        return self._messages("consume", **arguments, fail=[_text(body) for body in fail], linger=linger)

    def join(self, group: str, topic: str, **options: object) -> str:
        """Start a push consumer, and return its name. ``java/client/Member.java`` has the options."""
        for name in ("fail", "fail_always"):
            bodies = options.pop(name, ())
            assert isinstance(bodies, list | tuple)
            options[name] = [_text(body) for body in bodies]
        return str(self.call("join", group=group, topic=topic, **{"from": "first"} | options))

    def handled(
        self, member: str, count: int, timeout_ms: int, *, failed: bool = False, prefix: str = ""
    ) -> list[PeerMessage]:
        """Return the messages that a push consumer consumed when there are *count* of them, or after the timeout.

        Args:
            failed: Include messages that it sent back.
            prefix: Include only bodies that start with it.
        """
        arguments = {"member": member, "count": count, "timeout_ms": timeout_ms}
        return self._messages("handled", **arguments, failed=failed, prefix=prefix)

    def assigned(self, member: str, topic: str, count: int, timeout_ms: int) -> list[int]:
        """Return the IDs of the assigned queues when there are *count* of them, or after the timeout."""
        return list(self.call("assigned", member=member, topic=topic, count=count, timeout_ms=timeout_ms))

    def leave(self, member: str) -> None:
        """Stop a push consumer."""
        self.call("leave", member=member)

    def lite_pull(
        self, group: str, topic: str, count: int, timeout_ms: int, *, commit: bool = True, **selector: str
    ) -> list[PeerMessage]:
        """Poll with a lite pull consumer until *count* messages arrived. *selector* is ``tags`` or ``sql``."""
        arguments = {"group": group, "topic": topic, "count": count, "timeout_ms": timeout_ms}
        return self._messages("lite_pull", **arguments, commit=commit, **selector)

    # --- queries and tools -----------------------------------------------------------------------------

    def by_id(self, topic: str, message_id: str) -> PeerMessage:
        """Return a message by its message ID or its offset message ID."""
        return _message(self.call("by_id", topic=topic, id=message_id))

    def by_key(self, topic: str, key: str) -> list[PeerMessage]:
        """Return the messages with a key."""
        return self._messages("by_key", topic=topic, key=key)

    def committed(self, group: str, topic: str) -> dict[int, int]:
        """Return queue ID -> committed offset of the group."""
        return {int(queue): offset for queue, offset in self.call("committed", group=group, topic=topic).items()}

    def topic_status(self, topic: str) -> dict[int, tuple[int, int]]:
        """Return queue ID -> minimum and maximum offset, for the queues that have messages."""
        status = self.call("topic_status", topic=topic)
        return {int(queue): (low, high) for queue, (low, high) in status.items()}

    def create_topic(self, topic: str, queues: int = 4) -> None:
        """Create a topic."""
        self.call("create_topic", topic=topic, queues=queues)

    def reset_offset(self, group: str, topic: str, timestamp_ms: int) -> dict[int, int]:
        """Reset the offsets of a group, and return queue ID -> new offset."""
        offsets = self.call("reset_offset", group=group, topic=topic, timestamp_ms=timestamp_ms)
        return {int(queue): offset for queue, offset in offsets.items()}

    def members(self, group: str) -> list[str]:
        """Return the client IDs of the connected members of a group."""
        return list(self.call("members", group=group))

    def mqadmin(self, *arguments: str) -> str:
        """Return the output of an ``mqadmin`` command."""
        return str(self.call("mqadmin", arguments=arguments))

    def _messages(self, command: str, **arguments: object) -> list[PeerMessage]:
        return [_message(found) for found in self.call(command, **arguments)]


class OlderTools(JavaProcess):
    """``mqadmin`` of RocketMQ 4.9.7. Its class path has no package for JSON, so the lines are plain text."""

    def __init__(self) -> None:
        super().__init__("4.9.7", "Tools")

    def mqadmin(self, *arguments: str) -> str:
        """Return the output of an ``mqadmin`` command."""
        return base64.b64decode(self.exchange("\x1f".join(arguments))).decode()


class SpringApp(JavaProcess):
    """An application of rocketmq-spring: see ``java/spring/``. Commands call its template."""

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

    def received(self, listener: str, count: int, timeout_ms: int) -> list[dict[str, Any]]:
        """Return the messages that a listener received when there are *count* of them, or after the timeout."""
        return list(self.call("received", listener=listener, count=count, timeout_ms=timeout_ms))


class SpringV5App(JavaProcess):
    """An application of RocketMQ's Spring starter for version 5: see ``java/spring5/``. Commands call its template.

    Its producer and its simple consumer use plain text, its listeners TLS: their annotation has no setting for it.

    Args:
        endpoint: ``host:port`` of a gRPC service that accepts both.
    """

    def __init__(self, endpoint: str) -> None:
        super().__init__(
            "spring-v5",
            "SpringV5App",
            f"--rocketmq.producer.endpoints={endpoint}",
            "--rocketmq.producer.topic=v5-transactions",
            "--rocketmq.producer.ssl-enabled=false",
            "--rocketmq.producer.request-timeout=10",
            f"--rocketmq.simple-consumer.endpoints={endpoint}",
            "--rocketmq.simple-consumer.consumer-group=v5-received-group",
            "--rocketmq.simple-consumer.topic=v5-received",
            "--rocketmq.simple-consumer.tag=*",
            "--rocketmq.simple-consumer.ssl-enabled=false",
            f"--rocketmq.push-consumer.endpoints={endpoint}",
            "--spring.main.banner-mode=off",
            "--logging.level.root=warn",
        )

    def received(self, listener: str, count: int, timeout_ms: int) -> list[dict[str, Any]]:
        """Return the messages that a listener received when there are *count* of them, or after the timeout."""
        return list(self.call("received", listener=listener, count=count, timeout_ms=timeout_ms))


def fetch_spring_v5() -> str | None:
    """Fetch the packages of `SpringV5App` if they are missing. Return the reason if that fails."""
    return fetch("spring-v5", "RocketMQ's Spring starter for version 5")


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
