"""A property file of RocketMQ's broker, such as ``broker.conf``, as settings of our server.

The reader of property files takes Java's form (``java.util.Properties``): ``key=value``, comments, long lines, escapes.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import NamedTuple

from mqtemplate.context.config.files import read_text
from mqtemplate.context.config.tree import ConfigNode
from mqtemplate.errors import ConfigurationError
from mqtemplate.processes import home_folder
from mqtemplate.running.broker_conf_keys import KNOWN_NAMES, reason_for
from mqtemplate.user_code import did_you_mean

# The key ends at the first separator that no backslash escapes: "=", ":", or blanks.
_KEY_AND_VALUE = re.compile(r"(?P<key>(?:\\.|[^\\\s=:])*)\s*[=:]?\s*(?P<value>.*)", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_CONTROL = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


class PropertyEntry(NamedTuple):
    """One key of a file."""

    key: str
    value: str
    line: int


def read_property_file(file: Path) -> list[PropertyEntry]:
    """Return the entries of a file, in order.

    Raises:
        ConfigurationError: The file cannot be read, is not UTF-8, or too long.
    """
    text = read_text(file, "{file} cannot be read: {reason}; give the property file of a broker")
    return [_entry(line, number) for number, line in _logical_lines(text)]


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield each line with its number; one that ends with a backslash continues in the next one."""
    parts: list[str] = []
    start = 0
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.lstrip()
        if not parts and (not stripped or stripped[0] in "#!"):
            continue
        start = start if parts else number
        backslashes = len(stripped) - len(stripped.rstrip("\\"))
        if backslashes % 2:
            parts.append(stripped[:-1])
            continue
        yield start, "".join([*parts, stripped])
        parts = []
    if parts:
        yield start, "".join(parts)


def _entry(line: str, number: int) -> PropertyEntry:
    found = _KEY_AND_VALUE.match(line)
    assert found is not None  # every part of the pattern may be empty
    return PropertyEntry(_unescaped(found["key"]), _unescaped(found["value"]).strip(), number)


def _unescaped(text: str) -> str:
    return _ESCAPE.sub(lambda found: chr(int(found[1], 16)) if found[1] else _CONTROL.get(found[2], found[2]), text)


_KEYS = {
    # key of RocketMQ -> key here
    "autoCreateSubscriptionGroup": "mqtemplate.server.auto-create-subscription-group",
    "autoCreateTopicEnable": "mqtemplate.server.auto-create-topic-enable",
    "brokerClusterName": "mqtemplate.server.cluster-name",
    "brokerName": "mqtemplate.broker.broker-name",
    "cleanFileForciblyEnable": "mqtemplate.broker.clean-file-forcibly-enable",
    "defaultTopicQueueNums": "mqtemplate.server.default-topic-queue-nums",
    "deleteWhen": "mqtemplate.broker.delete-when",
    "diskMaxUsedSpaceRatio": "mqtemplate.broker.disk-max-used-space-ratio",
    "diskSpaceCleanForciblyRatio": "mqtemplate.broker.disk-space-clean-forcibly-ratio",
    "diskSpaceWarningLevelRatio": "mqtemplate.broker.disk-space-warning-level-ratio",
    "enablePropertyFilter": "mqtemplate.server.enable-property-filter",
    "fileReservedTime": "mqtemplate.broker.file-reserved-time",
    "flushConsumerOffsetInterval": "mqtemplate.broker.flush-consumer-offset-interval-ms",
    "flushDiskType": "mqtemplate.broker.flush-disk-type",
    "flushIntervalCommitLog": "mqtemplate.broker.flush-interval-commit-log-ms",
    "mappedFileSizeCommitLog": "mqtemplate.broker.mapped-file-size-commit-log",
    "mappedFileSizeConsumeQueue": "mqtemplate.broker.mapped-file-size-consume-queue",
    "mappedFileSizeTimerLog": "mqtemplate.broker.mapped-file-size-timer-log",
    "maxHashSlotNum": "mqtemplate.broker.max-hash-slot-num",
    "maxIndexNum": "mqtemplate.broker.max-index-num",
    "maxMessageSize": "mqtemplate.broker.max-message-size",
    "messageDelayLevel": "mqtemplate.broker.message-delay-level",
    "recallMessageEnable": "mqtemplate.server.recall-message-enable",
    "storePathRootDir": "mqtemplate.broker.store-path",
    "timerMaxDelaySec": "mqtemplate.broker.timer-max-delay-sec",
    "timerPrecisionMs": "mqtemplate.broker.timer-precision-ms",
    "timerRollWindowSlot": "mqtemplate.broker.timer-roll-window-slot",
    "timerWheelEnable": "mqtemplate.broker.timer-wheel-enable",
    "transactionCheckInterval": "mqtemplate.broker.transaction-check-interval-ms",
    "transactionCheckMax": "mqtemplate.broker.transaction-check-max",
    "transactionTimeOut": "mqtemplate.broker.transaction-timeout-ms",
}
_ADDRESS_KEYS = ("bindAddress", "listenPort", "brokerIP1")
_DEFAULT_PORT = "10911"
_NAME_SERVER_PORT = "9876"

_PLACES = {
    # key of RocketMQ -> place in the store directory, the only one here
    "abortFile": "abort",
    "storeCheckpoint": "checkpoint",
    "storePathCommitLog": "commitlog",
    "storePathConsumeQueue": "consumequeue",
    "storePathIndex": "index",
}
_ALLOWED = {
    # key of RocketMQ -> allowed values, and what to do about another one: to ignore it would be dangerous
    "brokerId": (("0",), "this broker has no replicas, so it is no replica itself; remove the key"),
    "brokerRole": (
        ("ASYNC_MASTER", "SYNC_MASTER"),
        "this broker has no replicas, so it is no replica itself; remove the key",
    ),
    "brokerPermission": (("6",), "limit the rights of accounts instead: mqtemplate.server.acl in application.yml"),
    "aclEnable": (("false",), "set mqtemplate.server.acl in application.yml, and remove the key"),
    "authenticationEnabled": (("false",), "set mqtemplate.server.acl in application.yml, and remove the key"),
    "authorizationEnabled": (("false",), "set mqtemplate.server.acl in application.yml, and remove the key"),
    "useTLS": (("false",), "set mqtemplate.server.tls in application.yml, and remove the key"),
}


@dataclass(frozen=True, slots=True)
class BrokerConf:
    """Content of a property file.

    Attributes:
        root: The keys that act here, as `load_settings` takes them.
        without_meaning: Key of RocketMQ that means nothing here -> reason.
    """

    root: ConfigNode
    without_meaning: Mapping[str, str] = field(default_factory=dict)


def read_broker_conf(file: Path) -> BrokerConf:
    """Read a property file of RocketMQ's broker.

    Raises:
        ConfigurationError: The file cannot be read, or has unknown keys, or values that cannot be honoured; the error
            lists all with their lines.
    """
    # As in Java the last one of several entries wins.
    entries = {entry.key: entry for entry in read_property_file(file) if entry.value}  # an empty one is not given
    problems = [
        f"{file.name}:{entry.line}: {problem}"
        for entry in entries.values()
        if (problem := _problem(entry, entries)) is not None
    ]
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigurationError("\n  ".join([f"{file} is not usable: {count}", *problems]))
    root = ConfigNode()
    for name, key in _KEYS.items():
        if name in entries:
            entry = entries[name]
            root.put(tuple(key.split(".")), _value(entry), f"{file.name}:{entry.line}")
    _put_addresses(root, entries, file.name)
    acting = {*_KEYS, *_ADDRESS_KEYS, *_PLACES}
    return BrokerConf(root, {name: reason_for(name) for name in entries if name not in acting})


def _problem(entry: PropertyEntry, entries: Mapping[str, PropertyEntry]) -> str | None:
    """Return why an entry cannot be honoured; None if it can, or means nothing here."""
    name, value = entry.key, entry.value
    if name not in KNOWN_NAMES:
        return f"{name} is no key of RocketMQ's broker; {did_you_mean(name, KNOWN_NAMES, 'remove it')}"
    if name in _ALLOWED and value not in _ALLOWED[name][0]:
        allowed, advice = _ALLOWED[name]
        return f"{name} must be {' or '.join(allowed)}, got {value!r}: {advice}"
    if name in _PLACES and "storePathRootDir" in entries:
        place = _folder(entries["storePathRootDir"].value) / _PLACES[name]
        if _folder(value) != place:
            return (
                f"{name} must be {place}, got {value!r}: all files of a store are in storePathRootDir; remove the key"
            )
    elif name in _PLACES:
        return (
            f"{name} is set without storePathRootDir; set that, the directory of the whole store, and remove this key"
        )
    return None


def _value(entry: PropertyEntry) -> str:
    if entry.key == "storePathRootDir":
        return str(_folder(entry.value))
    return entry.value.lower() if entry.value in ("True", "False", "TRUE", "FALSE") else entry.value


def _folder(text: str) -> PurePath:
    """Return a path with the variables that RocketMQ's example files use: ``${user.home}`` and ``$HOME``."""
    if "${user.home}" in text or "$HOME" in text:
        home = str(home_folder(text, "write the path without it"))
        text = text.replace("${user.home}", home).replace("$HOME", home)
    return PurePath(os.path.normpath(text))


def _put_addresses(root: ConfigNode, entries: Mapping[str, PropertyEntry], file: str) -> None:
    """Set the addresses. An address for other machines opens the listener sockets to them, as in RocketMQ."""
    given = {name: entries[name] for name in _ADDRESS_KEYS if name in entries}
    if not given:
        return
    line = min(entry.line for entry in given.values())
    origin = f"{file}:{line}"
    port = given["listenPort"].value if "listenPort" in given else _DEFAULT_PORT
    advertised = given["brokerIP1"].value if "brokerIP1" in given else None
    is_for_others = advertised is not None and not _is_loopback(advertised)
    ip = given["bindAddress"].value if "bindAddress" in given else ("0.0.0.0" if is_for_others else "127.0.0.1")
    server = ("mqtemplate", "server")
    root.put((*server, "listen"), _address(ip, port), origin)
    if advertised is not None:
        root.put((*server, "advertise"), _address(advertised, port), origin)
    if is_for_others:
        root.put((*server, "name-server"), _address(ip, _NAME_SERVER_PORT), origin)


def _is_loopback(ip: str) -> bool:
    try:
        return ipaddress.ip_address(ip).is_loopback
    except ValueError:  # the check of the setting reports it
        return False


def _address(ip: str, port: str) -> str:
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"
