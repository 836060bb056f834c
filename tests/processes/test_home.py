"""A user without a home folder: `docker run --user 12345`, `env -i`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mqtemplate import MQApplication, RocketMQTemplate, message_listener
from mqtemplate.broker import ConsumerSpec, MessageModel
from mqtemplate.brokers import EmbeddedBroker, RemoteBroker, RemoteSettings
from mqtemplate.cli.main import main
from mqtemplate.context.settings.clients import remote_settings
from mqtemplate.context.settings.source import load_settings
from mqtemplate.errors import ConfigurationError
from mqtemplate.operations.audit import default_audit_path
from mqtemplate.processes import home_folder
from mqtemplate.running.broker_conf import read_broker_conf
from mqtemplate.selectors.tags import TagSelector
from mqtemplate.server import BrokerServerSettings, LocalCluster
from tests.forking import in_child

_UID = 54_321  # of no user

pytestmark = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root becomes another user"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


def _as_nobody(work: Callable[[], str], folder: Path) -> str:
    """Return the result of *work* in a process of a user that has no home folder and no environment."""

    def become_nobody() -> str:
        os.environ.clear()
        os.chdir(folder)
        os.setreuid(_UID, 0)  # the effective user stays, which may read the interpreter's files, wherever they are
        return work()

    return in_child(become_nobody)


def test_a_remote_client_needs_no_home_folder(folder: Path) -> None:
    """Only broadcasting stores offsets there. The settings alone raised a raw RuntimeError."""
    with EmbeddedBroker() as engine, LocalCluster(engine, BrokerServerSettings()) as cluster:
        address = str(cluster.address)

        def send_and_receive() -> str:
            settings = load_settings(folder, environment={}, arguments={"rocketmq.name-server": address})
            with RemoteBroker(remote_settings(settings)) as broker:
                template = RocketMQTemplate(broker, consumer_group="c", consumer_topic="orders")
                with template:
                    template.sync_send("orders", b"x")
                    return str(template.receive(bytes, 1, "10s"))

        assert _as_nobody(send_and_receive, folder) == "[b'x']"


def test_a_broadcasting_group_without_a_home_folder_is_told_what_to_set(folder: Path) -> None:
    with EmbeddedBroker() as engine, LocalCluster(engine, BrokerServerSettings()) as cluster:
        address = str(cluster.address)

        def subscribe(offset_path: Path | None) -> str:
            with RemoteBroker(RemoteSettings(name_servers=(address,), offset_path=offset_path)) as broker:
                RocketMQTemplate(broker).sync_send("orders", b"x")
                spec = ConsumerSpec(
                    group="b", subscriptions={"orders": TagSelector()}, message_model=MessageModel.BROADCASTING
                )
                broker.groups.subscribe(spec).close()
                return "subscribed"

        assert _as_nobody(lambda: subscribe(folder / "offsets"), folder) == "subscribed"
        assert _as_nobody(lambda: subscribe(None), folder) == (
            "ConfigurationError: this user has no home folder, which is needed for the offsets of a broadcasting "
            "group; set HOME, or set offset_path, in application.yml mqtemplate.cluster.offset-path"
        )


def test_an_application_and_the_command_line_need_no_home_folder(folder: Path) -> None:
    handled: list[str] = []

    @message_listener(topic="orders", consumer_group="billing")
    def bill(message: str) -> None:
        handled.append(message)

    def work() -> str:
        settings = {"rocketmq.name-server": f"embedded:{folder / 'store'}"}
        with MQApplication(bill, settings=settings) as app:
            app.template.sync_send("orders", "x")
        codes = [main(["topics", "-n", f"embedded:{folder / 'store'}"]), main(["init", "shop"])]
        return f"{codes} {sorted(each.name for each in folder.iterdir())}"

    assert _as_nobody(work, folder) == "[0, 0] ['shop', 'store']"


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda _: str(load_settings(arguments={"rocketmq.name-server": "embedded:~/data"}).store_path),
            "needed for rocketmq.name-server = ~/data; set HOME, or write the path without ~",
        ),
        (lambda _: str(default_audit_path()), "which is needed for the log of changes; set HOME, or XDG_STATE_HOME"),
        (
            lambda _: str(load_settings(arguments={"mqtemplate.broker.store-path": "~/data"}).store_path),
            "needed for mqtemplate.broker.store-path = ~/data; set HOME, or write the path without ~",
        ),
        (
            lambda folder: str(read_broker_conf(folder / "broker.conf")),
            "needed for ${user.home}/store; set HOME, or write the path without it",
        ),
    ],
    ids=["name server", "audit log", "store path", "broker.conf"],
)
def test_a_path_in_the_home_folder_is_refused_with_the_key(
    folder: Path, call: Callable[[Path], object], text: str
) -> None:
    (folder / "broker.conf").write_text("storePathRootDir=${user.home}/store\n")

    assert text in _as_nobody(lambda: str(call(folder)), folder)


def test_another_users_home_that_does_not_exist_is_refused() -> None:
    settings = load_settings(environment={}, arguments={"mqtemplate.broker.store-path": "~nobody-here/data"})

    with pytest.raises(ConfigurationError, match="needed for mqtemplate.broker.store-path = ~nobody-here/data"):
        _ = settings.store_path


def test_an_empty_home_is_not_the_root_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "")

    with pytest.raises(ConfigurationError, match="HOME is empty, and the home folder is needed for tests; set HOME"):
        home_folder("tests", "stay")
