"""Sessions for golden scripts: lines of Python, and what they return or raise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mqtemplate.errors import MQTemplateError

_SHOWN_ERRORS = (MQTemplateError, TypeError, ValueError, KeyboardInterrupt)


class Session:
    """``show`` runs lines of Python. Each may be an expression or a statement; a value is printed, unless it is None.

    Args:
        names: What the lines may use.
    """

    def __init__(self, names: Mapping[str, Any]) -> None:
        self.names = dict(names)

    def show(self, text: str) -> Iterator[str]:
        """Run lines, and print what they return or raise."""
        for line in text.splitlines():
            try:
                shown = self._run(line)
            except _SHOWN_ERRORS as error:
                yield f"{type(error).__name__}: {error}"
            else:
                if shown is not None:
                    yield f"{shown!r}"

    def _run(self, line: str) -> object:
        try:
            code = compile(line, "script", "eval")
        except SyntaxError:
            exec(line, self.names)
            return None
        return eval(code, self.names)
