"""Sources of settings that scripts cannot show: their encoding, size and depth, and the variables of the process."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from mqtemplate.context import AppSettings
from mqtemplate.context.config.files import read_env_file
from mqtemplate.context.config.schema import all_fields
from mqtemplate.context.config.tree import canonical_key
from mqtemplate.context.settings.source import load_settings
from mqtemplate.errors import ConfigurationError


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


def test_variables_of_the_process_win_over_those_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is read for keys and for placeholders; the process gets no new variables."""
    (tmp_path / ".env").write_text(
        "# local\nexport ROCKETMQ_PRODUCER_GROUP='from file'\nROCKETMQ_NAME_SERVER=embedded:memory\nSHOP=x\n"
        "ROCKETMQ_PRODUCER_SEND_MESSAGE_TIMEOUT=7s\n",
        "utf-8",
    )
    (tmp_path / "application.yml").write_text("shop: {name: '${SHOP}'}", "utf-8")
    monkeypatch.setenv("ROCKETMQ_NAME_SERVER", "embedded:./mine")
    monkeypatch.setenv("ROCKETMQ_PRODUCER_SEND_MESSAGE_TIMEOUT", "")  # counts as not given

    settings = load_settings(tmp_path)

    assert settings.rocketmq.producer.group == "from file"
    assert settings.rocketmq.name_server == "embedded:./mine"
    assert settings.rocketmq.producer.send_message_timeout == 7_000
    assert settings.get("shop.name") == "x"


def test_given_variables_replace_the_file(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("ROCKETMQ_PRODUCER_GROUP=a\n", "utf-8")

    assert load_settings(tmp_path, environment={}).rocketmq.producer.group is None


def test_a_missing_file_of_variables_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="prod.env cannot be read: No such file or directory; give the path"):
        read_env_file(tmp_path / "prod.env")


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


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nowhere' is not a folder; give the one that holds application\.yml"):
        load_settings(tmp_path / "nowhere", environment={})


def test_no_two_keys_share_an_environment_name() -> None:
    """Underscores have no meaning in a variable, so it could not distinguish two keys that differ only by them."""
    names = [canonical_key("".join(path)) for path, shape in all_fields(AppSettings) if shape.section is None]

    assert [one for one, other in itertools.pairwise(sorted(names)) if one == other] == []
