"""The key ``rocketmq.name-server``: a folder is the one that the text obviously means, or the text is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqtemplate.context.settings.rocketmq import ClusterAddresses, EmbeddedStore, parse_name_server
from mqtemplate.context.settings.source import load_settings
from mqtemplate.errors import ConfigurationError


@pytest.mark.parametrize(
    ("text", "folder"),
    [
        ("embedded:./data", "data"),
        ("embedded:data", "data"),
        ("Embedded: data/x ", "data/x"),
        ("embedded:../data", "../data"),
        ("embedded:/var/data", "/var/data"),
        ("embedded:///var/data", "/var/data"),
        ("embedded:////var/data", "/var/data"),
        ("embedded:~/data", "~/data"),
        ("embedded:./memory", "memory"),
        ("embedded:./with space, comma #1", "with space, comma #1"),
        ("embedded:./a:b", "a:b"),
        ("embedded:100%", "100%"),
    ],
)
def test_a_folder_is_the_path_as_it_stands(text: str, folder: str) -> None:
    assert parse_name_server(text) == EmbeddedStore(path=Path(folder))


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("embedded://./data", "write 'embedded:./data' for a folder in the working directory, or 'embedded:/data' for"),
        ("embedded://data/x", "write 'embedded:data/x' for a folder in the working directory, or 'embedded:/data/x'"),
        ("embedded://localhost/data", "is not the start of a URL with a host"),
        ("embedded://", "write 'embedded:data' for a folder"),
        ("embedded://memory", "or 'embedded:memory' for the store without a folder"),
        ("embedded:file:///data", "a folder has no scheme, drive or port before it; write the folder as"),
        ("embedded:file:./data", "a folder has no scheme"),
        ("embedded:embedded:./data", "a folder has no scheme"),
        ("embedded:localhost:9876", "a folder has no scheme, drive or port"),
        (r"embedded:C:\data", "a folder has no scheme, drive or port"),
        ("embedded:C:/data", "a folder has no scheme, drive or port"),
        (r"embedded:.\data", "the separator of folders is '/'"),
        ("embedded::memory:", "'embedded:memory' is the store without a folder"),
        ("embedded:./my%20data", "percent escapes are not decoded"),
        ("embedded:///my%2Fdata", "percent escapes are not decoded"),
        ("embedded:./data?mode=ro", "no parameters"),
        ("embedded:./a;embedded:./b", "one folder has no list after it"),
        ("embedded:./a\0b", "no control characters"),
        ("embedded:", "has nothing after the colon"),
        ("file:///data", "'embedded:<folder>'"),
        ("./data", "'embedded:<folder>'"),
    ],
)
def test_a_text_that_would_name_another_folder_than_meant_is_refused(text: str, advice: str) -> None:
    """It would open an empty store, and the messages in the meant one would seem to be lost."""
    with pytest.raises(ValueError, match=r".") as raised:
        parse_name_server(text)

    assert advice in str(raised.value)


def test_the_error_of_the_key_names_its_line_and_the_right_form(tmp_path: Path) -> None:
    (tmp_path / "application.yml").write_text("rocketmq:\n  name-server: embedded://./data\n", "utf-8")

    with pytest.raises(ConfigurationError, match=r"application.yml:2: rocketmq.name-server: .*'embedded:./data'"):
        load_settings(tmp_path)


def test_a_folder_with_any_name_can_be_given_as_store_path(tmp_path: Path) -> None:
    folder = tmp_path / r"a%20b;c:\d"

    settings = load_settings(
        arguments={"rocketmq.name-server": "embedded", "mqtemplate.broker.store-path": str(folder)}
    )

    assert settings.store_path == folder


def test_addresses_are_those_of_a_cluster() -> None:
    assert parse_name_server("a:9876; b:9877") == ClusterAddresses(("a:9876", "b:9877"))
