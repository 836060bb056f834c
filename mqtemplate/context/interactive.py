"""Applications of an interactive session: a cell of a notebook that runs again replaces its application.

Running a cell again binds the name ``app`` to a new application. The old one would continue, with its threads and the
lock of its folder, and nothing would refer to it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Hashable
from dataclasses import dataclass
from types import FrameType
from typing import Any, Generic, TypeVar

_App = TypeVar("_App")


@dataclass(frozen=True, slots=True)
class CellSource:
    """The code in an interactive session that created an application.

    Attributes:
        function: Module and qualified name of the function, ``<module>`` outside of functions.
        cell: Id of the cell of the notebook; None if there are no cells, or the editor does not send their ids.
        execution: Number of the input: applications of one execution do not replace each other.
    """

    function: str
    cell: str | None
    execution: int | None


def source_of(frame: FrameType) -> CellSource | None:
    """Return the source of an application that *frame* creates; None outside of interactive sessions."""
    ipython = sys.modules.get("IPython")  # never imported here
    shell: Any = None if ipython is None else ipython.get_ipython()
    if shell is None and not hasattr(sys, "ps1"):
        return None
    parent = {} if shell is None or not hasattr(shell, "get_parent") else shell.get_parent()
    cell = parent.get("metadata", {}).get("cellId")
    function = f"{frame.f_globals.get('__name__')}:{frame.f_code.co_qualname}"
    return CellSource(function, cell, getattr(shell, "execution_count", None))


class InteractiveApplications(Generic[_App]):
    """The running applications of an interactive session, by their source.

    The id of the cell is the source, together with the function that creates the application: the cell may be edited.
    Without an id, the components and the broker have to be the same.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: list[tuple[CellSource, Hashable, _App]] = []

    def add(self, source: CellSource, content: Hashable, app: _App) -> None:
        """Note an application that runs.

        Args:
            content: Its components and its broker.
        """
        with self._lock:
            self._running.append((source, content, app))

    def remove(self, app: _App) -> None:
        """Forget an application that stops."""
        with self._lock:
            self._running = [entry for entry in self._running if entry[2] is not app]

    def replaced_by(self, source: CellSource, content: Hashable) -> list[_App]:
        """Return the applications that earlier executions of the same source started, the last one first."""
        with self._lock:
            return [
                app
                for other, other_content, app in reversed(self._running)
                if (other.function, other.cell) == (source.function, source.cell)
                and (source.execution is None or other.execution != source.execution)
                and (source.cell is not None or other_content == content)
            ]
