"""``config``, ``beans``, ``conditions`` and ``bench``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.running import CommandLine

APPLICATION = """
from mqtemplate import MQApplication, RocketMQTemplate, message_listener, service


@service
class Audit:
    def __init__(self, template: RocketMQTemplate) -> None:
        self.template = template


@message_listener(topic="orders", consumer_group="billing")
class Bill:
    def __init__(self, audit: Audit) -> None:
        self.audit = audit

    def on_message(self, message: str) -> None: ...


@message_listener(topic="orders", consumer_group="mailing")
def mail(message: str) -> None: ...
"""


@pytest.fixture
def command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return CommandLine("", tmp_path, capsys)


def write(folder: Path, text: str) -> None:
    (folder / "application.yml").write_text(text)


# --- config -------------------------------------------------------------------------------------


def test_settings_are_shown_with_their_origins(
    command_line: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(
        tmp_path,
        "rocketmq:\n  name-server: 127.0.0.1:9876\n  producer:\n    access-key: owner\n    secret-key: abcdefgh\n"
        "    send-message-timeout: 3000\nshop:\n  currency: EUR\n  city: Berlin\n  api-token: never-shown\n",
    )
    monkeypatch.setenv("ROCKETMQ_PRODUCER_GROUP", "shop")
    monkeypatch.setenv("SHOP_CITY", "Basel")

    result = command_line.plain("config", "show", "--origins", "--json")

    records = {each["key"]: (each["value"], each["origin"]) for each in result.json}
    assert records["rocketmq.name-server"] == ("127.0.0.1:9876", "application.yml:2")
    assert records["rocketmq.producer.group"] == ("shop", "environment ROCKETMQ_PRODUCER_GROUP")
    assert records["rocketmq.producer.secret-key"] == ("********", "application.yml:5")
    assert records["shop.currency"] == ("EUR", "application.yml:8")
    assert records["shop.city"] == ("Basel", "environment SHOP_CITY")
    assert records["shop.api-token"][0] == "********"
    text = command_line.plain("config", "show", "--origins").output
    assert "application.yml:2" in text
    assert "abcdefgh" not in text + result.output
    assert "never-shown" not in text + result.output


def test_defaults_and_sections_are_selected(command_line: CommandLine, tmp_path: Path) -> None:
    write(tmp_path, "mqtemplate:\n  broker:\n    broker-name: b1\n")

    selected = command_line.plain("config", "show", "mqtemplate.broker", "--all", "--json").json
    one = command_line.plain("config", "show", "mqtemplate.broker.broker-name")

    records = {each["key"]: (each["value"], each["origin"]) for each in selected}
    assert all(key.startswith("mqtemplate.broker.") for key in records)
    assert records["mqtemplate.broker.broker-name"] == ("b1", "application.yml:3")
    assert records["mqtemplate.broker.flush-disk-type"] == ("SYNC_FLUSH", "default")
    assert one.output.splitlines()[1].split() == ["mqtemplate.broker.broker-name", "b1"]


def test_variables_without_effect_are_reported(command_line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROCKETMQ_NAMESERVERS", "127.0.0.1:9876")

    result = command_line.plain("config", "show", "--profile", "prod")

    assert "warning: ROCKETMQ_NAMESERVERS sets no key" in result.errors
    assert "warning: no file and no document is for the profile 'prod'" in result.errors


def test_an_invalid_file_is_an_error_with_its_line(command_line: CommandLine, tmp_path: Path) -> None:
    write(tmp_path, "rocketmq:\n  name-servr: 127.0.0.1:9876\n")

    result = command_line.plain("config", "show")

    assert result.code == 1
    assert "application.yml:2: rocketmq.name-servr: no such key; did you mean 'rocketmq.name-server'?" in result.errors


# --- beans and conditions -----------------------------------------------------------------------


def test_beans_are_listed_after_those_that_they_use(command_line: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "shop_with_beans.py").write_text(APPLICATION)

    records = command_line.plain("beans", "shop_with_beans", "--json").json

    names = [each["name"] for each in records]
    assert names.index("broker") < names.index("audit") < names.index("bill")
    by_name = {each["name"]: each for each in records}
    assert by_name["broker"]["origin"] == "starter embedded"
    assert (by_name["bill"]["origin"], by_name["bill"]["is_listener"]) == ("application", True)
    assert (by_name["mail"]["type"], by_name["audit"]["is_listener"]) == ("listener function", False)
    assert not (tmp_path / "mqtemplate-store").exists()  # nothing was started


def test_an_application_object_may_be_named(command_line: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "shop_with_application.py").write_text(f"{APPLICATION}\napplication = MQApplication(Bill, Audit)\n")

    shown = command_line.plain("beans", "shop_with_application:application").output

    assert "bill" in shown
    assert "mail" not in shown


def test_conditions_say_why_a_starter_does_not_act(command_line: CommandLine) -> None:
    records = {each["starter"]: each for each in command_line.plain("conditions", "--json").json}

    assert records["embedded"]["applied"]
    assert records["rocketmq"] == {
        "starter": "rocketmq",
        "applied": False,
        "reason": "rocketmq.name-server names no cluster, and rocketmq.endpoints no proxy",
    }
    assert (
        "rocketmq.name-server names no cluster, and rocketmq.endpoints no proxy"
        in command_line.plain("conditions").output
    )


@pytest.mark.parametrize("name", ["no_such_module", "json:nothing"])
def test_components_that_cannot_be_imported_are_reported(command_line: CommandLine, name: str) -> None:
    result = command_line.plain("beans", name)

    assert result.code == 1
    assert f"error: {name!r} cannot be imported" in result.errors


# --- bench --------------------------------------------------------------------------------------


def test_bench_sends_and_reads_in_a_directory_of_its_own(command_line: CommandLine, tmp_path: Path) -> None:
    record = command_line.plain("bench", "--count", "50", "--size", "10", "--threads", "2", "--json").json

    assert (record["count"], record["read_count"]) == (50, 50)
    assert record["send_per_s"] > 0
    assert list(tmp_path.iterdir()) == []


def test_bench_of_delayed_messages_cancels_them(run: CommandLine) -> None:
    record = run.json("bench", "--count", "20", "--delay", "1h")

    assert record["cancel_count"] == 20
    assert run.json("delayed", "histogram", "--topic", "mqtemplate_bench")["total"] == 0
