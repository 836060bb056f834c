"""Location of the broker that the options of a read or a write name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mqtemplate.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerLocation:
    """Location of a broker: the folder of an embedded one, or the name servers of a cluster."""

    store: str | None = None
    name_server: str | None = None

    @classmethod
    def of_options(cls, options: Mapping[str, str]) -> BrokerLocation:
        """Return the location in options with lower-case names: ``store`` (or ``path``), or ``nameserver``.

        Raises:
            ConfigurationError: None of them is given, or both are.
        """
        if "store" in options and "path" in options:
            raise ConfigurationError("options 'store' and 'path' contradict each other; give one of them")
        store, name_server = options.get("store", options.get("path")), options.get("nameserver")
        if (store is None) == (name_server is None):
            raise ConfigurationError(
                "give either option 'store', the folder of an embedded broker on this machine, or option 'nameServer', "
                "such as 'localhost:9876'"
            )
        return cls(store=store, name_server=name_server)
