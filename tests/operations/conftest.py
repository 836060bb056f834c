"""The administration of a filled broker: in memory, a store directory, and a server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mqtemplate.operations import BrokerAccess
from tests.operations.brokers import KINDS, access_of


@pytest.fixture(params=KINDS)
def access(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BrokerAccess]:
    with access_of(request.param, tmp_path) as access:
        yield access
