"""File in a store directory by which other processes of this user find the server of its owner."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from mqtemplate.errors import StoreError
from mqtemplate.processes import write_private

_FILE = Path("config", "localServer.json")


@dataclass(frozen=True, slots=True)
class LocalServerAddress:
    """Contents of ``config/localServer.json``: how processes of the same user reach the owner of the folder.

    Other users of the machine may connect to the address too, and cannot read the file: without its key the server
    answers nothing.

    Attributes:
        address: Address that answers requests of a name server.
        access_key: Account with all rights, which the owner created for itself.
        process_id: The owner. Its end leaves the file behind if it was killed.
    """

    address: str
    access_key: str
    process_id: int
    secret_key: str = field(repr=False)

    @classmethod
    def read(cls, store: Path | str) -> LocalServerAddress | None:
        """Return the address in a store folder; None if no server runs."""
        try:
            values = json.loads(Path(store, _FILE).read_text())
            return cls(**{name: values[name] for name in cls.__dataclass_fields__})
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError) as exc:
            raise StoreError(
                f"{Path(store, _FILE)} cannot be read ({exc}); delete it, and start its server again"
            ) from exc

    @staticmethod
    def remove(store: Path) -> None:
        """Remove the file."""
        (store / _FILE).unlink(missing_ok=True)

    def write(self, store: Path) -> None:
        """Write the file, readable by this user only: the key gives all rights to the broker."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        write_private(store / _FILE, json.dumps(values).encode())
