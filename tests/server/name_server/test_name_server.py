"""The name server: what `tests/server/scripts/name_server.script` cannot say."""

from __future__ import annotations

from mqtemplate.clock import VirtualClock
from mqtemplate.remoting.protocol import RequestCode
from mqtemplate.remoting.protocol.bodies.route import TopicRouteData
from mqtemplate.remoting.protocol.headers.admin import GetRouteInfoRequestHeader
from mqtemplate.server import BrokerServerSettings, LocalCluster
from tests.server.tool import ANY_PORT, Tool, make_engine


def test_the_broker_answers_requests_to_a_name_server_too() -> None:
    """A client may know one address only. Both routes have the address of the broker."""
    engine = make_engine(VirtualClock())
    with LocalCluster(engine, BrokerServerSettings(listen=ANY_PORT), ANY_PORT) as cluster:
        engine.create_topic("orders", 1)
        for address in (cluster.address, cluster.name_server_address):
            with Tool(address) as tool:
                header = GetRouteInfoRequestHeader(topic="orders")
                body = tool.request_ok(RequestCode.GET_ROUTEINFO_BY_TOPIC, header).body

            assert TopicRouteData.decode(body).broker_datas[0].broker_addrs == {0: str(cluster.address)}
