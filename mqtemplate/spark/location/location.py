"""Location of the broker that the options of a read or a write name, and the names of what no option may contain."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from mqtemplate.errors import ConfigurationError
from mqtemplate.processes import absolute_path

ACCESS_KEY, SECRET_KEY = "MQTEMPLATE_ACCESS_KEY", "MQTEMPLATE_SECRET_KEY"
SECURITY_TOKEN, TRUST_CERT_PATH = "MQTEMPLATE_SECURITY_TOKEN", "MQTEMPLATE_TLS_TRUST_CERT_PATH"
CLIENT_FILE = "MQTEMPLATE_CLIENT_FILE"
"""Environment variables of the driver and the executors; `cluster_connection` reads them."""

_ADVICE = f"it would show in plans and logs; set {ACCESS_KEY} and {SECRET_KEY}, or a clientFile"
SECRET_OPTIONS = dict.fromkeys(("accesskey", "secretkey", "securitytoken"), _ADVICE)
"""Option in lower case that would contain a secret -> what to do instead."""

PATH = {"path": "store"}
"""Name in lower case that Spark's file sources have for the folder -> our name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerLocation:
    """Location of a broker: the folder of an embedded one, from the root, or the name servers of a cluster.

    Attributes:
        store: Folder, from the root: a task runs in another process. None for a cluster.
        name_servers: Addresses of a cluster, ``host:port``; empty for a folder.
        client_file: File on each machine with access key and TLS settings for the cluster; None for the environment.
    """

    store: str | None = None
    name_servers: tuple[str, ...] = ()
    client_file: str | None = None

    @classmethod
    def of_options(cls, given: Mapping[str, str]) -> BrokerLocation:
        """Return the location in options: ``store``, or ``nameServer`` and perhaps ``clientFile``.

        Raises:
            ConfigurationError: None of them is given, or both are, or a file for a cluster without a cluster.
        """
        if "store" in given and "nameServer" in given:
            raise ConfigurationError("options 'store' and 'nameServer' contradict each other; give one of them")
        if "store" not in given and "nameServer" not in given:
            raise ConfigurationError(
                "option 'store' is missing: give the folder of an embedded broker on this machine, or the name servers "
                "of a cluster as 'nameServer', such as 'localhost:9876'"
            )
        if "clientFile" in given and "nameServer" not in given:
            raise ConfigurationError("option 'clientFile' needs the option 'nameServer'")
        if "store" in given:
            return cls(store=str(absolute_path(given["store"])))
        return cls(name_servers=_addresses(given["nameServer"]), client_file=given.get("clientFile"))

    def options(self) -> dict[str, str]:
        """Return the options of a read or a write that name this location."""
        if self.store is not None:
            return {"store": self.store}
        names = {"nameServer": ";".join(self.name_servers)}
        return names if self.client_file is None else {**names, "clientFile": self.client_file}

    def __str__(self) -> str:
        return f"cluster at {';'.join(self.name_servers)}" if self.store is None else f"store {self.store!r}"


def _addresses(text: str) -> tuple[str, ...]:
    addresses = tuple(part.strip() for part in re.split("[;,]", text) if part.strip())
    if not addresses or not all(re.fullmatch(r".+:\d+", address) for address in addresses):
        raise ConfigurationError(f"option nameServer={text!r}: give host:port, several joined by ';'")
    return addresses
