"""Consumer groups and their settings (``config/subscriptionGroup.json``), the way in which they get messages
(``config/messageRequestMode.json``), and what clients create by using it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from mqtemplate.clock import Clock
from mqtemplate.engine.clients import Owner
from mqtemplate.engine.topics import EntryWriter
from mqtemplate.errors import DestinationError, RemoteProtocolError
from mqtemplate.remoting.protocol.bodies.group import SetMessageRequestModeRequestBody, SubscriptionGroupConfig
from mqtemplate.remoting.protocol.bodies.json_body import JsonBody
from mqtemplate.remoting.protocol.bodies.route import DataVersionBody
from mqtemplate.remoting.protocol.codes import ResponseCode, Version
from mqtemplate.server.requests.caller import Caller
from mqtemplate.server.requests.refusal import RefusedError
from mqtemplate.server.state.limits import ClientLimits
from mqtemplate.server.state.topics import TopicConfigs
from mqtemplate.store.files.store_files import StoreFiles
from mqtemplate.store.tables import EntryTable, check_names, format_errors, read_table, write_table
from mqtemplate.topics import RETRY_TOPIC_PREFIX, check_topic

_BodyT = TypeVar("_BodyT", bound=JsonBody)

_SYSTEM_GROUPS = {
    group: SubscriptionGroupConfig(group_name=group)
    for group in (
        "CID_ONS-HTTP-PROXY",
        "CID_ONSAPI_OWNER",
        "CID_ONSAPI_PERMISSION",
        "CID_ONSAPI_PULL",
        "CID_RMQ_SYS_TRANS",
        "FILTERSRV_CONSUMER",
        "SELF_TEST_C_GROUP",
        "TOOLS_CONSUMER",
    )
}
"""Source: ``broker: SubscriptionGroupManager.init``."""


class _StoredGroup(NamedTuple):
    """Settings of a group, and the same as in the file, with settings that are unknown here."""

    config: SubscriptionGroupConfig
    stored: dict[str, Any]


class SubscriptionGroupTable:
    """Table from group name to settings, in RocketMQ's format.

    - A new group has the default settings. They are stored by the first request that names the group (`ensure`,
      `create`), soon after its response: a crash before loses nothing, since the next request stores the same.
    - A change of an administrator is on disk before the call returns.
    - Settings that only a newer RocketMQ knows are preserved.

    Args:
        auto_create: False if `ensure` may not create groups.
        writer: Writes what `ensure` and `create` add.

    Attributes:
        file: The entries, and how they are written.
    """

    def __init__(
        self, store_files: StoreFiles, clock: Clock, writer: EntryWriter | None = None, *, auto_create: bool = True
    ) -> None:
        self._auto_create = auto_create
        self.file: EntryTable[_StoredGroup] = EntryTable(
            *(store_files, clock, "config/subscriptionGroup.json", "subscriptionGroupTable"),
            lambda group: group.stored,
        )
        if writer is not None:
            writer.add(self.file)

    def load(self) -> None:
        """Read the file.

        Raises:
            StoreFormatError: The file is not such a table.
        """

        def parse(table: dict[str, Any]) -> dict[str, _StoredGroup]:
            check_names("group", table)
            return {
                name: _StoredGroup(_parsed(SubscriptionGroupConfig, stored), stored) for name, stored in table.items()
            }

        self.file.load(parse)

    @property
    def version(self) -> DataVersionBody:
        """Number of changes of the table, for clients that compare tables."""
        return DataVersionBody(**vars(self.file.version))

    def all(self) -> dict[str, SubscriptionGroupConfig]:
        """Return all groups by name, RocketMQ's system groups included."""
        return _SYSTEM_GROUPS | {name: group.config for name, group in self.file.entries.items()}

    def count(self) -> int:
        """Return the number of groups in the table."""
        return len(self.file.entries)

    def find(self, group: str) -> SubscriptionGroupConfig | None:
        """Return the settings of *group*, or None if it does not exist. System groups always exist."""
        found = self.file.entries.get(group)
        return _SYSTEM_GROUPS.get(group) if found is None else found.config

    def ensure(self, group: str) -> SubscriptionGroupConfig:
        """Return the settings of *group*. Create it if it is missing.

        Raises:
            RefusedError: The group is missing and may not be created, or its name is illegal.
        """
        found = self.find(group)
        if found is not None:
            return found
        self.check_new(group)
        created = SubscriptionGroupConfig(group_name=group)
        self.create([created])
        return self.find(group) or created

    def check_new(self, group: str) -> None:
        """Check that a client may create *group*.

        Raises:
            RefusedError: Groups may not be created by clients, or its name is illegal.
        """
        try:
            check_topic(RETRY_TOPIC_PREFIX + group)
        except DestinationError as exc:
            raise RefusedError(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
                f"{group[:40]!r} is not a valid group name; use at most 248 letters, digits, '_', '-', '%', '|'",
            ) from exc
        if not self._auto_create:
            raise RefusedError(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
                f"group {group!r} does not exist; create it first, or set auto-create-subscription-group to true",
            )

    def create(self, configs: Iterable[SubscriptionGroupConfig]) -> None:
        """Create the missing ones of several groups. They are written soon."""
        self.file.add_later({config.group_name: _StoredGroup(config, config.to_json()) for config in configs})

    def put(self, configs: Iterable[SubscriptionGroupConfig]) -> None:
        """Create or change groups.

        Raises:
            StoreError: The table could not be written; it is as before.
        """
        latest = {config.group_name: config for config in configs}

        def updated(table: dict[str, _StoredGroup]) -> dict[str, _StoredGroup]:
            changed = {}
            for name, config in latest.items():
                found = table.get(name)
                if found is None or found.config != config:
                    changed[name] = _StoredGroup(config, ({} if found is None else found.stored) | config.to_json())
            return table | changed if changed else table

        self.file.change(updated)

    def delete(self, group: str) -> bool:
        """Delete *group*. Return False if it does not exist.

        Raises:
            StoreError: The table could not be written; it is as before.
        """
        found = False

        def without(table: dict[str, _StoredGroup]) -> dict[str, _StoredGroup]:
            nonlocal found
            found = group in table
            return {name: each for name, each in table.items() if name != group} if found else table

        self.file.change(without)
        return found


class RequestModes:
    """Table from topic and group to the way in which the members get the messages, in RocketMQ's format.

    - A pair that is not in the table pulls.
    - A change is on disk before the call returns.
    """

    _NAME = "config/messageRequestMode.json"
    _FIELD = "messageRequestModeMap"
    _MAX_MODES = 100_000

    def __init__(self, store_files: StoreFiles) -> None:
        self._store_files = store_files
        self._lock = threading.Lock()
        self._table: dict[str, dict[str, SetMessageRequestModeRequestBody]] = {}

    def load(self) -> None:
        """Read the file.

        Raises:
            StoreFormatError: The file is not such a table.
        """
        with format_errors(self._NAME):
            found = read_table(self._store_files, self._NAME).get(self._FIELD, {})
            self._table = {
                str(topic): {
                    str(group): _parsed(
                        SetMessageRequestModeRequestBody, {"topic": topic, "consumerGroup": group} | mode
                    )
                    for group, mode in modes.items()
                }
                for topic, modes in found.items()
            }

    def find(self, topic: str, group: str) -> SetMessageRequestModeRequestBody:
        """Return the mode of a group for a topic."""
        found = self._table.get(topic, {}).get(group)
        return found or SetMessageRequestModeRequestBody(topic=topic, consumer_group=group)

    def put(self, mode: SetMessageRequestModeRequestBody) -> None:
        """Set the mode of a group for a topic.

        Raises:
            RefusedError: The table is full.
            StoreError: The table could not be written; it is as before.
        """
        with self._lock:
            table = self._table
            if sum(map(len, table.values())) >= self._MAX_MODES:
                raise RefusedError(
                    ResponseCode.SYSTEM_BUSY, f"{self._MAX_MODES} modes are set already; delete unused topics or groups"
                )
            of_topic = table.get(mode.topic, {}) | {mode.consumer_group: mode}
            self._write(table | {mode.topic: of_topic})

    def forget(self, *, topic: str | None = None, group: str | None = None) -> None:
        """Remove the modes of a deleted topic or group.

        Raises:
            StoreError: The table could not be written; it is as before.
        """
        with self._lock:
            kept = {
                name: {of: mode for of, mode in modes.items() if of != group}
                for name, modes in self._table.items()
                if name != topic
            }
            kept = {name: modes for name, modes in kept.items() if modes}
            if kept != self._table:
                self._write(kept)

    def _write(self, table: dict[str, dict[str, SetMessageRequestModeRequestBody]]) -> None:
        texts = {topic: {group: mode.to_json() for group, mode in modes.items()} for topic, modes in table.items()}
        write_table(self._store_files, self._NAME, {self._FIELD: texts})
        self._table = table


def max_reconsume_times(group: SubscriptionGroupConfig, requested: int | None, version: int) -> int:
    """Return how often a message is retried. Clients before 3.4.9 cannot choose the number."""
    return group.retry_max_times if requested is None or version < Version.V3_4_9 else requested


def mixed_group_error(group: str) -> RefusedError:
    """Return the error for a remote consumer whose group has consumers in the broker's own process."""
    return RefusedError(
        ResponseCode.NO_PERMISSION,
        f"group {group!r} has listeners in the broker's own process, which do not share queues with remote consumers; "
        "choose another group for the remote consumer",
    )


def pull_beside_pop_error(group: str) -> RefusedError:
    """Return the error for a pull of a group that has consumers in the broker's own process that receive by POP."""
    return RefusedError(
        ResponseCode.NO_PERMISSION,
        f"group {group!r} has listeners in the broker's own process that receive by POP: each message would be handled "
        "by them and by consumers that pull; let the consumer use POP too, or choose another group for it",
    )


def _parsed(kind: type[_BodyT], value: Mapping[str, Any]) -> _BodyT:
    try:
        return kind.from_json(value)
    except RemoteProtocolError as exc:
        raise ValueError(str(exc)) from exc


@dataclass(frozen=True, slots=True)
class ClientCreations:
    """Creates what a client uses first, within its limits.

    Args:
        pause: Called between the parts of long work.

    Raises:
        RefusedError: It may not be created, or the client has created too much.
        StoreError: A table could not be written.
    """

    topics: TopicConfigs
    groups: SubscriptionGroupTable
    limits: ClientLimits
    pause: Callable[[], None]

    def group(self, caller: Caller, group: str) -> SubscriptionGroupConfig:
        """Return the settings of the group in a request of a client. Create it if it is missing."""
        found = self.groups.find(group)
        if found is not None:
            return found
        self.groups.check_new(group)
        with self.limits.new_groups.creating(caller.owner):
            return self.groups.ensure(group)

    def topic(self, caller: Caller, topic: str, default_topic: str, queue_nums: int) -> None:
        """Create the topic of a message if it is missing; see `TopicConfigs.create_by_first_message`."""
        if not self.topics.table.has(topic):
            self.topics.check_first_message(topic, default_topic)
            with self.limits.topics.creating(caller.owner):
                self.topics.create_by_first_message(topic, default_topic, queue_nums)

    def has_group(self, group: str) -> bool:
        """Return True if a group and its retry topic exist."""
        config = self.groups.find(group)
        if config is None:
            return False
        return config.retry_queue_nums <= 0 or self.topics.table.has(RETRY_TOPIC_PREFIX + group)

    def groups_of(self, owner: Owner, names: Iterable[str]) -> list[RefusedError]:
        """Create the missing groups of a client, and their retry topics. Return why some were refused.

        It does not wait until they are written; see `SubscriptionGroupTable`.
        """
        groups, refusals = self.groups, []
        wanted = dict.fromkeys(names)
        new = []
        for name in [name for name in wanted if groups.find(name) is None]:
            try:
                groups.check_new(name)
                new.append(name)
            except RefusedError as exc:  # The other groups of the client are registered nevertheless.
                refusals.append(exc.with_traceback(None))
        if new:
            try:
                with self.limits.new_groups.creating(owner, len(new)):
                    # Made only now: a client that is refused may send hundreds of groups again and again.
                    groups.create(SubscriptionGroupConfig(group_name=name) for name in new)
            except RefusedError as exc:
                refusals.append(exc.with_traceback(None))
            self.pause()
        found = [config for name in wanted if (config := groups.find(name)) is not None]
        self.topics.create_retry_topics(found)
        return refusals
