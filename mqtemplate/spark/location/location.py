"""Location of the broker that the options of a read or a write name, and the names of what no option may contain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mqtemplate.errors import ConfigurationError
from mqtemplate.processes import absolute_path

ACCESS_KEY, SECRET_KEY = "MQTEMPLATE_ACCESS_KEY", "MQTEMPLATE_SECRET_KEY"
SECURITY_TOKEN, TRUST_CERT_PATH = "MQTEMPLATE_SECURITY_TOKEN", "MQTEMPLATE_TLS_TRUST_CERT_PATH"
CLIENT_FILE = "MQTEMPLATE_CLIENT_FILE"
"""Environment variables of the driver and the executors; `cluster_connection` reads them."""

_ADVICE = f"it would show in plans and logs; set {ACCESS_KEY} and {SECRET_KEY}, or a clientFile"
PATH = {"path": "path"}
"""Spark's name for the folder, in lower case; `BrokerLocation.of_options` refuses it beside ``store``."""
SECRET_OPTIONS = dict.fromkeys(("accesskey", "secretkey", "securitytoken"), _ADVICE)
"""Option in lower case that would contain a secret -> what to do instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerLocation:
    """Location of a broker: the folder of an embedded one, from the root, or the name servers of a cluster.

    Attributes:
        client_file: File on each machine with access key and TLS settings for the cluster; None for the environment.
    """

    store: str | None = None
    name_server: str | None = None
    client_file: str | None = None

    @classmethod
    def of_options(cls, options: Mapping[str, str]) -> BrokerLocation:
        """Return the location in options: ``store`` (or ``path``), or ``nameServer``.

        Raises:
            ConfigurationError: None of them is given, or both are, or a file for a cluster without a cluster.
        """
        if "store" in options and "path" in options:
            raise ConfigurationError("options 'store' and 'path' contradict each other; give one of them")
        store, name_server = options.get("store", options.get("path")), options.get("nameServer")
        if (store is None) == (name_server is None):
            raise ConfigurationError(
                "give either option 'store', the folder of an embedded broker on this machine, or option 'nameServer', "
                "such as 'localhost:9876'"
            )
        if "clientFile" in options and name_server is None:
            raise ConfigurationError("option 'clientFile' needs the option 'nameServer'")
        folder = None if store is None else str(absolute_path(store))
        return cls(store=folder, name_server=name_server, client_file=options.get("clientFile"))
