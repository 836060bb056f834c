"""What each command can do on Apache RocketMQ 5.5.0: the table of docs/cli.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.matrix import Place, application, check, table
from tests.cli.running import CommandLine
from tests.cli.test_dashboard_command import Client, dashboard
from tests.conformance.servers import filled_rocketmq
from tests.waiting import eventually

pytestmark = [pytest.mark.conformance, pytest.mark.thorough, pytest.mark.timeout(300)]


@pytest.mark.feature("14.1")
def test_each_command_does_what_the_table_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with filled_rocketmq(tmp_path) as address, application(address) as url:
        run = CommandLine(address, tmp_path, capsys)
        eventually(
            lambda: len(run.json("delayed", "ls", "--topic", "reminders")) == 4,
            "RocketMQ has read its timers",
            timeout_s=60,
        )

        check(Place(run, tmp_path / "store", url), "RocketMQ 5.5.0")

        with dashboard("--name-server", address, "--config", str(tmp_path)) as link:
            assert Client().get(link)[0] == 200
        assert table()["dashboard"]["RocketMQ 5.5.0"] == 0
