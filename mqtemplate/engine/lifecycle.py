"""The life of an engine: whether it is open, and in which process."""

from __future__ import annotations

from os import getpid

from mqtemplate.errors import BrokerClosedError
from mqtemplate.processes import OwnerProcess


class EngineLifecycle:
    """State of an engine: open or not, and its process. The parts check it at each call of a user.

    Args:
        name: Name of the broker.
        place: Where it stores messages, for the error in a forked process.

    Attributes:
        is_open: True between start and close.
        owner: The process that started the engine.
    """

    def __init__(self, name: str, place: str) -> None:
        self._name = name
        self._owner_text = f"broker {name!r} ({place}), with the templates and consumers that use it,"
        self.owner = OwnerProcess(self._owner_text)
        self.is_open = False

    def begin(self) -> None:
        """Belong to this process from now on."""
        self.owner = OwnerProcess(self._owner_text)

    def check(self) -> None:
        """Check that the engine is open.

        Raises:
            BrokerClosedError: It is not running.
            ForkedError: The parent process has started it.
        """
        if not self.is_open:
            raise BrokerClosedError(
                f"broker {self._name!r} is not running; call start() first, or use it in a with block"
            )
        if getpid() != self.owner.pid:  # not `owner.check`: each send comes here
            raise self.owner.error()
