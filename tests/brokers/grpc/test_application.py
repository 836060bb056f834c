"""An application over gRPC, as its operators see it."""

from __future__ import annotations

from mqtemplate import MQApplication, message_listener
from mqtemplate.brokers import GrpcBroker
from mqtemplate.listener import ListenerRegistry
from mqtemplate.observability.collectors import GroupLags
from tests.brokers.grpc.scripted_proxy import ScriptedProxy


@message_listener(topic="orders", consumer_group="billing")
def bill(order: str) -> None: ...


def test_a_listener_is_healthy_and_has_no_lag_that_is_known(proxy: ScriptedProxy) -> None:
    with MQApplication(bill, settings={"rocketmq.endpoints": proxy.address}, environment={}) as app:
        health = app.health()
        lags = GroupLags(app.get(GrpcBroker)).read(app.get(ListenerRegistry).containers)

    assert (health.is_ready, list(health.listeners.values())) == (True, ["running"])
    assert lags == []
