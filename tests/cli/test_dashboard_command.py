"""``mqtemplate dashboard``, as a process: a store directory, a server, an application."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.cookiejar import CookieJar
from pathlib import Path

import pytest

from mqtemplate import MQApplication, message_listener
from mqtemplate.console import Actuator, ManagementServer
from mqtemplate.remoting.protocol import RequestCode
from tests.brokers.remote.system_topics import SystemTopics
from tests.cli.running import CommandLine, place, prepare
from tests.programs import end_group, finish
from tests.server.process import BrokerProcess
from tests.waiting import PATIENCE_S, eventually

pytestmark = [pytest.mark.feature("14.2"), pytest.mark.slow]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a process of another user")


TOKEN = "t-0123456789abcde"


@message_listener(topic="orders", consumer_group="billing", id="bill")
def bill(order: str) -> None: ...


@contextmanager
def dashboard(*arguments: str, errors: list[str] | None = None) -> Iterator[str]:
    """Run the command on a free port; yield the link that it prints. It ends with SIGTERM and the code 0."""
    command = [sys.executable, "-u", "-m", "mqtemplate", "dashboard", "--port", "0", *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("dashboard: http://"), finish(process)
            yield line.removeprefix("dashboard: ").strip()
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0
            assert process.stderr is not None
            if errors is not None:
                errors.append(process.stderr.read())
        finally:
            end_group(process)


def base_of(link: str) -> str:
    """Return the address of the overview, with a slash at its end."""
    return link.partition("sign-in")[0]


class Client:
    """A browser without scripts, with cookies."""

    def __init__(self) -> None:
        self._cookies = CookieJar()
        self._opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(self._cookies))

    @property
    def cookie(self) -> str:
        """The header ``Cookie`` as it is sent."""
        return "; ".join(f"{each.name}={each.value}" for each in self._cookies)

    def get(self, address: str, body: bytes | None = None) -> tuple[int, str]:
        """Return the status and the page. While the broker is read for the first time, the page is loaded again."""
        if body is not None:
            return self._load(address, body)
        answers: list[tuple[int, str]] = []

        def is_read() -> bool:
            answers.append(self._load(address))
            return "reading the broker" not in answers[-1][1]

        eventually(is_read, "the broker is read")
        return answers[-1]

    def _load(self, address: str, body: bytes | None = None) -> tuple[int, str]:
        try:
            with self._opener.open(address, body, timeout=PATIENCE_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as exc:
            with exc:
                return exc.code, exc.read().decode()


@pytest.fixture(scope="module")
def of_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Link to a dashboard of a store directory. The tests only read."""
    folder = tmp_path_factory.mktemp("folder")
    with (
        place("folder", folder, prepare),
        dashboard("--store", str(folder / "store"), "--config", str(folder)) as link,
    ):
        yield link


@pytest.fixture(scope="module")
def of_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Link to a dashboard of a server. The tests only read."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "config").mkdir()
    with (
        place("server", folder, prepare) as name_server,
        dashboard("--name-server", name_server, "--config", str(folder / "config")) as link,
    ):
        yield link


@pytest.mark.parametrize("kind", ["folder", "server"])
def test_a_directory_and_a_server_are_shown_and_not_changed(request: pytest.FixtureRequest, kind: str) -> None:
    link: str = request.getfixturevalue(f"of_{kind}")
    client, base = Client(), base_of(link)

    closed = {client.get(f"{base}{page}")[0] for page in ("", "delayed", "groups", "dead-letters?group=billing")}
    client.get(link)
    delayed, groups = client.get(f"{base}delayed")[1], client.get(f"{base}groups")[1]
    letters = client.get(f"{base}dead-letters?group=billing")[1]
    refused = client.get(f"{base}delayed/change", b"action=cancel")

    assert closed == {401}
    assert "due-1" in delayed
    assert "due-30" in delayed
    assert "billing" in groups
    assert "shop.CardRefusedError" in letters
    assert refused[0] == 403


def test_prometheus_reads_the_metrics_of_a_rocketmq_cluster_with_the_token_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    state = b'{"table":{"timerReadBehind":"75"}}'
    with SystemTopics() as cluster:
        cluster.script(RequestCode.GET_BROKER_RUNTIME_INFO, lambda request: request.response(body=state))
        arguments = ("--name-server", cluster.address, "--config", str(tmp_path / "config"))
        with dashboard(*arguments, "--metrics-token-file", str(tmp_path / "token")) as link:
            request = urllib.request.Request(f"{base_of(link)}metrics", headers={"Authorization": f"Bearer {TOKEN}"})
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                text = answer.read().decode()
            without = Client().get(f"{base_of(link)}metrics")

    assert (
        'mqtemplate_delay_dequeue_lag_seconds{mqtemplate_broker="broker-a",mqtemplate_service="delay.timer"} 75' in text
    )
    assert without[0] == 401


def test_a_message_is_cancelled_through_the_printed_link(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    audit = tmp_path / "audit.jsonl"
    with place("server", tmp_path, prepare) as name_server:
        arguments = ("--name-server", name_server, "--config", str(tmp_path / "config"))
        with dashboard(*arguments, "--allow-changes", "--audit-log", str(audit)) as link:
            client, base = Client(), base_of(link)
            client.get(link)
            page = client.get(f"{base}delayed?key=due-1")[1]
            token = re.search(r'name="form_token" value="(\w+)"', page)
            assert token is not None
            form = f"form_token={token[1]}&action=cancel&scope=all&key=due-1&form_end=complete"
            preview = client.get(f"{base}delayed/preview", form.encode())[1]
            until = re.search(r'name="until" value="(\d+)"', preview)
            assert until is not None
            client.get(f"{base}delayed/change", f"{form}&until={until[1]}&expected=1".encode())
            line = _last_line(audit, "succeeded")
            after = client.get(f"{base}delayed/list?key=due-1")[1]

    assert "Cancel: 1 pending message" in preview
    assert (line["action"], line["filter"], line["cancelled"]) == ("delayed.cancel", {"key": "due-1"}, 1)
    assert stat.S_IMODE(audit.stat().st_mode) == 0o600
    assert "No pending message matches." in after


def _last_line(audit: Path, state: str) -> dict[str, object]:
    eventually(lambda: f'"{state}"' in audit.read_text("utf-8"), "the change is done")
    found: dict[str, object] = json.loads(audit.read_text("utf-8").splitlines()[-1])
    return found


def test_the_listeners_of_an_application_are_shown_without_a_broker(tmp_path: Path) -> None:
    keys = {"rocketmq.name-server": "embedded:memory", "mqtemplate.management.enabled": True}
    keys["mqtemplate.management.token"] = TOKEN
    (tmp_path / "token").write_text(f"{TOKEN}\n", "utf-8")
    with MQApplication(bill, settings=keys) as app:
        server = ManagementServer(app.get(Actuator), 0)
        server.start()
        try:
            application = ("--app", f"http://{server.address}", "--config", str(tmp_path))
            with dashboard(*application, "--app-token-file", str(tmp_path / "token")) as link:
                client = Client()
                client.get(link)
                page = client.get(f"{base_of(link)}listeners")[1]
            with dashboard(*application) as link:
                client.get(link)
                refused = client.get(f"{base_of(link)}listeners")[1]
        finally:
            server.stop()

    assert "<h2>bill</h2>" in page
    assert "reading listeners needs the header" in refused


def test_on_another_address_than_loopback_reading_needs_the_token(tmp_path: Path) -> None:
    with place("folder", tmp_path, prepare):
        arguments = ("--store", str(tmp_path / "store"), "--config", str(tmp_path))
        errors: list[str] = []
        with dashboard(*arguments, "--host", "0.0.0.0", "--allowed-host", "localhost", errors=errors) as link:
            link = link.replace("0.0.0.0", "localhost")
            client, base = Client(), base_of(link)
            closed = client.get(f"{base}topics")
            client.get(link)
            opened = client.get(f"{base}topics")

    assert closed[0] == 401
    assert (opened[0], "orders" in opened[1]) == (200, True)
    assert "warning: other machines can connect to 0.0.0.0:" in errors[0]


def test_a_server_has_its_dashboard_on_the_management_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    management = f"{{enabled: true, port: {port}, token: {TOKEN}, dashboard: {{enabled: true}}}}"
    (tmp_path / "application.yml").write_text(f"mqtemplate: {{management: {management}}}")
    with BrokerProcess(tmp_path, "--config", str(tmp_path)):
        client = Client()
        closed = client.get(f"http://127.0.0.1:{port}/dashboard/")
        client.get(f"http://127.0.0.1:{port}/dashboard/sign-in?token={TOKEN}")
        topics = client.get(f"http://127.0.0.1:{port}/dashboard/topics?kind=system")

    assert closed[0] == 401
    assert (topics[0], "rmq_sys_wheel_timer" in topics[1]) == (200, True)


_OTHER_USER = """
import encodings.idna, http.client, json, os, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)  # after the imports: the folder of the library may be closed to this user
found = {}
for address, path, cookie in json.loads(sys.argv[1]):
    connection = http.client.HTTPConnection(address, timeout=60)
    connection.request("GET", path, headers={"Cookie": cookie})
    answer = connection.getresponse()
    found[path] = (answer.status, answer.read().decode())
print(json.dumps(found))
"""


def as_another_user(requests: list[tuple[str, str, str]]) -> dict[str, tuple[int, str]]:
    """Return status and text of each path. A request has an address, a path, and a cookie."""
    command = [sys.executable, "-I", "-c", _OTHER_USER, json.dumps(requests)]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return {path: (status, text) for path, (status, text) in json.loads(result.stdout).items()}


@needs_root
def test_the_session_of_a_user_is_not_valid_for_another_user_of_the_machine(of_folder: str) -> None:
    """A browser sends a cookie to all ports of its host, so also to a server of another user."""
    client, base = Client(), base_of(of_folder)
    client.get(of_folder)
    address = base.removeprefix("http://").rstrip("/")

    copied = as_another_user([(address, "/topics", client.cookie), (address, "/groups", client.cookie)])
    own = client.get(f"{base}topics")[0]

    assert (copied["/topics"][0], copied["/groups"][0], own) == (401, 401, 200)
    assert "orders" not in copied["/topics"][1]


@needs_root
def test_another_user_of_the_machine_reads_nothing_without_the_token(tmp_path: Path, of_folder: str) -> None:
    """Every user can connect to a loopback port, and the folder of the store is closed to them."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    management = f"{{enabled: true, port: {port}, token: {TOKEN}, dashboard: {{enabled: true}}}}"
    settings = f"{{mqtemplate: {{management: {management}}}, shop: {{url: 'http://bob:hunter2@db'}}}}"
    (tmp_path / "application.yml").write_text(settings, "utf-8")
    with BrokerProcess(tmp_path, "--config", str(tmp_path)):
        own = base_of(of_folder).removeprefix("http://").rstrip("/")
        pages = ("/", "/topics", "/messages?topic=orders", "/dead-letters?group=billing", "/tail/stream?topic=a")
        requests = [(own, page, "") for page in pages]
        requests += [(f"127.0.0.1:{port}", f"/dashboard{page}", "") for page in pages]
        paths = ("configprops", "health", "prometheus")
        requests += [(f"127.0.0.1:{port}", f"/actuator/{page}", "") for page in paths]
        found = as_another_user(requests)
    open_paths = ("/actuator/health", "/actuator/prometheus")
    assert [found[path][0] for path in open_paths] == [200, 200]
    assert {path: status for path, (status, _) in found.items() if status != 401 and path not in open_paths} == {}
    assert not [path for path, (_, text) in found.items() if "order-" in text or "hunter2" in text]


def test_a_token_among_the_arguments_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All users of the machine see them."""
    run = CommandLine("", tmp_path, capsys)

    result = run.plain("dashboard", "--app", "http://127.0.0.1:1", "--app-token", TOKEN, "--config", str(tmp_path))

    assert result.code == 2
    assert "give --app-token-file FILE, or set MQTEMPLATE_MANAGEMENT_TOKEN" in " ".join(result.errors.split())
    assert TOKEN not in result.errors


def test_wrong_arguments_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = CommandLine("", tmp_path, capsys)

    def errors(*arguments: str) -> tuple[int, str]:
        result = run.plain("dashboard", *arguments, "--config", str(tmp_path))
        return result.code, " ".join(result.errors.split())

    both = errors("--store", "x", "--name-server", "embedded:y")
    host = errors("--store", "x", "--host", "example.com")
    every = errors("--store", "x", "--host", "0.0.0.0")
    url = errors("--app", "shop:9090")
    memory = errors("--name-server", "embedded:memory")
    missing = errors("--store", str(tmp_path / "nothing"))

    assert (both[0], "give --store or --name-server, not both" in both[1]) == (2, True)
    assert (host[0], "must be a numeric address, such as 127.0.0.1 or ::1, got 'example.com'" in host[1]) == (2, True)
    assert (every[0], "such as --allowed-host 10.0.0.5" in every[1]) == (2, True)
    assert (url[0], "must be http://host:port, got 'shop:9090'" in url[1]) == (2, True)
    assert (memory[0], "so the dashboard cannot see it; give --store FOLDER" in memory[1]) == (1, True)
    assert (missing[0], "error: " in missing[1]) == (1, True)


def test_an_address_in_use_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with place("folder", tmp_path, prepare), socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = CommandLine("", tmp_path, capsys).plain(
            "dashboard", "--store", str(tmp_path / "store"), "--port", port, "--config", str(tmp_path)
        )

    assert result.code == 1
    assert f"127.0.0.1:{port} cannot be used" in result.errors


# --- several, and accounts ----------------------------------------------------------------------

ACCOUNTS = """
mqtemplate:
  server:
    acl:
      enabled: true
      accounts:
"""
SECRET = "s3cret-of-all"


def account(name: str, *more: str) -> str:
    return f"        - {{{', '.join((f'access-key: {name}', f'secret-key: {SECRET}', *more))}}}\n"


def test_several_are_on_one_address_and_one_that_does_not_answer_stops_nothing(tmp_path: Path) -> None:
    with place("folder", tmp_path, prepare), socket.create_server(("127.0.0.1", 0)) as closed:
        absent = f"127.0.0.1:{closed.getsockname()[1]}"
        closed.close()
        names = ("-n", f"eu=embedded:{tmp_path / 'store'}", "-n", absent, "--url", f"http://{absent}")
        with dashboard(*names, "--config", str(tmp_path)) as link:
            client, base = Client(), base_of(link)
            client.get(link)
            topics = client.get(f"{base}at/eu/topics")
            failed = client.get(f"{base}at/{absent.replace(':', '-')}/topics")
            overview = client.get(base)[1]

    assert (topics[0], "orders" in topics[1]) == (200, True)
    assert (failed[0], "no name server answers" in failed[1]) == (503, True)
    assert 'href="/at/eu/"' in overview


def test_the_places_of_the_configuration_are_shown_without_options(tmp_path: Path) -> None:
    """A place has a broker, an application, or both, and each broker its own account. An option shows another one."""
    for name in ("server", "console"):
        (tmp_path / name).mkdir()
    (tmp_path / "server" / "application.yml").write_text(ACCOUNTS + account("owner-1", "admin: true"))
    with socket.create_server(("127.0.0.1", 0)) as closed:
        absent = f"http://127.0.0.1:{closed.getsockname()[1]}"
    console, folder = ("--config", str(tmp_path / "console")), f"embedded:{tmp_path / 'store'}"
    with place("folder", tmp_path, prepare), BrokerProcess(tmp_path / "server") as server:
        (tmp_path / "console" / "application.yml").write_text(
            "mqtemplate.dashboard.places:\n"
            f"  stored: {{name-server: '{folder}'}}\n"
            f"  served: {{name-server: '{server.name_server}', access-key: owner-1, secret-key: {SECRET}}}\n"
            f"  mails: {{application: '{absent}', token: {TOKEN}}}\n"
        )
        with dashboard(*console) as link, dashboard(*console, "-n", folder) as link_of_one:
            client, base = Client(), base_of(link)
            client.get(link)
            overview = client.get(base)[1]
            stored, served = (client.get(f"{base}at/{name}/topics") for name in ("stored", "served"))
            mails = client.get(f"{base}at/mails/listeners")
            client.get(link_of_one)
            one = client.get(f"{base_of(link_of_one)}topics")

    assert {f'href="/at/{name}/"' in overview for name in ("stored", "served", "mails")} == {True}
    assert (stored[0], "orders" in stored[1]) == (200, True)
    assert served[0] == 200
    assert mails[0] == 503, "a place that does not answer has the error on its pages only"
    assert (one[0], "orders" in one[1]) == (200, True)


@pytest.mark.parametrize(
    ("places", "error"),
    [
        ("{'e u': {name-server: '10.0.0.1:9876'}}", "must have names of letters, digits, '.', '_' and '-'"),
        ("{eu: {token: 0123456789abcdef}}", "shows nothing; give 'name-server', 'application', or both"),
        ("{eu: {application: 10.0.0.5}}", "must be http://host:port"),
        ("{eu: {name-server: '10.0.0.1:9876', access-key: me}}", "needs 'secret-key' beside it; give both or none"),
    ],
)
def test_wrong_places_are_errors_with_file_and_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], places: str, error: str
) -> None:
    (tmp_path / "application.yml").write_text(f"mqtemplate:\n  dashboard:\n    places: {places}\n")

    result = CommandLine("", tmp_path, capsys).plain("dashboard", "--config", str(tmp_path))

    assert result.code == 1
    assert error in " ".join(result.errors.split())
    assert "application.yml:3" in result.errors


def test_names_that_are_given_twice_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = CommandLine("", tmp_path, capsys)

    result = run.plain("dashboard", "-n", "a=127.0.0.1:1", "-n", "a=127.0.0.1:2", "--config", str(tmp_path))

    assert result.code == 2
    assert "a is given twice; give each a name of its own, as --name-server a-2=127.0.0.1:2" in " ".join(
        result.errors.split()
    )


def test_accounts_sign_in_and_a_removed_one_is_signed_out(tmp_path: Path) -> None:
    """The dashboard command and the server read their configuration again, each by itself."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    management = f"  management: {{enabled: true, port: {port}, token: {TOKEN}, dashboard: {{enabled: true}}}}\n"
    config = tmp_path / "application.yml"
    owner = account("owner-1", "admin: true") + management
    config.write_text(ACCOUNTS + account("night-shift", "role: operator") + owner)
    keys = f"access_key=night-shift&secret_key={SECRET}&form_end=complete".encode()
    store = ("--store", str(tmp_path / "other" / "store"), "--config", str(tmp_path))
    with (
        BrokerProcess(tmp_path, "--config", str(tmp_path)),
        place("folder", tmp_path / "other", prepare),
        dashboard(*store) as link,
    ):
        clients = {f"http://127.0.0.1:{port}/dashboard/": Client(), base_of(link): Client()}
        pages = [client.get(f"{base}sign-in", keys)[1] for base, client in clients.items()]
        before = [client.get(f"{base}topics")[0] for base, client in clients.items()]
        config.write_text(ACCOUNTS + owner)
        for base, client in clients.items():
            eventually(lambda: client.get(f"{base}topics")[0] == 401, f"the session at {base} ends")  # noqa: B023

    assert [("night-shift" in page, "operator" in page) for page in pages] == [(True, True)] * 2
    assert before == [200, 200]
