"""Location of the broker that the options of a read or a write name, with access key and TLS settings for a cluster."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mqtemplate.errors import ConfigurationError
from mqtemplate.processes import absolute_path

ACCESS_KEY, SECRET_KEY = "MQTEMPLATE_ACCESS_KEY", "MQTEMPLATE_SECRET_KEY"
SECURITY_TOKEN, TRUST_CERT_PATH = "MQTEMPLATE_SECURITY_TOKEN", "MQTEMPLATE_TLS_TRUST_CERT_PATH"
CLIENT_FILE = "MQTEMPLATE_CLIENT_FILE"
"""Environment variables of the driver, or of the executors if the driver has none."""

_KEYS = {"accessKey": "access-key", "secretKey": "secret-key", "securityToken": "security-token"}
"""Option with a secret -> its key in a client file."""
CLIENT_OPTIONS = ("clientFile", *_KEYS, "addressMap")
"""Options with the access of a client to a cluster, and with the addresses of its brokers."""

PATH = {"path": "store"}
"""Name in lower case that Spark's file sources have for the folder -> our name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerLocation:
    """Location of a broker: the folder of an embedded one, from the root, or the name servers of a cluster.

    Attributes:
        store: Folder, from the root: a task runs in another process. None for a cluster.
        name_servers: Addresses of a cluster, ``host:port``; empty for a folder.
        client_file: File with access key and TLS settings for the cluster; None for the environment.
        client: Content of such a file, from the options, the file or the environment of the driver: executors need none
            of them. None: the driver has nothing, and each machine uses its own.
        address_map: Entries of an `AddressMap`, for the driver and all executors.
    """

    store: str | None = None
    name_servers: tuple[str, ...] = ()
    client_file: str | None = None
    client: str | None = field(default=None, repr=False)
    address_map: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of_options(cls, given: Mapping[str, str]) -> BrokerLocation:
        """Return the location in options: ``store``, or ``nameServer`` and perhaps ``clientFile``.

        Raises:
            ConfigurationError: None of them is given, or both are; or the access key is incomplete, or for no cluster,
                or in a file that cannot be read; or the address map is none.
        """
        if "store" in given and "nameServer" in given:
            raise ConfigurationError("options 'store' and 'nameServer' contradict each other; give one of them")
        if "store" not in given and "nameServer" not in given:
            raise ConfigurationError(
                "option 'store' is missing: give the folder of an embedded broker on this machine, or the name servers "
                "of a cluster as 'nameServer', such as 'localhost:9876'"
            )
        for name in CLIENT_OPTIONS:
            if name in given and "nameServer" not in given:
                raise ConfigurationError(f"option {name!r} needs the option 'nameServer'")
        if "store" in given:
            return cls(store=str(absolute_path(given["store"])))
        names, client_file = _addresses(given["nameServer"]), given.get("clientFile")
        keys = {_KEYS[name]: given[name] for name in _KEYS if name in given}
        if keys and not {"access-key", "secret-key"} <= keys.keys():
            raise ConfigurationError("give both options 'accessKey' and 'secretKey', or none of them")
        client = _with_keys(read_client(client_file)[0], keys)
        return cls(
            name_servers=names,
            client_file=client_file,
            client=json.dumps(client) if client else None,
            address_map=_address_map(given["addressMap"]) if "addressMap" in given else (),
        )

    def options(self) -> dict[str, str]:
        """Return the options of a read or a write that name this location."""
        if self.store is not None:
            return {"store": self.store}
        found = {"nameServer": ";".join(self.name_servers)}
        if self.client_file is not None:
            found["clientFile"] = self.client_file
        if self.address_map:
            found["addressMap"] = json.dumps(dict(self.address_map))
        return found

    def __str__(self) -> str:
        return f"cluster at {';'.join(self.name_servers)}" if self.store is None else f"store {self.store!r}"


def _addresses(text: str) -> tuple[str, ...]:
    addresses = tuple(part.strip() for part in re.split("[;,]", text) if part.strip())
    if not addresses or not all(re.fullmatch(r".+:\d+", address) for address in addresses):
        raise ConfigurationError(f"option nameServer={text!r}: give host:port, several joined by ';'")
    return addresses


def _address_map(text: str) -> tuple[tuple[str, str], ...]:
    from mqtemplate.remoting.sockets import AddressMap  # a folder does without sockets

    try:
        given = json.loads(text)
        if not isinstance(given, dict) or not all(isinstance(reached, str) for reached in given.values()):
            raise ConfigurationError("it is no JSON object with texts")
        AddressMap(given)
    except (ValueError, ConfigurationError) as exc:
        raise ConfigurationError(
            f"option addressMap={text!r}: {exc}; write the addresses that brokers register, and those at which driver "
            'and executors reach them, as JSON: {"172.18.*": "10.0.0.5:{port}"}'
        ) from exc
    return tuple(given.items())


def refuse_secrets(options: Mapping[str, str]) -> None:
    """Refuse a secret in the options of a table of the catalog, which keeps and shows them.

    Raises:
        ConfigurationError: There is one.
    """
    given = {name.lower().removeprefix("option.") for name in options}
    for name in sorted(_KEYS, reverse=True):  # accessKey last, which is no secret
        if name.lower() in given:
            raise ConfigurationError(
                f"option {name!r} would be stored in the catalog, for all to see; leave it out of the table, and set "
                f"{ACCESS_KEY} and {SECRET_KEY}, or name a clientFile"
            )


# --- client files ----------------------------------------------------------------------------------

_FILE_KEYS = (*_KEYS.values(), "tls")


def read_client(path: str | None) -> tuple[dict[str, Any], str]:
    """Return the access key and the TLS settings of this machine as a client file has them, and where they are from.

    Args:
        path: The file of the option ``clientFile``; None for the environment.

    Raises:
        ConfigurationError: The file is missing or damaged, or a key is unknown or missing.
    """
    path = path or os.environ.get(CLIENT_FILE)
    if path is not None:
        given, where = _read(Path(path)), f"{path} on {socket.gethostname()}"
    else:
        names = zip(_KEYS.values(), (ACCESS_KEY, SECRET_KEY, SECURITY_TOKEN), strict=True)
        given = {key: os.environ[name] for key, name in names if os.environ.get(name)}
        where = f"the environment of {socket.gethostname()} ({ACCESS_KEY}, {SECRET_KEY})"
        if os.environ.get(TRUST_CERT_PATH):
            given["tls"] = {"trust-cert-path": os.environ[TRUST_CERT_PATH]}
    refuse_unknown(given, _FILE_KEYS, f"{where}: key ")
    if ("access-key" in given) != ("secret-key" in given):
        raise ConfigurationError(f"{where} has only one of access-key and secret-key; give both, or none")
    return given, where


def _read(path: Path) -> dict[str, Any]:
    where = f"client file {str(path)!r} on {socket.gethostname()}"
    try:
        given = json.loads(path.read_text("utf-8-sig"))
    except OSError as exc:
        raise ConfigurationError(
            f"{where} cannot be read ({exc.strerror}); the driver reads it, so give a path from the root that it has"
        ) from exc
    except ValueError as exc:
        raise ConfigurationError(f"{where} is not JSON ({exc})") from exc
    if not isinstance(given, dict):
        raise ConfigurationError(f"{where} is not a JSON object; its keys are {', '.join(_FILE_KEYS)}")
    return given


def refuse_unknown(given: Any, known: Sequence[str], where: str) -> None:
    """Refuse a key that a client file does not have.

    Raises:
        ConfigurationError: There is one, or *given* has no keys.
    """
    unknown = sorted(set(given) - set(known)) if isinstance(given, dict) else [given]
    if unknown:
        raise ConfigurationError(f"{where}{unknown[0]!r} is unknown; known are {', '.join(known)}")


def _with_keys(given: dict[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    """Return the content of a client file with the keys of the options, and with paths from the root."""
    found = {**({"tls": given["tls"]} if "tls" in given else {}), **keys} if keys else dict(given)
    if isinstance(found.get("tls"), dict):
        found["tls"] = {
            name: str(absolute_path(value)) if name.endswith("-path") and value else value
            for name, value in found["tls"].items()
        }
    return found
