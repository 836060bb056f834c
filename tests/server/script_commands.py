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
from mqtemplate.message import MessageExt, MessageQueue, parse_offset_msg_id
from mqtemplate.remoting.protocol import LanguageCode, RemotingCommand, RequestCode, ResponseCode, Version
from mqtemplate.remoting.protocol.messages import decode_messages
from mqtemplate.server import BrokerServerSettings
from tests.server.serving import RecordingConnection, Serving


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

    @property
    def serving(self) -> Serving:
        """The running server. The first command starts it."""
        if self._serving is None:
            types = get_type_hints(BrokerServerSettings)
            own = {name: json.loads(value) for name, value in self._settings.items() if name in types}
            others = {name: json.loads(value) for name, value in self._settings.items() if name not in types}
            engine_settings = EmbeddedSettings(max_hash_slot_num=1_000, max_index_num=4_000, **others)
            engine = EmbeddedBroker(self._path, engine_settings, VirtualClock())
            self._serving = Serving(BrokerServerSettings(**own), engine)
            self._serving.__enter__()
        return self._serving

    def close(self) -> None:
        """Close the server, and its connections."""
        self._connections.clear()
        if self._serving is not None:
            self._serving.__exit__(None, None, None)
            self._serving = None

    def _connection(self, name: str | None) -> RecordingConnection:
        return self._connections.setdefault(name or "", RecordingConnection())

    def _filled(self, text: str) -> str:
        return re.sub(r"\$(\w+)", lambda found: self._values[found[1]], text)

    # --- the server ----------------------------------------------------------------------------

    def server(self, **settings: str) -> None:
        """Start another server, with these settings of the server and its engine in JSON."""
        self.close()
        self._settings = settings

    def restart(self) -> None:
        """Close the server, and open its store directory again."""
        self.close()

    def advance(self, milliseconds: str) -> None:
        """Advance the clock, and step the services."""
        self.serving.advance(int(milliseconds))

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
        assert response is not None
        if handle:
            self._values[handle] = response.ext_fields["recallHandle"]
        if half:
            self._values[f"{half}_queue"] = response.ext_fields["queueOffset"]
            self._values[f"{half}_physical"] = str(parse_offset_msg_id(response.ext_fields["msgId"])[1])
        return [] if response.code == ResponseCode.SUCCESS else _shown(response)

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

    def ask(self, code: str, body: str = "", over: str = "", version: str = "V5_5_0", **fields: str) -> list[str]:
        """Send any request, and print its response."""
        sent = self._filled(body).encode()
        self._values["crc"] = str(crc32(sent) & 0x7FFF_FFFF)
        request = RemotingCommand.request(RequestCode[code], None, sent, opaque=7)
        request.version, request.language = Version[version], LanguageCode.JAVA
        request.ext_fields = {name: self._filled(value) for name, value in fields.items()}
        response = self.serving.process(self._connection(over), request)
        if response is None:
            return ["no response yet"]
        return _shown(response)

    def pushed(self, over: str = "") -> list[str]:
        """Print the requests that the server sent over a connection since the last time."""
        connection = self._connection(over)
        pushed, connection.pushed = connection.pushed, []
        return [line for each in pushed for line in _shown(each, RequestCode)] or ["nothing"]

    def disconnect(self, over: str = "") -> None:
        """Close a connection, as its client does."""
        self.serving.disconnect(self._connection(over))

    def closed(self, over: str = "") -> list[str]:
        """Print why the server closed a connection."""
        return [str(self._connection(over).closed_for)]


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
