"""Reload of the configuration: what changes while a server runs, and what stays as it was, with the reason."""

from __future__ import annotations

import os
import signal
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest
from fastapi.testclient import TestClient
from structlog.testing import capture_logs

from mqtemplate import MQApplication
from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import VirtualClock
from mqtemplate.console import Dashboard, dashboard_asgi_app
from mqtemplate.context.settings.app import AppSettings
from mqtemplate.context.settings.source import load_settings
from mqtemplate.errors import ConfigurationError
from mqtemplate.remoting.identity import Credentials
from mqtemplate.remoting.protocol import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.bodies.own_requests import ReloadedConfig
from mqtemplate.remoting.protocol.codes import PullSysFlag
from mqtemplate.remoting.protocol.headers.group import GetMaxOffsetRequestHeader
from mqtemplate.running.reload import ConfigReload, ReloadablePart, reload_of
from mqtemplate.running.server import READ_BY_SERVER, local_cluster, reloadable_parts
from mqtemplate.server import LocalCluster
from mqtemplate.testing import Harness
from tests.console.pages import COMPLETE, MANAGEMENT_TOKEN
from tests.remoting.certificates import Certificates, has_openssl
from tests.server.tool import Tool, pull_header
from tests.waiting import eventually

SECRET = "a secret that is never shown"
OFFSET = GetMaxOffsetRequestHeader(topic="orders", queue_id=0)
LEVELS = "mqtemplate.broker.message-delay-level"


def write(folder: Path, text: str) -> None:
    """Replace the configuration. Its time differs from the one of the former file on any file system."""
    file = folder / "application.yml"
    time_ns = file.stat().st_mtime_ns + 1_000_000 if file.exists() else None
    file.write_text(text, "utf-8")
    if time_ns is not None:
        os.utime(file, ns=(time_ns, time_ns))


def settings_of(folder: Path) -> AppSettings:
    return load_settings(folder, environment={}, arguments={"rocketmq.name-server": "embedded:memory"})


# --- when the files are read ------------------------------------------------------------------------


class Watched:
    """A reload on a virtual clock, with one part that records the levels that it gets."""

    def __init__(self, folder: Path) -> None:
        write(folder, "mqtemplate.broker.message-delay-level: 1s")
        self.folder, self.clock, self.levels, self.refuses = folder, VirtualClock(), list[str](), False
        part = ReloadablePart((LEVELS,), self._take)
        self.reload = ConfigReload(settings_of(folder), lambda: settings_of(folder), [part], clock=self.clock)

    def _take(self, settings: AppSettings) -> None:
        if self.refuses:
            raise ConfigurationError("the levels are refused; write others")
        self.levels.append(settings.mqtemplate.broker.message_delay_level)

    def pass_intervals(self, count: int) -> None:
        for _ in range(count):
            self.clock.move_ms(2_000)
            self.reload._watch.step()


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


def test_a_change_is_read_when_the_file_has_not_changed_for_an_interval(watched: Watched) -> None:
    """An editor or a tool may write a file in several steps."""
    watched.pass_intervals(2)
    for levels in ("2s", "3s"):
        write(watched.folder, f"{LEVELS}: {levels}")
        watched.pass_intervals(1)
    assert watched.levels == []

    watched.pass_intervals(3)

    assert watched.levels == ["3s"]


def test_a_file_that_is_added_is_read(watched: Watched) -> None:
    (watched.folder / ".env").write_text("MQTEMPLATE_LOGGING_LEVEL=DEBUG")
    with capture_logs() as events:
        watched.pass_intervals(2)

    assert [event["reason"] for event in events if event["event"] == "config.reloaded"] == ["change of .env"]


def test_a_request_is_handled_at_once_and_each_has_its_log_line(watched: Watched) -> None:
    write(watched.folder, f"{LEVELS}: 2s")
    watched.reload.request("SIGHUP")
    watched.reload.request("another request")

    with capture_logs() as events:
        while watched.reload._requested:
            watched.reload._watch.step()

    assert watched.levels == ["2s"]
    assert [(event["reason"], event["changed"]) for event in events] == [("SIGHUP", [LEVELS]), ("another request", [])]


def test_an_invalid_file_changes_nothing_and_the_next_change_is_read(watched: Watched) -> None:
    write(watched.folder, "mqtemplate: {broker: {message-delay-levels: 2s}, server: {acl: {enabled: yes}}}")
    with capture_logs() as events:
        watched.pass_intervals(4)
    write(watched.folder, f"{LEVELS}: 2s")
    watched.pass_intervals(2)

    [failed] = events  # not again at each check
    assert (failed["event"], failed["reason"], failed["log_level"]) == (
        "config.reload_failed",
        "change of application.yml",
        "error",
    )
    assert "did you mean 'mqtemplate.broker.message-delay-level'?" in failed["problem"]
    assert "the former settings stay in force; correct the file" in failed["hint"]
    assert watched.levels == ["2s"]


def test_a_part_that_refuses_is_asked_again_by_the_next_reload(watched: Watched) -> None:
    write(watched.folder, f"{LEVELS}: 2s")
    watched.refuses = True
    first = watched.reload.reload("SIGHUP")
    watched.refuses = False
    second = watched.reload.reload("SIGHUP")

    assert first == ReloadedConfig(problems=["the levels are refused; write others"])
    assert second == ReloadedConfig(changed=[LEVELS])


def test_keys_that_need_a_restart_are_listed_until_the_restart_without_their_values(watched: Watched) -> None:
    text = f"{LEVELS}: 2s\nmqtemplate.management.token: {SECRET}\nshop.name: corner"
    write(watched.folder, text)
    with capture_logs() as events:
        results = [watched.reload.reload("SIGHUP") for _ in range(2)]
    write(watched.folder, f"{LEVELS}: 2s")
    after = watched.reload.reload("SIGHUP")

    assert [result.changed for result in results] == [[LEVELS], []]
    assert [result.needs_restart for result in results] == [["mqtemplate.management.token", "shop.name"]] * 2
    logged = [event["keys"] for event in events if event["event"] == "config.restart_needed"]
    assert logged == [["mqtemplate.management.token", "shop.name"]] * 2
    assert SECRET not in str(events)
    assert after == ReloadedConfig()


def test_an_unexpected_error_is_logged_and_the_files_are_watched_further(tmp_path: Path) -> None:
    """In the thread that watches them, on the real clock."""
    settings, failures = settings_of(tmp_path), [RuntimeError("unexpected")]

    def load() -> AppSettings:
        if failures:
            raise failures.pop()
        return settings

    reload = ConfigReload(settings, load, [])
    with capture_logs() as events, reload.running():
        reload.request("first")
        eventually(lambda: any(event["event"] == "config.reload_failed" for event in events), "the error is logged")
        reload.request("second")
        eventually(lambda: any(event.get("reason") == "second" for event in events), "the next request is handled")

    assert str(events[0]["exc_info"]) == "unexpected"


# --- what a server takes ------------------------------------------------------------------------------


CONFIG = """
mqtemplate:
  server:
    listen: 127.0.0.1:0
    name-server: 127.0.0.1:0
    {more}
"""


class Server:
    """A server on loopback, with its configuration in a folder."""

    def __init__(self, folder: Path, more: str) -> None:
        self.folder = folder
        write(folder, CONFIG.format(more=more))
        settings = settings_of(folder)
        self.cluster: LocalCluster[EmbeddedBroker] = local_cluster(settings)
        self._reload = ConfigReload(
            settings, lambda: settings_of(folder), reloadable_parts(self.cluster), sections=READ_BY_SERVER
        )
        self.cluster.broker.on_reload(self._reload.reload)

    def change(self, more: str) -> ReloadedConfig:
        """Write another configuration, and read it."""
        write(self.folder, CONFIG.format(more=more))
        return self._reload.reload("test")


@contextmanager
def serving(folder: Path, more: str) -> Iterator[Server]:
    server = Server(folder, more)
    with server.cluster:
        yield server


def acl(*accounts: str) -> str:
    return f"acl: {{enabled: true, accounts: [{', '.join(accounts)}]}}"


def account(name: str, rights: str = "PUB|SUB", secret: str = SECRET) -> str:
    return f'{{access-key: {name}, secret-key: "{secret}", default-topic-perm: {rights}, default-group-perm: {rights}}}'


def test_an_account_that_was_removed_loses_access_with_its_next_request_on_the_open_connection(tmp_path: Path) -> None:
    """A new account is known, and the connection of the other one stays open."""
    with serving(tmp_path, acl(account("shop-owner"), account("billing-app"))) as server:
        address = server.cluster.address
        owner, billing, audit = (
            Tool(address, Credentials(access_key=name, secret_key=SECRET))
            for name in ("shop-owner", "billing-app", "audit-app")
        )
        with owner, billing, audit:
            for tool in (owner, billing):
                tool.send("orders")
            connections = {connection.id for connection in server.cluster.broker.remoting.connections()}

            result = server.change(acl(account("shop-owner"), account("audit-app")))

            assert billing.request(RequestCode.GET_MAX_OFFSET, OFFSET).code == ResponseCode.NO_PERMISSION
            owner.send("orders")
            audit.send("orders")
            still = {connection.id for connection in server.cluster.broker.remoting.connections()}
            assert connections <= still
    assert result == ReloadedConfig(changed=["mqtemplate.server.acl.accounts"])


def test_a_held_pull_of_a_removed_account_ends_without_messages(tmp_path: Path) -> None:
    with (
        serving(tmp_path, acl(account("shop-owner"), account("billing-app"))) as server,
        Tool(server.cluster.address, Credentials(access_key="billing-app", secret_key=SECRET)) as billing,
    ):
        server.cluster.engine.create_topic("orders", 1)
        held = server.cluster.broker.hold
        flags = PullSysFlag.SUBSCRIPTION | PullSysFlag.SUSPEND
        header = pull_header("orders", subscription="*", sys_flag=flags, suspend_timeout_millis=60_000)
        codes: list[int] = []
        thread = Thread(target=lambda: codes.append(billing.request(RequestCode.PULL_MESSAGE, header).code))
        thread.start()
        eventually(lambda: len(held) == 1, "the pull is held")

        server.change(acl(account("shop-owner")))
        thread.join(60)

    assert codes == [ResponseCode.PULL_NOT_FOUND]


def test_access_control_that_is_switched_needs_a_restart_and_the_accounts_stay(tmp_path: Path) -> None:
    with serving(tmp_path, acl(account("shop-owner"))) as server:
        result = server.change("")
        with Tool(server.cluster.address) as anonymous:
            refused = anonymous.request(RequestCode.GET_MAX_OFFSET, OFFSET)

    assert refused.code == ResponseCode.NO_PERMISSION
    assert result.needs_restart == ["mqtemplate.server.acl.enabled"]
    assert result.problems == [
        "mqtemplate.server.acl.enabled is false now, which a restart only can do; the accounts stay as they are"
    ]

    with serving(tmp_path, "") as server:
        result = server.change(acl(account("shop-owner")))

    assert result == ReloadedConfig(needs_restart=["mqtemplate.server.acl.enabled", "mqtemplate.server.acl.accounts"])


def test_delay_levels_of_the_file_replace_a_change_by_request(tmp_path: Path) -> None:
    with serving(tmp_path, "") as server:
        engine = server.cluster.engine.engine
        engine.change_delay_levels("9s")
        untouched = server.change("cluster-name: other")
        assert engine.levels.text == "9s"
        with (tmp_path / "application.yml").open("a") as file:
            file.write(f"---\n{LEVELS}: 1s 2s\n")
        changed = server._reload.reload("test")

        assert engine.levels.text == "1s 2s"
    assert untouched == ReloadedConfig(needs_restart=["mqtemplate.server.cluster-name"])
    assert changed.changed == [LEVELS]


def test_keys_of_applications_in_the_same_file_are_not_of_the_server(tmp_path: Path) -> None:
    with serving(tmp_path, "") as server:
        with (tmp_path / "application.yml").open("a") as file:
            file.write("---\nshop.name: corner\nrocketmq.producer.group: shop\nmqtemplate.listener.retry: [1s]\n")
        result = server._reload.reload("test")

    assert result == ReloadedConfig()


# --- certificates ---------------------------------------------------------------------------------------


def certificate_of(server: Server) -> str:
    """Return the certificate that a new connection gets, from each of the two listener sockets."""
    found = {
        ssl.get_server_certificate((address.ip, address.port))
        for address in (server.cluster.address, server.cluster.name_server_address)
    }
    [certificate] = found
    return certificate.strip()


def install(folder: Path, cert: Path | None, key: Path | None) -> None:
    for name, source in (("server.pem", cert), ("server.key", key)):
        if source is not None:
            (folder / "new").write_bytes(source.read_bytes())
            (folder / "new").replace(folder / name)


@pytest.mark.skipif(not has_openssl(), reason="there is no openssl command to make certificates with")
def test_a_certificate_is_rotated_without_a_closed_connection(tmp_path: Path) -> None:
    """Between the two writes key and certificate do not match: the former pair serves until both are there."""
    certificates = Certificates(tmp_path / "authority")
    first, second = (certificates.issue(name, "IP:127.0.0.1") for name in ("first", "second"))
    install(tmp_path, *first)
    tls = f"tls: {{mode: permissive, cert-path: {tmp_path}/server.pem, key-path: {tmp_path}/server.key}}"

    with serving(tmp_path, tls) as server, Tool(server.cluster.address) as tool:
        tool.send("orders")
        [connection] = server.cluster.broker.remoting.connections()
        assert certificate_of(server) == first[0].read_text().strip()
        unchanged = server.change(tls)

        install(tmp_path, second[0], None)
        half = server.change(tls)
        after_half = certificate_of(server)
        install(tmp_path, None, second[1])
        whole = server.change(tls)

        assert after_half == first[0].read_text().strip()
        assert certificate_of(server) == second[0].read_text().strip()
        tool.send("orders")
        assert connection.is_open
    assert unchanged == ReloadedConfig()
    [problem] = half.problems
    assert f"TLS: certificate {tmp_path}/server.pem with private key {tmp_path}/server.key cannot be used" in problem
    assert "the key must belong to the certificate" in problem
    assert whole == ReloadedConfig(changed=[f"{tmp_path}/server.key", f"{tmp_path}/server.pem"])


@pytest.mark.skipif(not has_openssl(), reason="there is no openssl command to make certificates with")
def test_a_missing_certificate_keeps_the_former_one_and_its_expiry_is_a_metric(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path / "authority")
    cert, key = certificates.issue("server", "IP:127.0.0.1")
    tls = f"tls: {{mode: enforcing, cert-path: {cert}, key-path: {key}}}"

    with serving(tmp_path, tls) as server:
        certificate = certificate_of(server)
        cert.unlink()
        result = server.change(tls)

        assert certificate_of(server) == certificate
        [sample] = [
            each for each in server.cluster.engine.metrics.samples() if each.name == "server.certificate_expiry_ms"
        ]
    [problem] = result.problems
    assert "No such file or directory" in problem
    assert isinstance(sample.value, int)
    assert 8_998 < sample.value / 86_400_000 <= 9_000


# --- an application -----------------------------------------------------------------------------


class AccountsShop:
    """An application with a dashboard and accounts, started by a program of its own on a virtual clock."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, *names: str) -> None:
        """Write the configuration with these accounts."""
        found = ", ".join(f"{{access-key: {each}, secret-key: {SECRET}, role: viewer}}" for each in names)
        dashboard = f"{{enabled: true, token: {MANAGEMENT_TOKEN}, dashboard: {{enabled: true}}}}"
        acl = f"{{enabled: true, accounts: [{found}]}}"
        broker = "rocketmq: {name-server: 'embedded:memory'}"
        write(self._folder, f"{broker}\nmqtemplate: {{server: {{acl: {acl}}}, management: {dashboard}}}")

    def application(self) -> MQApplication:
        return MQApplication(config_folder=self._folder, clock=VirtualClock())


def browser(app: MQApplication) -> TestClient:
    return TestClient(dashboard_asgi_app(app.get(Dashboard)), base_url="http://localhost")


def may_enter(client: TestClient, name: str) -> bool:
    keys = {"access_key": name, "secret_key": SECRET}
    return client.post("/sign-in", data=COMPLETE | keys, follow_redirects=False).status_code == 303


def test_the_accounts_of_the_dashboard_of_an_application_are_read_again(tmp_path: Path) -> None:
    """Who leaves the team loses the dashboard without a restart; with a wrong file all stays as it was."""
    shop = AccountsShop(tmp_path)
    shop.write("night-shift", "day-shift")
    with shop.application() as app:
        client, reload = browser(app), reload_of(app)

        before = [may_enter(client, each) for each in ("night-shift", "day-shift", "new-hand")]
        session = client.get("/topics").status_code
        shop.write()
        wrong = reload.reload("SIGHUP")
        kept = client.get("/topics").status_code
        shop.write("new-hand")
        right = reload.reload("SIGHUP")
        after = [may_enter(client, each) for each in ("night-shift", "day-shift", "new-hand")]

    assert (before, session, kept) == ([True, True, False], 200, 200)
    assert "there are no accounts" in wrong.problems[0]
    assert (right.problems, right.needs_restart) == ([], [])
    assert {each.partition("[")[0] for each in right.changed} == {"mqtemplate.server.acl.accounts"}
    assert after == [False, False, True]


def test_a_program_that_starts_its_application_itself_reads_changed_accounts_too(tmp_path: Path) -> None:
    """Without `mqtemplate run`, in a web server for example: when the file has changed, and by its actuator. The
    handler of SIGHUP stays that of the program."""
    handler = signal.getsignal(signal.SIGHUP)
    shop = AccountsShop(tmp_path)
    shop.write("night-shift")
    with shop.application() as app:
        client, harness = browser(app), Harness(app)
        before = may_enter(client, "night-shift")
        session = client.get("/topics").status_code

        shop.write("night-shift", "new-hand")
        harness.advance("6s")
        added = [may_enter(client, each) for each in ("night-shift", "new-hand")]
        shop.write("new-hand")
        by_request = app.context.reload("request")
        after = [may_enter(client, each) for each in ("night-shift", "new-hand")]
        during = signal.getsignal(signal.SIGHUP)

    assert (before, session) == (True, 200)
    assert added == [True, True]
    assert {each.partition("[")[0] for each in by_request.changed} == {"mqtemplate.server.acl.accounts"}
    assert after == [False, True]
    assert during == handler
