"""The number of handlers that run at a time is changed while a listener reads from our server."""

from __future__ import annotations

from typing import Any

import pytest

from mqtemplate import EmbeddedBroker, EmbeddedSettings
from mqtemplate.message import HostAddress
from mqtemplate.server import BrokerServerSettings, LocalCluster
from tests.listener.concurrency import CASES, check_application

ANYWHERE = HostAddress("127.0.0.1", 0)


@pytest.mark.feature("14.2")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_message_is_handled_once_and_never_by_more_handlers_than_allowed(case: dict[str, Any]) -> None:
    engine = EmbeddedBroker(None, EmbeddedSettings(listen_host=ANYWHERE))
    with engine, LocalCluster(engine, BrokerServerSettings(listen=ANYWHERE)) as cluster:
        check_application(str(cluster.address), case)
