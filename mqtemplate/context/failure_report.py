"""Report of a failed start, in place of a traceback, for a process that the application or the command line owns.

::

    ***************************
    APPLICATION FAILED TO START
    ***************************

    What        ListenerError: on_order: parameter 'order' has no type
    Where       /srv/shop/listeners.py, line 12
    What to do  annotate it with the type to convert the body to: str, bytes, dict, …

    MQTEMPLATE_DEBUG=1 or --debug shows the traceback.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType
from typing import TextIO

from mqtemplate.errors import ConfigurationError, DependencyError, ListenerError, MQTemplateError, escaped
from mqtemplate.event_log import get_logger
from mqtemplate.processes import discard_output, write_text

_log = get_logger("mqtemplate.context")

DEBUG_VARIABLE = "MQTEMPLATE_DEBUG"
DEBUG_OPTION = "--debug"

_LIBRARY = Path(__file__).parents[1]
_NOT_USERS = (_LIBRARY, Path(os.__file__).parent)
_STARTERS = "mqtemplate_starter_"
_TITLE = "APPLICATION FAILED TO START"
_IN_FILE = re.compile(r"(\S+\.(?:ya?ml|toml|conf|properties|env)):(\d+)")
_HINT = f"{DEBUG_VARIABLE}=1 or {DEBUG_OPTION} shows the traceback."
_ADVICE: dict[type[BaseException], str] = {
    ConfigurationError: "correct it there; docs/configuration.md lists every key",
    DependencyError: "see docs/architecture/context.md for what can be injected",
    ListenerError: "correct it there; docs/architecture/listener.md describes listeners",
}


def is_debug() -> bool:
    """Return True if the user wants the traceback: by the environment, or by an option of the program."""
    value = os.environ.get(DEBUG_VARIABLE, "").lower()
    return value not in ("", "0", "false", "no", "off") or DEBUG_OPTION in sys.argv[1:]


@contextmanager
def reported_failures(stream: TextIO | None = None) -> Iterator[None]:
    """Print a report of an exception inside the block and end the process with exit code 1.

    Args:
        stream: By default standard error.

    Raises:
        SystemExit: Something failed.
        Exception: Something failed, and the user wants the traceback.
    """
    try:
        yield
    except Exception as exc:
        if is_debug():
            raise
        print_report(exc, stream or sys.stderr)
        raise SystemExit(1) from exc


def without_library_frames(error: MQTemplateError) -> MQTemplateError:
    """Return the error of a start, with a traceback of the application's own lines. The debug log has the whole one.

    Nothing is left out if the user wants the traceback; see `is_debug`.
    """
    _log.debug("application.start_failed", exc_info=error)
    if not is_debug():
        each: BaseException | None = error
        seen: set[int] = set()  # an application may have linked exceptions in a circle
        while each is not None and id(each) not in seen:
            seen.add(id(each))
            each.__traceback__ = _of_application(each.__traceback__)
            each = each.__cause__ or each.__context__
    return error


def _of_application(frames: TracebackType | None) -> TracebackType | None:
    if frames is None:
        return None
    later = _of_application(frames.tb_next)
    file = Path(frames.tb_frame.f_code.co_filename)
    if _LIBRARY in file.parents or "dependency_injector" in file.parts:
        return later
    return TracebackType(later, frames.tb_frame, frames.tb_lasti, frames.tb_lineno)


def print_report(error: BaseException, stream: TextIO | None) -> None:
    """Write the report; a character that the stream cannot show is escaped.

    Without a stream that takes it the report is lost, and the exit code stays: the error of the stream would hide the
    one of the application from those who catch it.
    """
    try:
        write_text(failure_report(error), stream)
    except OSError as exc:
        error.add_note(f"the report of this error could not be written: {exc}")
        discard_output(stream)


def failure_report(error: BaseException, caller: FrameType | None = None) -> str:
    """Return the report of a failed start: what happened, where, and what to do.

    Args:
        caller: Frame from which to search the user's code if the error does not point to it.
    """
    what, advice = _split(error)
    paragraphs = [("What", what), ("Where", _where(error, caller or sys._getframe(1))), ("What to do", advice)]
    notes = getattr(error, "__notes__", ())
    if notes:
        paragraphs.append(("Also", "\n".join(map(str, notes))))
    stars = "*" * len(_TITLE)
    body = "\n".join(_paragraph(title, text) for title, text in paragraphs if text)
    return f"\n{stars}\n{_TITLE}\n{stars}\n\n{body}\n\n{_HINT}\n"


def _split(error: BaseException) -> tuple[str, str]:
    """Return what happened and what to do. The library's errors end with the advice; see `split_advice`."""
    name, text = type(error).__name__, _text(error)
    if not isinstance(error, MQTemplateError):
        return f"{name}: {text}" if text else name, ""
    fallback = next((advice for kind, advice in _ADVICE.items() if isinstance(error, kind)), "")
    if "\n" in text:
        return f"{name}: {text}", fallback
    what, advice = split_advice(text)
    return f"{name}: {what}", advice or fallback


def _text(error: BaseException) -> str:
    try:
        return escaped(str(error), keep="\n\t")
    except Exception as exc:  # an exception of the application, whose text is code of the application
        return f"<the text of this exception cannot be read: its __str__ raises {type(exc).__name__}>"


def split_advice(text: str) -> tuple[str, str]:
    """Return an error text without its advice, and the advice: the end after the last semicolon outside of brackets."""
    depth, start = 0, -1
    for at, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth <= 0 and text.startswith("; ", at):
            start = at
    return (text, "") if start < 0 else (text[:start], text[start + 2 :])


def _where(error: BaseException, caller: FrameType) -> str:
    """Return file and line: of the configuration, of the component, or of the user's code that ran last."""
    if (found := _IN_FILE.search(_text(error))) is not None:
        return f"{Path(found[1]).absolute()}, line {found[2]}"
    if isinstance(error, MQTemplateError) and error.source is not None:
        return error.source
    frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    outer = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_stack(caller)]
    place = next((each for each in reversed([*outer, *frames]) if is_of_application(each[0])), None)
    return "" if place is None else f"{place[0]}, line {place[1]}"


@cache
def is_of_application(file: str) -> bool:
    """Return True for a file of the user's program: not of this library, of Python, or of an installed package."""
    path = Path(file)
    is_installed = "site-packages" in path.parts or any(part.startswith(_STARTERS) for part in path.parts)
    return path.is_file() and not is_installed and not {*_NOT_USERS} & {*path.parents}


def _paragraph(title: str, text: str) -> str:
    return f"{title:<12}" + f"\n{' ' * 12}".join(text.splitlines())
