"""Settings from TOML files, from ``.env``, and from the command line of the process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mqtemplate.context.config.files import read_env_file
from mqtemplate.context.settings.source import PROCESS, CommandLine, load_settings
from mqtemplate.errors import ConfigurationError

TOML = """
# levels
[rocketmq]
name-server = "embedded:memory"
producer = { group = "shop", retry-times-when-send-failed = 5 }

[mqtemplate.broker]
"broker-name" = 'b1'
topics = ["orders", "payments"]
timer-wheel-enable = false

[shop]
opened = 2026-01-31
limits = [1, 2]
"""


@pytest.fixture
def command_line() -> Iterator[None]:
    """Forgets the options of the process at the end."""
    yield
    PROCESS.given = CommandLine()


# --- TOML ---------------------------------------------------------------------------------------------


def test_a_toml_file_has_the_same_keys_as_a_yaml_file(tmp_path: Path) -> None:
    (tmp_path / "application.toml").write_text(TOML, "utf-8")

    settings = load_settings(tmp_path, environment={})

    assert settings.rocketmq.name_server == "embedded:memory"
    assert (settings.rocketmq.producer.group, settings.rocketmq.producer.retry_times_when_send_failed) == ("shop", 5)
    assert settings.mqtemplate.broker.topics == ("orders", "payments")
    assert settings.mqtemplate.broker.timer_wheel_enable is False
    assert (settings.get("shop.opened"), settings.get("shop.limits")) == ("2026-01-31", [1, 2])


@pytest.mark.parametrize(
    ("key", "origin"),
    [
        ("rocketmq.name-server", "application.toml:4"),
        ("rocketmq.producer.group", "application.toml:5"),
        ("mqtemplate.broker.broker-name", "application.toml:8"),
        ("mqtemplate.broker.topics", "application.toml:9"),
    ],
)
def test_each_key_of_a_toml_file_has_its_line(tmp_path: Path, key: str, origin: str) -> None:
    (tmp_path / "application.toml").write_text(TOML, "utf-8")

    assert load_settings(tmp_path, environment={}).origins.of(key) == origin


def test_a_toml_file_of_a_profile_wins(tmp_path: Path) -> None:
    (tmp_path / "application.yml").write_text("rocketmq: {producer: {group: a}}", "utf-8")
    (tmp_path / "application-prod.toml").write_text("rocketmq.producer.group = 'b'", "utf-8")

    settings = load_settings(tmp_path, ["prod"], environment={})

    assert settings.rocketmq.producer.group == "b"
    assert settings.origins.unmatched_profiles == ()


def test_an_unknown_key_of_a_toml_file_is_an_error_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "application.toml").write_text("[mqtemplate.broker]\nbroker-nam = 'x'\n", "utf-8")

    with pytest.raises(
        ConfigurationError, match="application.toml:2: mqtemplate.broker.broker-nam: no such key; did you"
    ):
        load_settings(tmp_path, environment={})


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"a = ", "application.toml: not valid TOML: Invalid value (at end of document)"),
        (b"a = '\xff'", "application.toml: not UTF-8 at byte 5; save the file as UTF-8"),
        (b"a = " + b"[" * 5_000, "application.toml: values are nested too deeply; write fewer levels"),
        (b"#" * ((1 << 20) + 1), "application.toml: has 1,048,577 bytes, allowed are 1,048,576; shorten it"),
    ],
)
def test_an_invalid_toml_file_is_an_error(tmp_path: Path, data: bytes, text: str) -> None:
    (tmp_path / "application.toml").write_bytes(data)

    with pytest.raises(ConfigurationError) as raised:
        load_settings(tmp_path, environment={})
    assert str(raised.value) == text


def test_a_folder_has_one_file_of_a_name(tmp_path: Path) -> None:
    (tmp_path / "application.toml").touch()
    (tmp_path / "application.yml").touch()

    with pytest.raises(ConfigurationError, match="has both application.yml and application.toml; keep one"):
        load_settings(tmp_path, environment={})


# --- .env ---------------------------------------------------------------------------------------------


def test_variables_of_the_process_win_over_those_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is read for keys and for placeholders; the process gets no new variables."""
    (tmp_path / ".env").write_text(
        "# local\nexport ROCKETMQ_PRODUCER_GROUP='from file'\nROCKETMQ_NAME_SERVER=embedded:memory\nSHOP=x\n", "utf-8"
    )
    (tmp_path / "application.yml").write_text("shop: {name: '${SHOP}'}", "utf-8")
    monkeypatch.setenv("ROCKETMQ_NAME_SERVER", "embedded:./mine")

    settings = load_settings(tmp_path)

    assert settings.rocketmq.producer.group == "from file"
    assert settings.rocketmq.name_server == "embedded:./mine"
    assert settings.get("shop.name") == "x"


def test_given_variables_replace_the_file(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("ROCKETMQ_PRODUCER_GROUP=a\n", "utf-8")

    assert load_settings(tmp_path, environment={}).rocketmq.producer.group is None


def test_a_line_that_is_no_variable_is_an_error(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("A=1\n=2\n", "utf-8")

    with pytest.raises(ConfigurationError, match=r"\.env:2: '=2' is no variable; write NAME=value"):
        load_settings(tmp_path)


def test_a_missing_file_of_variables_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="prod.env cannot be read: No such file or directory; give the path"):
        read_env_file(tmp_path / "prod.env")


# --- the command line ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("command_line")
def test_the_command_line_wins_over_the_program(tmp_path: Path) -> None:
    PROCESS.given = CommandLine(("prod",), {"rocketmq.producer.group": "given"})

    settings = load_settings(tmp_path, ["test"], environment={}, arguments={"rocketmq.producer.group": "program"})

    assert settings.rocketmq.producer.group == "given"
    assert settings.mqtemplate.profiles.active == ("prod",)
    assert settings.origins.of("rocketmq.producer.group") == "the command line"


@pytest.mark.usefixtures("command_line")
def test_another_broker_on_the_command_line_needs_no_store_directory(tmp_path: Path) -> None:
    """Workers use the server that their supervisor runs on the store directory of the configuration."""
    (tmp_path / "application.yml").write_text("mqtemplate: {broker: {storePath: ./data}}", "utf-8")
    PROCESS.given = CommandLine(keys={"rocketmq.name-server": "127.0.0.1:9876"})

    assert load_settings(tmp_path, environment={}).store_path is None


# --- empty values: they count as not given, in every source --------------------------------------------------


@pytest.mark.parametrize("empty", ["", " ", "\t"])
@pytest.mark.parametrize(
    "variable", ["ROCKETMQ_PRODUCER_GROUP", "ROCKETMQ__PRODUCER__GROUP", "rocketmq.producer.group"]
)
def test_an_empty_variable_does_not_replace_the_value_of_a_file(tmp_path: Path, variable: str, empty: str) -> None:
    """Containers and unit files set variables to nothing. The producer lost the group that its file names."""
    (tmp_path / "application.yml").write_text("rocketmq.producer.group: shop\n")

    settings = load_settings(tmp_path, environment={variable: empty})

    assert settings.rocketmq.producer.group == "shop"
    assert settings.origins.of("rocketmq.producer.group") == "application.yml:1"


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("application.yml", "rocketmq:\n  producer:\n    group:\n"),
        ("application.yml", 'rocketmq:\n  producer:\n    group: ""\n'),
        ("application.yml", "rocketmq:\n  producer:\n    group: ${NO_GROUP}\n"),
        ("application.yml", "rocketmq:\n  producer:\n    group: ${NO_GROUP:}\n"),
        ("application.toml", '[rocketmq]\nproducer = { group = "" }\n'),
        (".env", "ROCKETMQ_PRODUCER_GROUP=\n"),
        (".env", 'ROCKETMQ_PRODUCER_GROUP=""\n'),
    ],
)
def test_an_empty_value_of_a_file_is_the_default(tmp_path: Path, file: str, text: str) -> None:
    (tmp_path / file).write_text(text.replace("${NO_GROUP}", "${NO_GROUP:}"))

    settings = load_settings(tmp_path)

    assert settings.rocketmq.producer.group is None


def test_an_empty_value_of_a_later_source_does_not_replace_an_earlier_one(
    tmp_path: Path, command_line: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a profile, of the program, of the command line, and of the process above the file ``.env``."""
    (tmp_path / "application.yml").write_text("rocketmq.producer.group: shop\nrocketmq.name-server: embedded:memory\n")
    (tmp_path / "application-prod.yml").write_text('rocketmq.producer.group: ""\n')
    (tmp_path / ".env").write_text("ROCKETMQ_PRODUCER_SEND_MESSAGE_TIMEOUT=7s\n")
    monkeypatch.setenv("ROCKETMQ_PRODUCER_SEND_MESSAGE_TIMEOUT", "")
    PROCESS.given = CommandLine(keys={"rocketmq.name-server": ""})

    settings = load_settings(tmp_path, ["prod"], arguments={"rocketmq.producer": {"group": ""}})

    assert settings.rocketmq.producer.group == "shop"
    assert settings.rocketmq.name_server == "embedded:memory"
    assert settings.rocketmq.producer.send_message_timeout == 7_000


def test_a_placeholder_takes_its_default_for_an_empty_variable(tmp_path: Path) -> None:
    (tmp_path / "application.yml").write_text(
        "rocketmq.producer.group: ${SHOP_GROUP:shop}\nshop.name: ${SHOP_NAME:corner}\n"
    )

    settings = load_settings(tmp_path, environment={"SHOP_GROUP": "", "SHOP_NAME": " "})

    assert settings.rocketmq.producer.group == "shop"
    assert settings.get("shop.name") == "corner"


def test_a_placeholder_without_a_default_refuses_an_empty_variable(tmp_path: Path) -> None:
    (tmp_path / "application.yml").write_text("rocketmq.producer.group: ${SHOP_GROUP}\n")

    with pytest.raises(ConfigurationError, match=r"application.yml:1: '\$\{SHOP_GROUP\}' has no value and no default"):
        load_settings(tmp_path, environment={"SHOP_GROUP": ""})


def test_an_empty_text_in_a_section_of_the_application_stays(tmp_path: Path) -> None:
    """It may have a meaning there, as in maps of the library whose keys the user chooses."""
    (tmp_path / "application.yml").write_text(
        'shop:\n  prefix: ""\nmqtemplate.spark.conf:\n  spark.ui.prefix: ""\n', "utf-8"
    )

    settings = load_settings(tmp_path, environment={})

    assert settings.get("shop.prefix") == ""
    assert settings.mqtemplate.spark.conf == {"spark.ui.prefix": ""}


def test_an_empty_profile_is_none(tmp_path: Path) -> None:
    (tmp_path / "application.yml").write_text("mqtemplate.profiles.active: dev\n")

    assert load_settings(tmp_path, environment={"MQTEMPLATE_PROFILES_ACTIVE": ""}).origins.profiles == ("dev",)


# --- byte order marks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("application.toml", "[rocketmq]\nproducer = { group = 'shop' }\n"),
        ("application.yml", "rocketmq.producer.group: shop\n"),
        ("application.yaml", "rocketmq.producer.group: shop\n"),
        (".env", "ROCKETMQ_PRODUCER_GROUP=shop\n"),
    ],
)
def test_a_file_may_start_with_a_byte_order_mark(tmp_path: Path, file: str, text: str) -> None:
    """Editors of Windows write one. TOML then had no first table, and ``.env`` a variable without effect."""
    (tmp_path / file).write_text(text, "utf-8-sig")

    assert load_settings(tmp_path).rocketmq.producer.group == "shop"


@pytest.mark.parametrize("file", ["application.toml", "application.yml", ".env"])
def test_a_file_in_another_encoding_is_refused_with_the_fix(tmp_path: Path, file: str) -> None:
    (tmp_path / file).write_text("ROCKETMQ_PRODUCER_GROUP=shop\n", "utf-16")

    with pytest.raises(ConfigurationError, match=rf"{file}: not UTF-8 at byte 0; save the file as UTF-8"):
        load_settings(tmp_path)
