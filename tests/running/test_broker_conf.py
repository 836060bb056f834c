"""Property files of RocketMQ's broker as settings of our server."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqtemplate.context.settings.app import AppSettings
from mqtemplate.context.settings.broker import ServerSettings
from mqtemplate.context.settings.source import load_settings
from mqtemplate.errors import ConfigurationError
from mqtemplate.message import HostAddress
from mqtemplate.running.broker_conf import read_broker_conf, read_property_file
from mqtemplate.running.broker_conf_keys import KNOWN_NAMES, reason_for

SINGLE_MASTER = """
# the first level has 90 seconds; levels are positions, and need not be sorted
brokerClusterName = DefaultCluster
brokerName = broker-a
brokerId = 0
deleteWhen = 04
fileReservedTime = 48
brokerRole = ASYNC_MASTER
flushDiskType = ASYNC_FLUSH
messageDelayLevel = 90s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h
"""


def conf_file(folder: Path, text: str) -> Path:
    file = folder / "broker.conf"
    file.write_text(text, "utf-8")
    return file


def settings_of(folder: Path, text: str) -> AppSettings:
    return load_settings(folder, environment={}, arguments=read_broker_conf(conf_file(folder, text)).root)


def server_of(folder: Path, text: str) -> ServerSettings:
    return settings_of(folder, text).mqtemplate.server


def errors_of(folder: Path, text: str) -> str:
    with pytest.raises(ConfigurationError) as raised:
        settings_of(folder, text)
    return str(raised.value)


# --- the file -----------------------------------------------------------------------------------------


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


# --- keys ---------------------------------------------------------------------------------------------


@pytest.mark.feature("E10")
def test_the_file_of_a_single_master_is_used_as_it_stands(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, SINGLE_MASTER)

    broker = settings.mqtemplate.broker
    assert broker.message_delay_level.startswith("90s 5s 10s 30s ")
    assert (broker.broker_name, broker.file_reserved_time, broker.delete_when) == ("broker-a", 48, "04")
    assert broker.flush_disk_type.value == "ASYNC_FLUSH"
    assert settings.mqtemplate.server.cluster_name == "DefaultCluster"
    assert settings.origins.of("mqtemplate.broker.broker-name") == "broker.conf:4"


def test_keys_without_a_meaning_have_a_reason(tmp_path: Path) -> None:
    text = SINGLE_MASTER + "namesrvAddr=10.0.0.1:9876\nhaListenPort=10912\npopPollingSize=1\n"

    name_server = "the name server runs in this process, on mqtemplate.server.name-server; clients need that address"
    assert read_broker_conf(conf_file(tmp_path, text)).without_meaning == {
        "brokerId": "this broker has no replicas",
        "brokerRole": "this broker has no replicas",
        "namesrvAddr": name_server,
        "haListenPort": "this broker has no replicas",
        "popPollingSize": "pop consumers are not supported; push and pull consumers are",
    }


def test_few_keys_of_rocketmq_have_no_better_reason_than_that_the_part_is_missing() -> None:
    vague = [name for name in KNOWN_NAMES if reason_for(name).startswith("it belongs to a part")]

    assert len(vague) < len(KNOWN_NAMES) / 4


def test_unknown_keys_are_errors_with_the_nearest_one(tmp_path: Path) -> None:
    text = errors_of(tmp_path, "brokerNam=a\nmapedFileSizeCommitLog=1\nqwertz=1\n")

    assert "broker.conf is not usable: 3 problems" in text
    assert "broker.conf:1: brokerNam is no key of RocketMQ's broker; did you mean 'brokerName'?" in text
    assert "broker.conf:2: mapedFileSizeCommitLog is no key of RocketMQ's broker; did you mean 'mappedFileSize" in text
    assert "broker.conf:3: qwertz is no key of RocketMQ's broker; remove it" in text


def test_an_invalid_value_is_reported_with_its_line(tmp_path: Path) -> None:
    assert "broker.conf:2: mqtemplate.broker.message-delay-level: " in errors_of(tmp_path, "\nmessageDelayLevel=1s x")


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (
            "brokerRole=SLAVE",
            "brokerRole must be ASYNC_MASTER or SYNC_MASTER, got 'SLAVE': this broker has no replicas",
        ),
        ("brokerId=1", "brokerId must be 0, got '1': this broker has no replicas"),
        ("aclEnable=true", "aclEnable must be false, got 'true': set mqtemplate.server.acl in application.yml"),
        ("authenticationEnabled=true", "authenticationEnabled must be false, got 'true': set mqtemplate.server.acl"),
        ("useTLS=true", "useTLS must be false, got 'true': set mqtemplate.server.tls in application.yml"),
        ("brokerPermission=4", "brokerPermission must be 6, got '4': limit the rights of accounts instead"),
    ],
)
def test_a_key_that_would_be_dangerous_to_ignore_is_an_error(tmp_path: Path, line: str, text: str) -> None:
    assert text in errors_of(tmp_path, line)


def test_the_files_of_a_store_are_in_one_directory(tmp_path: Path) -> None:
    accepted = settings_of(tmp_path, "storePathRootDir=/data/store\nstorePathCommitLog=/data/store/commitlog/\n")
    elsewhere = errors_of(tmp_path, "storePathRootDir=/data/store\nstorePathCommitLog=/ssd/commitlog\n")
    alone = errors_of(tmp_path, "storePathCommitLog=/data/store/commitlog\n")

    assert accepted.store_path == Path("/data/store")
    assert (
        "storePathCommitLog must be /data/store/commitlog, got '/ssd/commitlog': all files of a store are" in elsewhere
    )
    assert "storePathCommitLog is set without storePathRootDir" in alone


# --- addresses ----------------------------------------------------------------------------------------


def test_without_addresses_the_server_listens_on_loopback(tmp_path: Path) -> None:
    server = server_of(tmp_path, SINGLE_MASTER)

    assert (server.listen, server.advertise) == (HostAddress("127.0.0.1", 10911), None)


def test_a_port_alone_stays_on_loopback(tmp_path: Path) -> None:
    assert server_of(tmp_path, "listenPort=10921").listen == HostAddress("127.0.0.1", 10921)


def test_an_address_for_other_machines_opens_both_sockets_to_them(tmp_path: Path) -> None:
    """RocketMQ listens on all addresses and gives clients brokerIP1."""
    server = server_of(tmp_path, "brokerIP1=192.0.2.7\nlistenPort=10921")

    assert server.listen == HostAddress("0.0.0.0", 10921)
    assert server.advertise == HostAddress("192.0.2.7", 10921)
    assert server.name_server == HostAddress("0.0.0.0", 9876)
