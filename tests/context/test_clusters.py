"""Two clusters in one application, over the network: two servers of this library."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from queue import SimpleQueue
from typing import Annotated

import pytest

from mqtemplate import (
    EmbeddedBroker,
    EmbeddedSettings,
    MQApplication,
    Named,
    RemoteBroker,
    RocketMQTemplate,
    message_listener,
    service,
)
from mqtemplate.errors import MQTemplateError, RemoteConnectError
from mqtemplate.message import HostAddress
from mqtemplate.server import Account, AclSettings, BrokerServerSettings, LocalCluster
from tests.waiting import PATIENCE_S, eventually

pytestmark = pytest.mark.feature("clusters")

ANYWHERE = HostAddress("127.0.0.1", 0)


@contextmanager
def server(acl: AclSettings | None = None) -> Iterator[LocalCluster]:
    engine = EmbeddedBroker(None, EmbeddedSettings(listen_host=ANYWHERE))
    with engine, LocalCluster(engine, BrokerServerSettings(listen=ANYWHERE), acl=acl) as cluster:
        yield cluster


@pytest.fixture
def servers() -> Iterator[tuple[LocalCluster, LocalCluster]]:
    with server() as one, server() as other:
        yield one, other


@service
class Shop:
    def __init__(self, template: RocketMQTemplate, audit: Annotated[RocketMQTemplate, Named("audit")]) -> None:
        self.template, self.audit = template, audit


def settings_of(own: LocalCluster, audit: LocalCluster, **more: object) -> dict[str, object]:
    return {
        "rocketmq.name-server": str(own.address),
        "rocketmq.producer.group": "shop",
        "rocketmq.templates.audit.name-server": str(audit.address),
        "rocketmq.templates.audit.group": "audit",
    }


def test_two_clusters_have_two_clients_and_each_listener_reads_from_its_own(
    servers: tuple[LocalCluster, LocalCluster],
) -> None:
    """Their client ids differ, so neither cluster sees groups or topics of the other."""
    own, audit = servers
    orders: SimpleQueue[str] = SimpleQueue()
    entries: SimpleQueue[str] = SimpleQueue()

    @message_listener("orders", "billing", consume_from_where="CONSUME_FROM_FIRST_OFFSET")
    def bill(order: str) -> None:
        orders.put(order)

    @message_listener("orders", "auditors", broker="audit", consume_from_where="CONSUME_FROM_FIRST_OFFSET")
    def note(entry: str) -> None:
        entries.put(entry)

    with MQApplication(Shop, bill, note, settings=settings_of(own, audit), environment={}) as app:
        shop = app.get(Shop)
        shop.template.sync_send("orders", "tea")
        shop.audit.sync_send("orders", "tea was ordered")

        assert (orders.get(timeout=PATIENCE_S), entries.get(timeout=PATIENCE_S)) == ("tea", "tea was ordered")
        clients = [broker for broker in app.brokers.values() if isinstance(broker, RemoteBroker)]
        assert len(clients) == 2
        assert len({client.client_context.instance.id for client in clients}) == 2
        assert [client.settings.producer_group for client in clients] == ["shop", "audit"]


def test_a_listener_names_a_cluster_by_its_address_as_in_spring(servers: tuple[LocalCluster, LocalCluster]) -> None:
    """Here no template declares that cluster: the listeners that name it share one client."""
    own, audit = servers
    entries: SimpleQueue[str] = SimpleQueue()

    @message_listener(
        "entries", "auditors", name_server="${audit.server}", consume_from_where="CONSUME_FROM_FIRST_OFFSET"
    )
    def note(entry: str) -> None:
        entries.put(entry)

    @message_listener("entries", "archive", name_server="${audit.server}")
    def keep(entry: str) -> None: ...

    settings = {"rocketmq.name-server": str(own.address), "audit.server": str(audit.address)}
    with MQApplication(note, keep, settings=settings, environment={}) as app:
        first, second = (container.broker for container in app.containers)
        assert first is second is app.brokers[str(audit.address)]
        RocketMQTemplate(first).sync_send("entries", "login")

        assert entries.get(timeout=PATIENCE_S) == "login"


def test_the_health_covers_all_clusters(servers: tuple[LocalCluster, LocalCluster]) -> None:
    """When one of them stops to answer, the application is not up any more; it names the cluster and the reason."""
    own, _ = servers

    @message_listener("orders", "auditors", broker="audit", id="note")
    def note(entry: str) -> None: ...

    with ExitStack() as audit_runs:
        audit = audit_runs.enter_context(server())
        with MQApplication(Shop, note, settings=settings_of(own, audit), environment={}) as app:
            before = app.health()
            assert (before.is_up, before.brokers, before.listeners) == (
                True,
                {"broker": None, "audit": None},
                {"note": "running"},
            )
            audit_runs.close()

            eventually(lambda: not app.health().is_up, "the outage is noticed")
            after = app.health()
            assert (after.is_ready, after.brokers["broker"]) == (True, None)
            assert str(audit.address) in str(after.brokers["audit"])


def test_a_start_fails_as_a_whole_if_one_cluster_cannot_be_reached(servers: tuple[LocalCluster, LocalCluster]) -> None:
    own, _ = servers
    settings = {"rocketmq.name-server": str(own.address), "rocketmq.templates.audit.name-server": "127.0.0.1:1"}
    app = MQApplication(settings=settings, environment={})

    with pytest.raises(RemoteConnectError) as raised:
        app.start()

    assert "while starting the broker of rocketmq.templates.audit" in raised.value.__notes__
    assert not app.is_ready.is_set()


def test_a_template_without_a_name_server_has_a_client_of_its_own_on_the_cluster(
    servers: tuple[LocalCluster, LocalCluster],
) -> None:
    """A client has one producer group, which the cluster checks for transactions."""
    own, _ = servers
    settings = {"rocketmq.name-server": str(own.address), "rocketmq.templates.audit.group": "audit"}
    with MQApplication(Shop, settings=settings, environment={}) as app:
        audit = app.get(Shop).audit
        audit.sync_send("orders", "tea")

        assert isinstance(audit.broker, RemoteBroker)
        assert audit.broker is not app.broker
        assert audit.broker.settings.name_servers == app.broker.settings.name_servers  # type: ignore[attr-defined]


def test_a_listener_has_an_account_of_its_own_on_its_cluster() -> None:
    """The cluster of the application needs no account, and never sees the listener's."""
    entries: SimpleQueue[str] = SimpleQueue()
    acl = AclSettings(accounts=(Account(access_key="auditor-account", secret_key="s3cret-of-audit", admin=True),))

    @message_listener(
        "entries",
        "auditors",
        name_server="${audit.server}",
        access_key="auditor-account",
        secret_key="${audit.secret}",
        consume_from_where="CONSUME_FROM_FIRST_OFFSET",
    )
    def note(entry: str) -> None:
        entries.put(entry)

    with server() as own, server(acl) as audit:
        settings = {"rocketmq.name-server": str(own.address), "audit.server": str(audit.address)}
        with MQApplication(note, settings={**settings, "audit.secret": "s3cret-of-audit"}, environment={}) as app:
            RocketMQTemplate(app.containers[0].broker).sync_send("entries", "login")

            assert entries.get(timeout=PATIENCE_S) == "login"
            own_client = app.broker
            assert isinstance(own_client, RemoteBroker)
            assert own_client.settings.credentials is None

        wrong = MQApplication(note, settings={**settings, "audit.secret": "guessed"}, environment={})
        with pytest.raises(MQTemplateError, match="NO_PERMISSION"):
            wrong.start()
