"""The table of consumer groups: its file. `tests/server/scripts/groups.script` has the rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mqtemplate.clock import VirtualClock
from mqtemplate.errors import StoreFormatError
from mqtemplate.remoting.protocol.bodies.group import (
    SubscriptionGroupConfig,
)
from mqtemplate.server.state.groups import SubscriptionGroupTable
from mqtemplate.store.files.folder_store_files import FolderStoreFiles
from mqtemplate.store.files.store_files import MemoryStoreFiles


def test_a_change_preserves_settings_that_are_unknown_here(tmp_path: Path) -> None:
    """A newer RocketMQ may store more settings of a group in the same file."""
    file = tmp_path / "config" / "subscriptionGroup.json"
    file.parent.mkdir()
    known = {"groupName": "billing", "retryMaxTimes": 3, "newInVersion9": {"a": 1}}
    file.write_text(json.dumps({"subscriptionGroupTable": {"billing": known}, "forbiddenTable": {"x": {"y": 1}}}))
    table = SubscriptionGroupTable(FolderStoreFiles(tmp_path), VirtualClock())
    table.load()

    table.put([SubscriptionGroupConfig(group_name="billing", retry_max_times=5)])

    written = json.loads(file.read_text())
    assert written["subscriptionGroupTable"]["billing"]["retryMaxTimes"] == 5
    assert written["subscriptionGroupTable"]["billing"]["newInVersion9"] == {"a": 1}
    assert written["forbiddenTable"] == {"x": {"y": 1}}
    assert written["dataVersion"]["counter"] == 1


@pytest.mark.parametrize("text", ['{"subscriptionGroupTable": {"a": {"retryMaxTimes": "many"}}}', "[1]"])
def test_the_error_for_a_malformed_table_suggests_the_backup(text: str) -> None:
    store_files = MemoryStoreFiles()
    store_files.write_bytes("config/subscriptionGroup.json", text.encode())

    with pytest.raises(StoreFormatError, match="config/subscriptionGroup.json .*restore it from"):
        SubscriptionGroupTable(store_files, VirtualClock()).load()
