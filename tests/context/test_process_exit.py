"""The end of a process whose application is not in ``run``: handlers finish, and their messages are committed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from textwrap import dedent, indent
from threading import Timer
from typing import Self

import pytest

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.message import MessageQueue
from tests.programs import environment

LONG_S = 60

QUIET = """
import signal, structlog
structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background ignores SIGINT for its children
"""
PROGRAM = """
    import os, signal, sys, threading
    from mqtemplate import MQApplication, message_listener

    def show(text):
        os.write(1, (text + "\\n").encode())

    handling, stopping = threading.Event(), threading.Event()

    @message_listener(topic="orders", consumer_group="billing")
    def bill(message: str):
        show("handling")
        handling.set()
        stopping.wait()
        show("handled")

    app = MQApplication(bill, settings={
        "rocketmq.name-server": "embedded:" + sys.argv[1],
        "rocketmq.consumer.await-termination-millis-when-shutdown": 60_000,
        "mqtemplate.broker.default-topic-queue-nums": 1,
        "mqtemplate.logging.enabled": False})

    class Ready(type(app.is_ready)):
        def clear(self):  # the stop has begun: the handler finishes in the time for it
            super().clear()
            stopping.set()
    app.is_ready = Ready()
"""
BODY = """
    app.template.sync_send("orders", "1")
    handling.wait()
    show("main")
    """
ENDINGS = {
    "returns": ("pass", 0),
    "raises": ("raise RuntimeError('main')", 1),
    "exits": ("sys.exit(3)", 3),
    "SIGTERM": ("threading.Event().wait()", 128 + signal.SIGTERM),
    "SIGINT": ("threading.Event().wait()", -signal.SIGINT),
}


class Program:
    """A running program and its output; the end of the context ends it."""

    def __init__(self, text: str, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", QUIET + text, str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        self._guard = Timer(LONG_S, self.process.kill)  # against hanging, not a measurement

    def __enter__(self) -> Self:
        self._guard.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._guard.cancel()
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()

    def read_until(self, wanted: str) -> None:
        assert self.process.stdout is not None
        lines = []
        for line in self.process.stdout:
            lines.append(line.strip())
            if lines[-1] == wanted:
                return
        raise AssertionError(f"the program ended without {wanted!r}: {lines}, {self.end()[1]}")

    def end(self) -> tuple[list[str], str]:
        """Wait for the end; return the other lines of its output, and its errors."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        # Not `communicate`: it would miss what `read_until` has read beyond its line.
        out, err = self.process.stdout.read().splitlines(), self.process.stderr.read()
        self.process.wait()
        return out, err


@pytest.mark.parametrize("form", ["app.start()", "with app:"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_handlers_finish_and_their_messages_are_committed(tmp_path: Path, form: str, ending: str) -> None:
    last_line, code = ENDINGS[ending]
    body = dedent(BODY) + last_line
    text = f"{dedent(PROGRAM)}\n{form}\n{indent(body, '    ') if form.startswith('with') else body}\n"
    with Program(text, tmp_path) as program:
        program.read_until("main")
        if ending.startswith("SIG"):
            program.process.send_signal(signal.Signals[ending])
        out, err = program.end()

    assert out == ["handled"]
    assert program.process.returncode == code, err
    assert ("RuntimeError: main" in err) == (ending == "raises")
    with EmbeddedBroker(tmp_path) as broker:
        assert broker.groups.committed_offset("billing", MessageQueue("orders", broker.name, 0)) == 1


def test_the_end_of_the_main_thread_stops_an_application_that_runs_in_a_daemon_thread(tmp_path: Path) -> None:
    start = "threading.Thread(target=app.run, daemon=True).start()\napp.is_ready.wait()"
    with Program(f"{dedent(PROGRAM)}\n{start}\n{dedent(BODY)}\n", tmp_path) as program:
        program.read_until("main")
        out, err = program.end()

    assert (out, program.process.returncode) == (["handled"], 0), err
    with EmbeddedBroker(tmp_path) as broker:
        assert broker.groups.committed_offset("billing", MessageQueue("orders", broker.name, 0)) == 1


def test_a_second_sigterm_ends_the_process_at_once(tmp_path: Path) -> None:
    """A handler that hangs does not keep the process alive."""
    hanging = dedent(PROGRAM).replace("stopping.wait()", "threading.Event().wait()")
    hanging = hanging.replace("stopping.set()", 'show("stopping")')
    with Program(f"{hanging}\napp.start()\n{dedent(BODY)}\nthreading.Event().wait()\n", tmp_path) as program:
        program.read_until("main")
        program.process.send_signal(signal.SIGTERM)
        program.read_until("stopping")

        program.process.send_signal(signal.SIGTERM)

        assert program.process.wait(LONG_S) == -signal.SIGTERM


def test_a_handler_of_the_program_for_sigterm_stays(tmp_path: Path) -> None:
    """A web server, for example, stops the application itself."""
    text = dedent(PROGRAM) + dedent("""
        def on_term(number, frame):
            show("own handler")
            sys.exit(0)
        signal.signal(signal.SIGTERM, on_term)
        app.start()
        """)
    with Program(f"{text}\n{dedent(BODY)}\nthreading.Event().wait()\n", tmp_path) as program:
        program.read_until("main")
        program.process.send_signal(signal.SIGTERM)
        out, _ = program.end()

    assert (out, program.process.returncode) == (["own handler", "handled"], 0)


def test_a_stopped_application_leaves_the_default_for_sigterm(tmp_path: Path) -> None:
    text = dedent(PROGRAM) + dedent("""
        with app:
            show("handler" if callable(signal.getsignal(signal.SIGTERM)) else "default")
        show("handler" if callable(signal.getsignal(signal.SIGTERM)) else "default")
        """)
    with Program(text, tmp_path) as program:
        out, err = program.end()

    assert out == ["handler", "default"], err


def test_a_forked_child_stops_nothing(tmp_path: Path) -> None:
    """The child ends by SIGTERM as any process, and its exit handlers leave the files of the parent alone."""
    text = dedent(PROGRAM) + dedent("""
        app.start()
        stopping.set()
        child = os.fork()
        if child == 0:
            sys.exit(0)
        show(f"exit {os.waitpid(child, 0)[1]}")
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(write_end, b"1")
            threading.Event().wait()
        os.read(read_end, 1)  # Python drops signals that arrive before the fork is complete
        os.kill(child, signal.SIGTERM)
        show(f"signal {os.waitpid(child, 0)[1]}")
        app.template.sync_send("orders", "1")
        handling.wait()
        """)
    with Program(text, tmp_path) as program:
        out, err = program.end()

    assert out == ["exit 0", f"signal {int(signal.SIGTERM)}", "handling", "handled"], err
    assert program.process.returncode == 0
