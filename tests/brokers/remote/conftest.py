"""Our own server and a client of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mqtemplate.brokers import RemoteBroker
from mqtemplate.server import LocalCluster
from tests.brokers.remote.clients import client, server


@pytest.fixture
def our_server() -> Iterator[LocalCluster]:
    with server() as cluster:
        yield cluster


@pytest.fixture
def our_client(our_server: LocalCluster, tmp_path: Path) -> Iterator[RemoteBroker]:
    with client(our_server.address, tmp_path) as broker:
        yield broker
