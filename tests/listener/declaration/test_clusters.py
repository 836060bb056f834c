"""A registry has one broker; an application connects to the others that listeners name."""

from __future__ import annotations

import pytest

from mqtemplate import EmbeddedBroker, JsonMessageConverter, VirtualClock, message_listener
from mqtemplate.errors import UnsupportedError
from mqtemplate.listener import ListenerRegistry
from mqtemplate.listener.declaration.settings import ClusterChoice


@pytest.mark.parametrize(
    ("attributes", "named"),
    [({"broker": "audit"}, "broker is 'audit'"), ({"name_server": "mq1:9876"}, "name_server is 'mq1:9876'")],
)
def test_a_registry_refuses_a_listener_of_another_cluster(attributes: dict[str, str], named: str) -> None:
    @message_listener("orders", "billing", **attributes)  # type: ignore[arg-type]
    def bill(order: str) -> None: ...

    with EmbeddedBroker(clock=VirtualClock()) as broker:
        registry = ListenerRegistry(broker, JsonMessageConverter())
        with pytest.raises(UnsupportedError, match=f"bill: {named}, and this registry has one broker only; let an MQA"):
            registry.register(bill)


def test_a_choice_shows_no_secrets() -> None:
    assert "hush" not in repr(ClusterChoice(name_server="mq1:9876", access_key="me", secret_key="hush"))
