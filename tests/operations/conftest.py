"""The administration of a filled broker: in memory, a store directory, and a server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mqtemplate.operations import BrokerAdmin
from tests.operations.brokers import KINDS, admin_of


@pytest.fixture(params=KINDS)
def admin(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BrokerAdmin]:
    with admin_of(request.param, tmp_path) as admin:
        yield admin
