"""A scripted proxy, and a started broker that uses it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mqtemplate.brokers import GrpcBroker, GrpcSettings
from tests.brokers.grpc.scripted_proxy import ScriptedProxy


@pytest.fixture
def proxy() -> Iterator[ScriptedProxy]:
    with ScriptedProxy() as proxy:
        yield proxy


@pytest.fixture
def broker(proxy: ScriptedProxy) -> Iterator[GrpcBroker]:
    with GrpcBroker(GrpcSettings(endpoints=proxy.address)) as broker:
        yield broker
