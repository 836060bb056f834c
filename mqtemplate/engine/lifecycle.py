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
    """

    def __init__(self, name: str, place: str) -> None:
        self._name = name
        self._owner_text = f"broker {name!r} ({place}), with the templates and consumers that use it,"
        self._owner = OwnerProcess(self._owner_text)
        self.is_open = False

    def begin(self) -> None:
        """Belong to this process from now on."""
        self._owner = OwnerProcess(self._owner_text)

    @property
    def is_in_owner(self) -> bool:
        """True in the process that started the engine."""
        return self._owner.is_current

    def check_owner(self) -> None:
        """Raise `ForkedError` if the parent process has started the engine."""
        self._owner.check()

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
        if getpid() != self._owner.pid:  # not `check_owner`: each send comes here
            raise self._owner.error()
