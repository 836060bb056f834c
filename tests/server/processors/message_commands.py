"""Commands of the golden scripts for sends and pulls: they print the answers, and what is stored.

Options with names are fields of a request or settings. Properties of a message are options in capitals, or begin with
``prop.``. A physical offset is printed as ``@offset``. Times are relative to the start of the script.
"""

from __future__ import annotations

import zlib
from typing import Any

from mqtemplate.message import HostAddress, Message, MessageExt, MessageQueue, parse_offset_msg_id
from mqtemplate.record.properties import decode_properties
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.bodies.group import SubscriptionGroupConfig
from mqtemplate.remoting.protocol.codes import PullSysFlag
from mqtemplate.remoting.protocol.headers.message import (
    ConsumerSendMsgBackRequestHeader,
    PullMessageResponseHeader,
    SendMessageRequestHeader,
    SendMessageResponseHeader,
)
from mqtemplate.remoting.protocol.messages import decode_messages, encode_batch, encode_properties_text
from tests.server.script_commands import ServerCommands
from tests.server.serving import RecordingConnection
from tests.server.tool import pull_header, send_header

_ADDED = ("MSG_REGION", "TRACE_ON", "CLUSTER")
_FLAGS = {"commit_offset": PullSysFlag.COMMIT_OFFSET, "suspend": PullSysFlag.SUSPEND}


def _value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    return int(text) if text.lstrip("-").isdecimal() else text


def _is_property(name: str) -> bool:
    return name.isupper() or name.startswith("prop.")


def _split(options: dict[str, str]) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the properties and the other options. A text with ``*`` is repeated: ``x*40000``."""
    properties = {name.removeprefix("prop."): _text(text) for name, text in options.items() if _is_property(name)}
    return properties, {name: _value(text) for name, text in options.items() if not _is_property(name)}


def _text(text: str) -> str:
    unit, star, count = text.rpartition("*")
    return unit * int(count) if star and count.isdecimal() else text


class MessageCommands(ServerCommands):
    """Commands that send and read messages, with all fields of a request. Each server has an empty store directory."""

    def server(self, **settings: str) -> None:
        """Start a server with an empty store directory, and these settings of the server and its engine in JSON."""
        super().server(**settings)
        self._path = self._path.with_name(f"{self._path.name}-")

    def topic(self, name: str, **config: str) -> list[str] | None:  # type: ignore[override]
        """Change a topic, or print its configuration."""
        table = self.serving.engine.topics
        if config:
            table.update(name, {key: _value(text) for key, text in config.items()})
            return None
        found = table.config(name)
        if found is None:
            return [f"no topic {name}"]
        return [f"queues {found['readQueueNums']}/{found['writeQueueNums']} perm {found['perm']}"]

    def group(self, name: str, **config: str) -> list[str] | None:  # type: ignore[override]
        """Change a group, or print if it exists."""
        groups = self.serving.server.groups
        if config:
            values: dict[str, Any] = {key.replace("-", "_"): _value(text) for key, text in config.items()}
            groups.put([SubscriptionGroupConfig(group_name=name, **values)])
            return None
        return [f"no group {name}" if groups.find(name) is None else f"group {name}"]

    def heartbeat(self, group: str, *topics: str, **options: str) -> None:  # type: ignore[override]
        """Register a consumer of these topics."""
        response = self.serving.heartbeat(group, *topics, **{name: _value(text) for name, text in options.items()})
        assert response.code == ResponseCode.SUCCESS

    def lock(self, group: str, topic: str) -> None:
        """Lock queue 0 for a consumer: the group is ordered."""
        self.serving.server.locks.lock(group, "client@1", [MessageQueue(topic, "broker-a", 0)])

    def full(self, reason: str) -> None:
        """Refuse all writes, as a full disk does."""
        self.serving.engine.store.cleaning.refusal = reason

    def delete(self) -> None:
        """Delete all files of the log but the last one."""
        self.serving.engine.store.delete_before(self.serving.engine.store.end_offset)

    def end(self) -> list[str]:
        """Print the end of the log."""
        return [f"log ends @{self.serving.engine.store.end_offset}"]

    # --- sends ---------------------------------------------------------------------------------

    def send(self, topic: str, body: str = "hello", **options: str) -> list[str]:  # type: ignore[override]
        """Send one message, possibly several times, and print the last response."""
        properties, rest = _split(options)
        host = rest.pop("from", None)
        over = RecordingConnection(HostAddress(*_host(host))) if host else None
        queue_id, times = rest.pop("queue", 0), int(rest.pop("times", 1))
        data = _text(body).encode()
        if rest.pop("zlib", False):
            data = zlib.compress(data)
        responses = [
            self.serving.send(_text(topic), data, properties, queue_id=queue_id, over=over, **rest)
            for _ in range(times)
        ]
        return [self._positions(responses[-1])]

    def v1(self, topic: str, body: str, **options: str) -> list[str]:
        """Send with the long names of fields."""
        properties, rest = _split(options)
        queue_id = rest.get("queue", 0)
        header = send_header(topic, queue_id, properties=properties, kind=SendMessageRequestHeader, born_timestamp=1)
        return [self._positions(self.serving.request(RequestCode.SEND_MESSAGE, header, body.encode()))]

    def batch(self, topic: str, *messages: str, **options: str) -> list[str]:
        """Send a batch. Its messages are bodies, with properties ``body:NAME~value``, and repeated: ``body*count``."""
        _, rest = _split(options)
        found = [message for text in messages for message in _messages(topic, text)]
        if rest.pop("code", None) == "single":
            return [self._positions(self.serving.send(topic, encode_batch(found), batch=True, **rest))]
        return [self._positions(self.serving.send_batch(topic, *found, **rest))]

    def raw(self, topic: str, data: str = "") -> list[str]:
        """Send any bytes, given in hexadecimal, as a batch."""
        code = RequestCode.SEND_BATCH_MESSAGE
        return [self._positions(self.serving.send(topic, bytes.fromhex(data), code=code))]

    def sendback(self, topic: str, queue_offset: str = "0", **options: str) -> list[str]:
        """Send a message back to the group *billing*, or to the group of an option."""
        added, rest = _split(options)
        at = rest.pop("at", None)
        message = self._messages(topic)[int(queue_offset)] if at is None else None
        header = ConsumerSendMsgBackRequestHeader(
            offset=at if message is None else message.physical_offset,
            group=rest.pop("group", "billing"),
            delay_level=rest.pop("level", 0),
            origin_msg_id=None if message is None else message.msg_id,
            origin_topic=topic,
            max_reconsume_times=rest.pop("max", None),
            delay_ms=rest.pop("delay", None),
            properties=encode_properties_text(added) if added else None,
        )
        return [_code(self.serving.request(RequestCode.CONSUMER_SEND_MSG_BACK, header))]

    def _positions(self, response: RemotingCommand | None) -> str:
        if response is None:
            return "no response"
        if response.code != ResponseCode.SUCCESS:
            return _code(response)
        header = response.header(SendMessageResponseHeader)
        assert (response.opaque, header.msg_region, header.trace_on) == (7, "DefaultRegion", "true")
        offsets = [parse_offset_msg_id(each) for each in header.msg_id.split(",")]
        assert {host for host, _ in offsets} == {HostAddress("127.0.0.1", 10911)}
        shown = ",".join(f"@{offset}" for _, offset in offsets) if len(offsets) < 8 else f"{len(offsets)} messages"
        text = f"{_code(response)} queue {header.queue_id} offset {header.queue_offset} {shown}"
        text += f" id {_id(header.transaction_id)}" if header.transaction_id else ""
        return text if header.recall_handle is None else f"{text} handles {len(header.recall_handle.split(','))}"

    # --- reads ---------------------------------------------------------------------------------

    def pull(self, topic: str, at: str = "0", **options: str) -> list[str]:
        """Pull, and print the response: code, next offset, minimum, maximum, and the bodies.

        Without a group the subscription is in the request.
        """
        rest = {name.replace("-", "_"): _value(text) for name, text in options.items()}
        group = rest.pop("group", None)
        flags = 0 if group else PullSysFlag.SUBSCRIPTION
        for name in str(rest.pop("flags", "")).split("+"):
            flags |= _FLAGS.get(name, 0)
        queue_id, name = rest.pop("queue", 0), rest.pop("over", None)
        over = None if name is None else self._connection(str(name))
        if rest.pop("lite", False):
            flags |= PullSysFlag.SUSPEND | PullSysFlag.LITE_PULL
            limits = {"max_msg_nums": 10, "max_msg_bytes": 2_147_483_647, "suspend_timeout_millis": 20_000}
            header = pull_header(
                topic, int(at), group="lite", queue_id=queue_id, sys_flag=flags, subscription="*", **limits
            )
            response = self.serving.request(RequestCode.LITE_PULL_MESSAGE, header)
        else:
            response = self.serving.pull(
                group or "reader", topic, int(at), queue_id=queue_id, sys_flag=int(flags), over=over, **rest
            )
        return [self._pulled(response)]

    def step(self) -> None:
        """Step the services until no work is due."""
        self.serving.step()

    def replies(self, over: str) -> list[str]:
        """Print the responses to held pulls since the last time."""
        connection = self._connection(over)
        replies, connection.replies = connection.replies, []
        return [self._pulled(each) for each in replies] or ["nothing"]

    def stop(self) -> None:
        """Answer the held pulls, as a server that stops."""
        self.serving.server.hold.close(10)

    def _pulled(self, response: RemotingCommand | None) -> str:
        if response is None:
            return "no response"
        if "nextBeginOffset" not in response.ext_fields:
            return _code(response)
        header = response.header(PullMessageResponseHeader)
        assert header.suggest_which_broker_id == 0
        bodies = [message.body.decode() for message in decode_messages(response.body, "broker-a")]
        shown = " ".join(bodies) if len(bodies) < 8 and len("".join(bodies)) < 80 else f"{len(bodies)} messages"
        code = ResponseCode.of(response.code)
        text = f"{code.name} next {header.next_begin_offset} of {header.min_offset}..{header.max_offset}"
        return f"{text}: {shown}" if bodies else text

    def read(self, topic: str, queue: str = "0") -> list[str]:
        """Print the messages of a queue as a consumer decodes them, without the properties that the server adds."""
        return [_message(each) for each in self._messages(topic, int(queue))] or ["no messages"]

    def record(self, topic: str, queue: str = "0") -> list[str]:
        """Print the last message of a queue as it is stored, with all properties."""
        message = self._messages(topic, int(queue))[-1]
        return self.at(str(message.physical_offset))

    def born(self, topic: str, queue: str = "0") -> list[str]:
        """Print where and when the last message of a queue was born."""
        message = self._messages(topic, int(queue))[-1]
        return [f"born at {message.born_host} {message.born_timestamp} stored {message.store_timestamp}"]

    def at(self, offset: str) -> list[str]:
        """Print the record at a physical offset, with all properties."""
        record = self.serving.engine.store.read_at(int(offset))
        assert record is not None
        stored = decode_properties(record.properties_bytes)
        head = f"{record.topic} queue {record.queue_id} flag {record.flag} sys {record.sys_flag:#x}"
        return [f"{head} body of {len(record.body)} bytes", *(f"  {name}={value}" for name, value in stored.items())]

    def _messages(self, topic: str, queue_id: int = 0) -> list[MessageExt]:
        return self.serving.read(topic, queue_id=queue_id)


def _host(text: str) -> tuple[str, int]:
    ip, _, port = text.rpartition(":")
    return ip.strip("[]"), int(port)


def _messages(topic: str, text: str) -> list[Message]:
    text, _, count = text.partition("*")
    body, *pairs = text.split(":")
    return [Message(topic, body.encode(), dict(pair.split("~") for pair in pairs)) for _ in range(int(count or 1))]


def _code(response: RemotingCommand | None) -> str:
    if response is None:
        return "no response"
    code = ResponseCode.of(response.code)
    name = code.name if isinstance(code, ResponseCode) else str(response.code)
    return f"{name}: {response.remark}" if response.remark else name


def _message(message: MessageExt) -> str:
    body = message.body.decode() if len(message.body) < 60 else f"{len(message.body)} bytes"
    properties = {name: value for name, value in message.properties.items() if name not in _ADDED}
    properties["UNIQ_KEY"] = _id(properties["UNIQ_KEY"])
    shown = " ".join(f"{name}={value}" for name, value in properties.items())
    return f"{message.queue_offset} {body} retries {message.reconsume_times} {shown}".rstrip()


def _id(text: str) -> str:
    """Return an id of the script; one that the server created differs in each run."""
    return text if len(text) < 8 else "<new>"
