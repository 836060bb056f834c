"""The example schedule_app, with a virtual clock and as a program."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bench.peer.jvm import unavailable_reason
from bench.peer.rocketmq import NameServer, RocketMQ
from examples.schedule_app.app import COMPONENTS, DELAY_LEVEL, TIMEOUT_MS, report
from examples.schedule_app.schedule_listener import ArrivalBook, ScheduleListener
from examples.schedule_app.schedule_message_service import ScheduleMessageService
from mqtemplate import (
    EmbeddedBroker,
    EmbeddedSettings,
    Message,
    MQApplication,
    RemoteBroker,
    RemoteSettings,
    SendStatus,
)
from mqtemplate.message import HostAddress
from mqtemplate.server import BrokerServerSettings, LocalCluster
from mqtemplate.testing import Harness, StartApp
from tests.contract.test_remote_rocketmq import until_registered
from tests.programs import finish

ROOT = Path(__file__).parents[2]


@pytest.fixture
def app(mqtemplate_app: StartApp) -> MQApplication:
    """The components and the configuration of the example, with a store in memory and a virtual clock."""
    return mqtemplate_app(*COMPONENTS, config_folder=ROOT / "examples" / "schedule_app")


@pytest.mark.feature("B16", "C2")
def test_the_listener_receives_the_message_after_ten_seconds_and_not_before(
    app: MQApplication, mqtemplate_harness: Harness
) -> None:
    """The message has a timeout of 100 ms and delay level 3."""
    service, book = app.get(ScheduleMessageService), app.get(ArrivalBook)

    service.send_sync_schedule_message("4466", "hello4466", TIMEOUT_MS, DELAY_LEVEL)
    mqtemplate_harness.advance("9999ms")
    before = list(book.arrivals)
    mqtemplate_harness.advance("1ms")

    assert before == []
    mqtemplate_harness.assert_received(ScheduleListener, times=1)
    assert [(arrival.text, arrival.keys, arrival.late_ms) for arrival in book.arrivals] == [("hello4466", "4466", 0)]
    assert book.arrivals[0].due_ms - book.arrivals[0].sent_ms == 10_000


@pytest.mark.feature("B10", "B12", "B14", "C6")
def test_the_service_returns_status_and_id_and_logs_id_and_local_time(
    app: MQApplication, caplog: pytest.LogCaptureFixture
) -> None:
    """The application injects the template, and the caller checks for SEND_OK."""
    service = app.get(ScheduleMessageService)

    with caplog.at_level("INFO"):
        result = service.send_sync_schedule_message("4466", "hello4466", TIMEOUT_MS, DELAY_LEVEL)

    assert result.send_status is SendStatus.SEND_OK
    [sent] = [line for line in caplog.messages if line.startswith("schedule.sent")]
    assert re.fullmatch(rf"schedule.sent id=4466 local_time=\S+ msg_id={result.msg_id}", sent)


@pytest.mark.feature("B15")
def test_the_report_contains_all_times_and_the_lateness(app: MQApplication, mqtemplate_harness: Harness) -> None:
    app.get(ScheduleMessageService).send_sync_schedule_message("4466", "hello4466", TIMEOUT_MS, DELAY_LEVEL)
    mqtemplate_harness.advance("10s")

    lines = report(app.get(ArrivalBook).arrivals)

    assert [line.split()[0] for line in lines] == ["'hello4466',", "sent", "due", "received"]
    assert lines[-1].endswith("0 ms late")


def start_program(folder: Path, **environment: str) -> subprocess.Popen[str]:
    """Start the example as a user does, with warnings as errors."""
    return subprocess.Popen(
        [sys.executable, "-u", "-W", "error", "-m", "examples.schedule_app"],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.feature("C10")
@pytest.mark.slow
def test_the_program_ends_by_itself_and_ctrl_c_loses_no_message(tmp_path: Path) -> None:
    """In an empty folder. The next run receives the message of a stopped run beside its own."""
    with start_program(tmp_path) as stopped:
        assert stopped.stdout is not None
        sent = stopped.stdout.readline()
        stopped.send_signal(signal.SIGINT)
        output, errors = finish(stopped)
    assert "SEND_OK" in sent
    assert (stopped.returncode, "Traceback" in errors) == (130, False), errors
    assert "delivered after the next start" in output

    with start_program(tmp_path) as completed:
        output, errors = finish(completed)
    assert completed.returncode == 0, errors
    assert output.count("ms late") == 2


def run_on_a_cluster(name_server: str, folder: Path) -> None:
    """Run the same program with the profile for a cluster, and check its output.

    The time of its first send includes the route, the connection and the new topic: more than 100 ms on a busy machine.
    """
    profile = {"MQTEMPLATE_PROFILES_ACTIVE": "cluster", "SCHEDULE_APP_NAME_SERVER": name_server}
    with start_program(folder, **profile, SCHEDULE_APP_TIMEOUT_MS="30000") as program:
        output, errors = finish(program)

    assert program.returncode == 0, errors
    assert "SEND_OK" in output
    assert output.count("ms late") == 1
    assert list(folder.iterdir()) == [], "the cluster stores the messages"


@pytest.mark.feature("C10")
@pytest.mark.slow
def test_the_program_runs_unchanged_on_our_server(tmp_path: Path) -> None:
    anywhere = HostAddress("127.0.0.1", 0)
    engine = EmbeddedBroker(None, EmbeddedSettings(listen_host=anywhere))
    with LocalCluster(engine, BrokerServerSettings(listen=anywhere)) as cluster:
        run_on_a_cluster(str(cluster.address), tmp_path)


@pytest.mark.feature("C10")
@pytest.mark.thorough
@pytest.mark.conformance
def test_the_program_runs_unchanged_on_rocketmq(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    if reason := unavailable_reason():
        pytest.skip(reason)
    with NameServer() as names, RocketMQ(tmp_path_factory.mktemp("rocketmq"), names):
        until_registered(names.address)
        with RemoteBroker(RemoteSettings(name_servers=(names.address,))) as broker:
            for _ in range(20):  # a broker that has just started needs longer for its first messages
                broker.sends.send(Message("schedule-message-topic", b"warm", {"DELAY": "1"}), timeout_ms=10_000)
        run_on_a_cluster(names.address, tmp_path)
