"""Code and data of applications and peers: exceptions that no rule covers, and objects whose text fails."""

from __future__ import annotations

import difflib
import functools
import signal
import threading
from collections.abc import Callable, Iterable, Mapping
from types import CodeType, TracebackType
from typing import Any

__all__ = [
    "did_you_mean",
    "error_text",
    "is_interrupt",
    "nearest",
    "safe_text",
    "shown",
    "traceback_of",
    "type_name",
]

_MAX_TEXT = 2_000
_MAX_SHOWN = 200
_MAX_BITS = 4_096
_TRACEBACK = BaseException.__dict__["__traceback__"]

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


# --- texts ----------------------------------------------------------------------------------------


def shown(value: object) -> str:
    """Return a value that a caller gave, as an error text shows it: as Python writes it, cut after 200 characters.

    `repr` does not serve: it raises for a number of more than 4,300 digits, and a class of the caller may raise, too.
    """
    if type(value) is int and value.bit_length() > _MAX_BITS:
        return f"a{' negative' if value < 0 else ''} number of {value.bit_length():,} bits"
    # A body may have megabytes.
    text = safe_text(value[: _MAX_SHOWN + 1] if isinstance(value, str | bytes) else value, _MAX_SHOWN + 1, repr)
    return f"{text[:_MAX_SHOWN]}…" if len(text) > _MAX_SHOWN else text


def safe_text(value: object, limit: int = _MAX_TEXT, read: Callable[[object], str] = str) -> str:
    """Return an object of the application as text, at most *limit* characters, also if its ``__str__`` raises.

    Args:
        read: `repr` for the representation.
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
        attribute: ``__qualname__`` for the qualified name.
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
    """Return the hint "did you mean …?" with the nearest known name, which never reads as *name* itself.

    Args:
        otherwise: Text to return if no known name is similar.
        written: Known name -> the form in which the hint shows it.
    """
    shown_as = {each: each if written is None else written[each] for each in known}
    found = nearest(name, [each for each, text in shown_as.items() if text != name])
    return otherwise if found is None else f"did you mean {shown_as[found]!r}?"
