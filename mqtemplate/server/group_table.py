"""The consumer groups and their settings: ``config/subscriptionGroup.json``."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

from mqtemplate.clock import Clock
from mqtemplate.errors import RemoteProtocolError
from mqtemplate.remoting.protocol.bodies import fastjson
from mqtemplate.remoting.protocol.bodies.group import SubscriptionGroupConfig
from mqtemplate.remoting.protocol.bodies.route import DataVersion as DataVersionBody
from mqtemplate.store.files.json_files import DataVersion, dump_json, format_errors, read_table, write_table
from mqtemplate.store.files.store_files import StoreFiles

_SYSTEM_GROUPS = (
    "CID_ONS-HTTP-PROXY",
    "CID_ONSAPI_OWNER",
    "CID_ONSAPI_PERMISSION",
    "CID_ONSAPI_PULL",
    "CID_RMQ_SYS_TRANS",
    "FILTERSRV_CONSUMER",
    "SELF_TEST_C_GROUP",
    "TOOLS_CONSUMER",
)
"""Source: ``broker: SubscriptionGroupManager.init``."""


class SubscriptionGroupTable:
    """Group -> its settings, in RocketMQ's form. What a newer one keeps beside those that we know stays as found.

    - A group that nobody set up has the defaults, and gets them written down with its first heartbeat (`ensure`).
    - A change is in the file before the call returns.

    Args:
        auto_create: Whether `ensure` may make a group.
    """

    _NAME = "config/subscriptionGroup.json"

    def __init__(self, store_files: StoreFiles, clock: Clock, *, auto_create: bool = True) -> None:
        self._store_files = store_files
        self._clock = clock
        self._auto_create = auto_create
        self._lock = threading.Lock()
        self._version = DataVersion()
        self._table: dict[str, SubscriptionGroupConfig] = {}
        self._found: dict[str, dict[str, Any]] = {}
        self._other: dict[str, Any] = {}

    def load(self) -> None:
        """Read the file.

        Raises:
            StoreFormatError: It cannot be understood.
        """
        table = read_table(self._store_files, self._NAME)
        with format_errors(self._NAME):
            self._version = DataVersion.of(table)
            self._found = dict(table.pop("subscriptionGroupTable", {}))
            self._table = {group: _read(config) for group, config in self._found.items()}
        table.pop("dataVersion", None)
        self._other = table

    @property
    def version(self) -> DataVersionBody:
        """Counts the changes of this table."""
        version = self._version
        return DataVersionBody(
            counter=version.counter, state_version=version.state_version, timestamp=version.timestamp
        )

    def all(self) -> dict[str, SubscriptionGroupConfig]:
        """Every group by name, RocketMQ's own last."""
        return self._table | {
            group: SubscriptionGroupConfig(group_name=group) for group in _SYSTEM_GROUPS if group not in self._table
        }

    def find(self, group: str) -> SubscriptionGroupConfig | None:
        """The settings of *group*; None if nobody made it. RocketMQ's own groups are always there."""
        found = self._table.get(group)
        if found is None and group in _SYSTEM_GROUPS:
            return SubscriptionGroupConfig(group_name=group)
        return found

    def ensure(self, group: str) -> SubscriptionGroupConfig | None:
        """The settings of *group*, made if missing; None where groups are only made by an administrator.

        Raises:
            StoreError: The table could not be written; it is as before.
        """
        found = self.find(group)
        if found is None and self._auto_create:
            found = SubscriptionGroupConfig(group_name=group)
            self.put([found])
        return found

    def put(self, configs: Iterable[SubscriptionGroupConfig]) -> None:
        """Make groups, or change them.

        Raises:
            StoreError: The table could not be written; it is as before.
        """
        with self._lock:
            fresh = {config.group_name: config for config in configs}
            if all(self._table.get(group) == config for group, config in fresh.items()):
                return
            self._replace(self._table | fresh)

    def delete(self, group: str) -> bool:
        """Forget *group*; False if there is none.

        Raises:
            StoreError: The table could not be written; it is as before.
        """
        with self._lock:
            if group not in self._table:
                return False
            self._replace({name: config for name, config in self._table.items() if name != group})
            return True

    def _replace(self, table: dict[str, SubscriptionGroupConfig]) -> None:
        found = {group: self._found.get(group, {}) | _written(config) for group, config in table.items()}
        version = self._version.next(self._clock.now_ms())
        write_table(
            self._store_files, self._NAME, self._other | {"dataVersion": version, "subscriptionGroupTable": found}
        )
        self._table, self._found = table, found


def _read(config: Mapping[str, Any]) -> SubscriptionGroupConfig:
    try:
        return SubscriptionGroupConfig.decode(dump_json(config).encode())
    except RemoteProtocolError as exc:
        raise ValueError(str(exc)) from exc


def _written(config: SubscriptionGroupConfig) -> dict[str, Any]:
    written: dict[str, Any] = fastjson.loads(config.encode(standard=True))
    return written
