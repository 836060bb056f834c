"""Code and data of applications and peers: exceptions that no rule covers, objects whose text fails, hostile text."""

from __future__ import annotations

import difflib
import functools
import re
import signal
import threading
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from types import CodeType, TracebackType
from typing import Any, TypeVar

__all__ = [
    "Picklable",
    "did_you_mean",
    "error_text",
    "escaped",
    "is_interrupt",
    "nearest",
    "reworded",
    "safe_text",
    "shown",
    "traceback_of",
    "type_name",
]

E = TypeVar("E", bound=BaseException)

_MAX_TEXT = 2_000
_MAX_SHOWN = 200
_MAX_BITS = 4_096
_TRACEBACK = BaseException.__dict__["__traceback__"]

_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f"  # control characters, among them those that start commands of a terminal
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # they change the direction of the text around them
    "\u200b\u2028\u2029\u2060-\u2064\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"  # separators, invisible characters
    "\ud800-\udfff]"  # lone surrogates, which no stream can write
)


# --- exceptions -----------------------------------------------------------------------------------


def is_interrupt(error: BaseException) -> bool:
    """Return True if a signal raised an exception, such as Ctrl-C: it ends the process, not the call that it hit.

    Application code may raise ``KeyboardInterrupt`` and ``SystemExit`` too, and then they are errors of that code.
    Python runs signal handlers in the main thread only, and their frames are in the traceback. The default handler of
    Ctrl-C has no frame, since it is written in C: its exception comes from an instruction that is no ``raise``.
    """
    if issubclass(type(error), Exception) or threading.current_thread() is not threading.main_thread():
        return False
    handlers = {code for number in signal.valid_signals() if (code := _code_of(signal.getsignal(number))) is not None}
    # Not `error.__traceback__`: the class of an application may have a property of that name.
    last, trace = None, _TRACEBACK.__get__(error)
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            return True
        last, trace = trace, trace.tb_next
    if last is None or not issubclass(type(error), KeyboardInterrupt):
        return False
    import dis  # only needed here

    instruction: str = dis.opname[last.tb_frame.f_code.co_code[last.tb_lasti]]
    return instruction != "RAISE_VARARGS"


def _code_of(handler: Any) -> CodeType | None:
    while isinstance(handler, functools.partial):  # asyncio.run installs one
        handler = handler.func
    code = getattr(getattr(handler, "__func__", handler), "__code__", None)
    return code if isinstance(code, CodeType) else None


class Picklable(Exception):  # noqa: N818 (a base class of errors and of requests of handlers)
    """Exception that can be copied, and pickled for another process, whatever its constructor takes."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what a pickle contains. An exception is otherwise rebuilt as ``Class(*args)``, which may not fit."""
        return _rebuilt, (type(self), self.args), self.__dict__ or None


def _rebuilt(kind: type[BaseException], args: tuple[object, ...]) -> BaseException:
    error = kind.__new__(kind)
    error.args = args
    return error


def reworded(error: E, text: str) -> E:
    """Return the same error with another text. Its class may be one of the user, with a constructor of its own."""
    twin = copy(error)
    twin.args = (text,)
    return twin


# --- texts ----------------------------------------------------------------------------------------


def _as_python(char: str) -> str:
    return repr(char)[1:-1]


def escaped(text: str, *, keep: str = "", escape: Callable[[str], str] = _as_python) -> str:
    """Return a text without characters that a terminal obeys, that hide, or that no stream can write.

    Args:
        keep: Characters that stay, such as line feed and tab.
        escape: Returns what stands for such a character.
    """
    if text.isprintable():
        return text
    return _UNSAFE.sub(lambda found: found[0] if found[0] in keep else escape(found[0]), text)


def shown(value: object) -> str:
    """Return a value that a caller gave, as an error text shows it: as Python writes it, cut after 200 characters.

    `repr` does not serve: a number of more than 4,300 digits has none, and the one of a class of the caller may raise.
    """
    if type(value) is int and value.bit_length() > _MAX_BITS:
        return f"a{' negative' if value < 0 else ''} number of {value.bit_length():,} bits"
    # A body may have megabytes.
    text = safe_text(value[: _MAX_SHOWN + 1] if isinstance(value, str | bytes) else value, _MAX_SHOWN + 1, repr)
    return f"{text[:_MAX_SHOWN]}…" if len(text) > _MAX_SHOWN else text


def safe_text(value: object, limit: int = _MAX_TEXT, read: Callable[[object], str] = str) -> str:
    """Return an object of the application as text, at most *limit* characters, also if its ``__str__`` raises.

    Args:
        read: `repr` for that text.
    """
    try:
        return read(value)[:limit]
    except BaseException as error:
        if is_interrupt(error):
            raise
        return f"<unprintable {type_name(value)}>"


def error_text(error: BaseException, limit: int = _MAX_TEXT) -> str:
    """Return the class and the text of an exception, as ``LookupError: no such order``. It never raises."""
    return f"{type_name(error)}: {safe_text(error, limit)}"


def type_name(value: object, attribute: str = "__name__") -> str:
    """Return the name of the class of an object, also if its metaclass has a property of that name.

    Args:
        attribute: ``__qualname__`` for that name.
    """
    name: str = type.__dict__[attribute].__get__(type(value))
    return name


def traceback_of(error: BaseException) -> TracebackType | None:
    """Return the traceback of an exception, also if its class has a property of that name."""
    found: TracebackType | None = _TRACEBACK.__get__(error)
    return found


# --- hints in error texts -------------------------------------------------------------------------


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the known name that is most similar to *name*; None if none is similar.

    Args:
        cutoff: Smallest similarity, from 0 to 1 for equal names.
    """
    return next(iter(difflib.get_close_matches(name, list(known), 1, cutoff)), None)


def did_you_mean(
    name: str, known: Iterable[str], otherwise: str = "", *, written: Mapping[str, str] | None = None
) -> str:
    """Return the hint "did you mean …?" with the nearest known name.

    Args:
        otherwise: Text to return if no known name is similar.
        written: Known name -> the form in which the hint shows it.
    """
    found = nearest(name, known)
    if found is None:
        return otherwise
    return f"did you mean {(found if written is None else written[found])!r}?"
