"""The concurrency of a listener is changed while it reads from Apache RocketMQ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from bench.peer.jvm import unavailable_reason
from mqtemplate.brokers import RemoteSettings
from tests.conformance.servers import is_registered, rocketmq_server
from tests.listener.concurrency import CASES, check_application
from tests.waiting import eventually

pytestmark = [pytest.mark.conformance, pytest.mark.thorough, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if reason := unavailable_reason():
        pytest.skip(reason)
    with rocketmq_server(tmp_path_factory.mktemp("rocketmq") / "store") as server:
        settings = RemoteSettings(name_servers=(server.address,))
        eventually(lambda: is_registered(settings), "the broker has registered", timeout_s=90)
        yield server.address


@pytest.mark.feature("14.2")
@pytest.mark.parametrize("case", [CASES[0], CASES[2]], ids=["concurrently", "orderly"])
def test_each_message_is_handled_once_and_never_by_more_handlers_than_allowed(
    address: str, case: dict[str, Any]
) -> None:
    check_application(address, case)
