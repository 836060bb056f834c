"""Commands of golden scripts for a server: requests, and the responses that a client gets. See `tests.golden`.

A request is ``ask CODE field=value …`` with the fields of the wire, ``body=…`` and ``over=NAME`` of a connection. In a
value ``$name`` is replaced by what another command has stored under the name.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_type_hints
from zlib import crc32

from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import VirtualClock
from mqtemplate.delay.recall_handle import decode_handle, encode_handle
from mqtemplate.message import HostAddress, Message, MessageExt, MessageQueue, parse_offset_msg_id
from mqtemplate.remoting.protocol import LanguageCode, RemotingCommand, RequestCode, ResponseCode, Version
from mqtemplate.remoting.protocol.acl import sign_command
from mqtemplate.remoting.protocol.messages import decode_messages
from mqtemplate.server import Account, AclSettings, BrokerServerSettings, Right
from tests.server.serving import SECRET, RecordingConnection, Serving


class ServerCommands:
    """The commands of one script, and the server that they use.

    Args:
        path: The store directory of the server; `restart` opens it again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._settings: dict[str, Any] = {}
        self._serving: Serving | None = None
        self._connections: dict[str, RecordingConnection] = {}
        self._values: dict[str, str] = {}
        self._sent = 0
        self._accounts: dict[str, Account] = {}

    @property
    def serving(self) -> Serving:
        """The running server. The first command starts it."""
        if self._serving is None:
            types = get_type_hints(BrokerServerSettings)
            own = {name: json.loads(value) for name, value in self._settings.items() if name in types}
            others = {name: json.loads(value) for name, value in self._settings.items() if name not in types}
            engine_settings = EmbeddedSettings(max_hash_slot_num=1_000, max_index_num=4_000, **others)
            engine = EmbeddedBroker(self._path, engine_settings, VirtualClock())
            acl = AclSettings(accounts=tuple(self._accounts.values())) if self._accounts else None
            self._serving = Serving(BrokerServerSettings(**own), engine, acl=acl)
            self._serving.__enter__()
        return self._serving

    def close(self) -> None:
        """Close the server, and its connections."""
        self._connections.clear()
        if self._serving is not None:
            self._serving.__exit__(None, None, None)
            self._serving = None

    def _connection(self, name: str) -> RecordingConnection:
        """Return the connection with a name.

        One with the name of an account signs its requests; ``ACCOUNT/2`` is another one. ``NAME@IP`` has an address.
        """
        if name not in self._connections:
            key, remote = name.partition("/")[0], HostAddress(name.partition("@")[2] or "127.0.0.1", 54321)
            access_key = key if key in self._accounts else None
            self._connections[name] = RecordingConnection(remote, access_key=access_key)
        return self._connections[name]

    def _filled(self, text: str) -> str:
        return re.sub(r"\$(\w+)", lambda found: self._values[found[1]], text)

    # --- the server ----------------------------------------------------------------------------

    def server(self, **settings: str) -> None:
        """Start another server, with these settings of the server and its engine in JSON."""
        self.close()
        self._settings, self._accounts = settings, {}

    def account(self, key: str, topics: str = "", groups: str = "", **more: str) -> None:
        """Add an account, before the server starts: ``topics=NAME:RIGHT,…`` and ``groups=``; a right is PUB or SUB.

        Args:
            more: ``admin=true``; ``topic=RIGHT`` and ``group=RIGHT`` are the default rights.
        """
        self._accounts[key] = Account(
            access_key=key,
            secret_key=SECRET,
            admin="admin" in more,
            default_topic_perm=Right.parse(more.get("topic", "DENY")),
            default_group_perm=Right.parse(more.get("group", "DENY")),
            topic_perms=_rights(topics),
            group_perms=_rights(groups),
        )

    def restart(self) -> None:
        """Close the server, and open its store directory again."""
        self.close()

    def advance(self, milliseconds: str) -> None:
        """Advance the clock, and step the services."""
        self.serving.advance(int(milliseconds))

    def held(self) -> list[str]:
        """Print how many objects clients hold."""
        limits = self.serving.server.limits
        names = ("pulls", "locks", "groups", "subscriptions")
        return [" ".join(f"{name} {len(getattr(limits, name))}" for name in names)]

    def refused(self, kind: str) -> list[str]:
        """Print how many requests were refused because of a limit."""
        return [str(self.serving.engine.metrics.snapshot()[f"server.refused.{kind}"])]

    def topic(self, name: str, queues: str = "1") -> None:
        """Create a topic in the process of the broker."""
        self.serving.engine.create_topic(name, int(queues))

    def topics(self) -> list[str]:
        """Print the topics of applications and groups, with their queues for producers and for consumers."""
        found = self.serving.server.topics.all().items()
        shown = (item for item in found if not self.serving.server.topics.is_system(item[0]))
        return [f"{name}: {each.write_queue_nums}/{each.read_queue_nums} perm {each.perm}" for name, each in shown]

    def group(self, name: str, **fields: str) -> None:
        """Create or change a group, with fields of RocketMQ's JSON."""
        config = {"groupName": name, **{field: json.loads(value) for field, value in fields.items()}}
        self.ask("UPDATE_AND_CREATE_SUBSCRIPTIONGROUP", body=json.dumps(config))

    def commit(self, group: str, topic: str, queue: str, offset: str) -> None:
        """Commit an offset in the process of the broker."""
        self.serving.engine.groups.commit_offset(
            group, MessageQueue(topic, self.serving.engine.name, int(queue)), int(offset)
        )

    def committed(self, group: str, topic: str) -> list[str]:
        """Print the offsets of a group, by queue."""
        return [str(dict(sorted(self.serving.engine.engine.offsets.offsets(group, topic).items())))]

    def lengths(self, topic: str) -> list[str]:
        """Print the number of messages in each queue."""
        return [
            " ".join(str(self.serving.engine.reader.max_offset(queue)) for queue in self.serving.engine.queues(topic))
        ]

    def local(self, topic: str, body: str = "x", at: str = "", handle: str = "", **properties: str) -> None:
        """Send a message in the process of the broker.

        Args:
            at: Name under which its physical offset is stored.
            handle: Name under which its handle is stored.
        """
        sent = self.serving.engine.sends.send(Message(topic, body.encode(), properties))
        self._values[at] = str(parse_offset_msg_id(sent.offset_msg_id)[1])
        self._values[handle] = sent.handle or ""

    def forge(self, name: str, handle: str, **fields: str) -> None:
        """Store a handle with other fields under a name."""
        self._values[name] = encode_handle(decode_handle(self._values[handle])._replace(**fields))  # type: ignore[arg-type]

    # --- requests ------------------------------------------------------------------------------

    def send(
        self,
        topic: str,
        body: str = "x",
        queue: str = "0",
        handle: str = "",
        half: str = "",
        over: str = "",
        **more: str,
    ) -> list[str]:
        """Send a message with the id ``ID-n``. Print the response if it is not SUCCESS.

        Args:
            handle: Name under which the handle of a delayed message is stored.
            half: Name of a half message: its offsets are stored as ``name_queue`` and ``name_physical``.
            more: Properties, whose names have capital letters, and fields of the header.
        """
        self._sent += 1
        properties = {"UNIQ_KEY": f"ID-{self._sent}", **{name: each for name, each in more.items() if name.isupper()}}
        header: dict[str, Any] = {name: json.loads(each) for name, each in more.items() if not name.isupper()}
        if half:
            properties, header["sys_flag"] = {**properties, "TRAN_MSG": "true", "PGROUP": "producers"}, 4
        response = self.serving.send(
            topic, body.encode(), properties, queue_id=int(queue), over=self._connection(over), **header
        )
        if response is None:
            return ["no response yet"]
        if handle:
            self._values[handle] = response.ext_fields["recallHandle"]
        if half:
            self._values[f"{half}_queue"] = response.ext_fields["queueOffset"]
            self._values[f"{half}_physical"] = str(parse_offset_msg_id(response.ext_fields["msgId"])[1])
        return [] if response.code == ResponseCode.SUCCESS else _shown(response)

    def sequenced(self, *topics: str, over: str = "") -> list[str]:
        """Send one message to queue 0 of each topic with numbers."""
        messages = [Message(topic, b"x") for topic in topics]
        response = self.serving.send_sequenced(*messages, over=self._connection(over), version=0)
        return _shown(response)

    def read(self, topic: str, queue: str = "0") -> list[str]:
        """Print the messages of a queue, as a client decodes them."""
        found = self.serving.read(topic, queue_id=int(queue))
        return [f"{each.msg_id} {each.body.decode()}" for each in found] or ["nothing"]

    def open(self) -> list[str]:
        """Print the number of open transactions."""
        return [str(self.serving.engine.engine.transactions.open_count)]

    def heartbeat(
        self, group: str, *topics: str, client: str = "client@1", producers: str = "", over: str = "", **more: str
    ) -> list[str]:
        """Send a heartbeat of a consumer of *group*, and of producers. Print the response if it is not SUCCESS."""
        options: dict[str, Any] = {**more, "producers": producers.split(",") if producers else ()}
        response = self.serving.heartbeat(group, *topics, client_id=client, over=self._connection(over), **options)
        return [] if response.code == ResponseCode.SUCCESS else _shown(response)

    def ask(
        self, code: str, body: str = "", over: str = "", version: str = "V5_5_0", secret: str = SECRET, **fields: str
    ) -> list[str]:
        """Send any request, and print its response. With the name of an account it is signed with its key."""
        sent = self._filled(body).encode()
        self._values["crc"] = str(crc32(sent) & 0x7FFF_FFFF)
        request = RemotingCommand.request(RequestCode[code], None, sent, opaque=7)
        request.version, request.language = Version[version], LanguageCode.JAVA
        request.ext_fields = {name: self._filled(value) for name, value in fields.items()}
        connection = self._connection(over)
        if connection.access_key is not None or secret != SECRET:
            sign_command(request, connection.access_key or over, secret)
        response = self.serving.process(connection, request)
        if response is None:
            return ["no response yet"]
        return _shown(response)

    def pushed(self, over: str = "", only: str = "") -> list[str]:
        """Print the requests that the server sent over a connection since the last time, or *only* their codes."""
        connection = self._connection(over)
        pushed, connection.pushed = connection.pushed, []
        if only:
            return [RequestCode(each.code).name for each in pushed] or ["nothing"]
        return [line for each in pushed for line in _shown(each, RequestCode)] or ["nothing"]

    def disconnect(self, over: str = "") -> None:
        """Close a connection, as its client does."""
        self.serving.disconnect(self._connection(over))

    def closed(self, over: str = "") -> list[str]:
        """Print why the server closed a connection."""
        return [str(self._connection(over).closed_for)]


def _rights(text: str) -> dict[str, Right]:
    pairs = [each.split(":") for each in text.split(",") if each]
    return {name: Right.parse(right) for name, right in pairs}


def _shown(command: RemotingCommand, codes: Any = ResponseCode) -> list[str]:
    fields = " ".join(f"{name}={value}" for name, value in sorted(command.ext_fields.items()))
    one_way = " (one-way)" if command.is_one_way else ""
    lines = [f"{codes(command.code).name}{one_way} {fields}".rstrip()]
    lines += [f"  {command.remark}"] if command.remark else []
    try:
        shown = command.body.decode().splitlines()
    except UnicodeDecodeError:
        shown = list(map(_record, decode_messages(command.body, "broker-a")))
    return lines + [f"  {line}" for line in shown]


def _record(message: MessageExt) -> str:
    place = f"{message.topic} {message.queue_id} at {message.queue_offset}"
    return f"{message.msg_id} {message.body.decode()} in {place} {message.properties}"
