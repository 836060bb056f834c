"""Standard streams that are missing, closed, full, in ASCII, or objects of another program: nothing dies of them."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from mqtemplate.cli.main import main
from mqtemplate.cli.output import Output, print_line
from mqtemplate.context.failure_report import print_report, reported_failures
from mqtemplate.context.logging import configure_logging, show_events
from mqtemplate.context.settings.features import LoggingSettings
from mqtemplate.errors import MessageError
from mqtemplate.event_log import get_logger
from mqtemplate.processes import is_terminal, write_text
from tests.programs import environment, run, run_python


class _Bare:
    """What some notebooks, editors and web servers put in the place of a stream."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text


class _Odd(_Bare):
    encoding = 7

    def isatty(self) -> bool:
        raise ValueError("closed")


class _Failing(_Bare):
    def write(self, text: str) -> None:
        raise RuntimeError("no kernel")


def _closed() -> io.TextIOWrapper:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    stream.close()
    return stream


_STREAMS: dict[str, Any] = {
    "none": lambda: None,
    "closed": _closed,
    "bare": _Bare,
    "odd": _Odd,
    "failing": _Failing,
    "ascii": lambda: io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict"),
    "no encoding": io.StringIO,
    "unknown encoding": type("Unknown", (_Bare,), {"encoding": "klingon"}),
}
streams = pytest.mark.parametrize("stream", _STREAMS.values(), ids=_STREAMS)


@streams
def test_the_report_of_a_failed_start_ends_the_process_with_its_exit_code(
    stream: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stream())

    with pytest.raises(SystemExit) as ended, reported_failures():
        raise MessageError("prix élevé \ud800")

    assert ended.value.code == 1
    assert isinstance(ended.value.__cause__, MessageError)


@streams
def test_a_line_of_the_command_line_is_shown_or_lost(stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", stream())
    monkeypatch.setattr(sys, "stderr", stream())

    print_line("prix élevé \ud800")
    print_line("prix élevé \ud800", sys.stderr)
    Output(as_json=True).note("prix élevé")
    with Output(as_json=False).progress("work", 3) as step:
        step(1)
    assert main(["--version"]) == 0
    assert main(["topics", "-n", "embedded:/no/such/folder/é"]) == 1


@streams
def test_a_log_line_is_shown_or_lost(stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream())
    for configure in (show_events, configure_logging):
        undo = configure(LoggingSettings())
        try:
            get_logger("mqtemplate.test").warning("test.happened", text="prix élevé \ud800")
        finally:
            undo()


def test_what_a_stream_cannot_show_is_escaped() -> None:
    ascii_stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    bare, odd = _Bare(), _Odd()

    write_text("é \ud800\n", ascii_stream)
    for stream in (bare, odd):
        write_text("é \ud800\n", stream)

    assert ascii_stream.buffer.getvalue() == b"\\xe9 \\ud800\n"
    assert (bare.text, odd.text) == ("é \\ud800\n", "é \\ud800\n")
    assert not any(map(is_terminal, (None, bare, odd, _closed())))


def test_an_exception_whose_text_raises_is_reported() -> None:
    class _SilentError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    stream = io.StringIO()
    print_report(_SilentError(), stream)

    assert (
        "_SilentError: <the text of this exception cannot be read: its __str__ raises RuntimeError>"
        in stream.getvalue()
    )


def test_an_error_does_not_go_to_standard_output_when_standard_error_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program that reads the results would take it for one of them."""
    monkeypatch.setattr(sys, "stderr", None)

    assert main(["topics", "-n", "embedded:/no/such/folder"]) == 1
    assert capsys.readouterr().out == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_result_that_is_lost_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with open("/dev/full", "w") as full:  # noqa: PTH123 (a device)
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as ended:
            Output(as_json=True).document({"a": 1})

    assert ended.value.code == 1
    assert capsys.readouterr().err == "error: standard output cannot be written: No space left on device\n"


_PROGRAM = """
import os, signal, sys, threading
class Bare:
    def write(self, text): pass
    def flush(self): pass
kind, keys = sys.argv[1], json.loads(sys.argv[2])
if kind == "none": sys.stderr = sys.stdout = None
if kind == "closed": sys.stderr.close()
if kind == "bare": sys.stderr = sys.stdout = Bare()
from mqtemplate import MQApplication
app = MQApplication(settings={"rocketmq.name-server": "embedded:memory", **keys})
def stop():
    app.is_ready.wait()
    os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=stop, daemon=True).start()
app.run()
"""


@pytest.mark.parametrize("kind", ["none", "closed", "bare"])
@pytest.mark.parametrize(("keys", "code"), [({}, 0), ({"rocketmq.name-servre": "x"}, 1)], ids=["valid", "invalid"])
def test_an_application_runs_without_standard_streams(
    tmp_path: Path, kind: str, keys: dict[str, str], code: int
) -> None:
    """As a daemon, under pythonw, in a notebook: it starts, stops, and an invalid one ends with code 1."""
    (tmp_path / "app.py").write_text("import json\n" + _PROGRAM)

    ended = run_python(tmp_path, "app.py", kind, json.dumps(keys))

    assert ended.returncode == code


def test_the_command_line_works_with_closed_descriptors(tmp_path: Path) -> None:
    """``mqtemplate … >&- 2>&-``, as cron jobs and init scripts may call it."""
    command = f'"{sys.executable}" -m mqtemplate'
    script = f"{command} init shop >&- 2>&- <&-; echo $?; {command} topics -n embedded:none >&- 2>&-; echo $?"

    ended = run(["sh", "-c", script], tmp_path, environment())

    assert ended.stdout.split() == ["0", "1"]
    assert (tmp_path / "shop" / "app.py").exists()
