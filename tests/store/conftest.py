"""Fixtures: a store in a folder that a test may close, kill and open again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from mqtemplate.clock import VirtualClock
from mqtemplate.store.message_store import MessageStore
from mqtemplate.store.settings import StoreSettings
from tests.store.small_store import OpenStore, opened


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def quick_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, if the system has one: for tests that sync nothing and create thousands of files."""
    memory = Path("/dev/shm")
    with TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as folder:
        yield Path(folder)


@pytest.fixture
def open_store(tmp_path: Path, clock: VirtualClock) -> Iterator[OpenStore]:
    """Function that opens the store in ``tmp_path``. Stores that are still open at the end are closed."""
    stores: list[MessageStore] = []

    def open_(settings: StoreSettings | None = None) -> MessageStore:
        stores.append(opened(tmp_path, settings, clock=clock))
        return stores[-1]

    yield open_
    for store in stores:
        store.close()
