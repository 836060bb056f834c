"""Property files of RocketMQ's broker as settings of our server."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqtemplate.errors import ConfigurationError
from mqtemplate.running.broker_conf import KNOWN_NAMES, read_broker_conf, read_property_file, reason_for
from tests.context.config_script import check_config_script


def conf_file(folder: Path, text: str) -> Path:
    file = folder / "broker.conf"
    file.write_text(text, "utf-8")
    return file


def test_a_property_file_is_read_as_java_reads_it(tmp_path: Path) -> None:
    text = "a=1\nb : 2\nc 3\n  d = 4 = 5\n! comment\n#e=6\nf=long \\\n   value\ng\\ h=\\u0041\\tb\nempty=\n"

    entries = read_property_file(conf_file(tmp_path, text))

    assert [(entry.key, entry.value, entry.line) for entry in entries] == [
        ("a", "1", 1),
        ("b", "2", 2),
        ("c", "3", 3),
        ("d", "4 = 5", 4),
        ("f", "long value", 7),
        ("g h", "A\tb", 9),
        ("empty", "", 10),
    ]


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="broker.conf cannot be read: No such file or directory; give the"):
        read_broker_conf(tmp_path / "broker.conf")


@pytest.mark.parametrize(
    ("data", "text"),
    [(b"a=\xff", "broker.conf: not UTF-8 at byte 2"), (b"#" * (1 << 20) + b"\n", "has 1,048,577 bytes, allowed are")],
)
def test_a_file_that_is_no_text_or_too_long_is_an_error(tmp_path: Path, data: bytes, text: str) -> None:
    (tmp_path / "broker.conf").write_bytes(data)

    with pytest.raises(ConfigurationError, match=text):
        read_broker_conf(tmp_path / "broker.conf")


def test_few_keys_of_rocketmq_have_no_better_reason_than_that_the_part_is_missing() -> None:
    vague = [name for name in KNOWN_NAMES if reason_for(name).startswith("it belongs to a part")]

    assert len(vague) < len(KNOWN_NAMES) / 4


@pytest.mark.feature("E10")
def test_property_files_give_what_the_script_says(tmp_path: Path) -> None:
    check_config_script(Path(__file__).with_name("broker_conf.script"), tmp_path)
