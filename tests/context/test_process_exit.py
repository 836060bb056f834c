"""The end of a process whose application is not in ``run``: handlers finish, and their messages are committed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from textwrap import dedent, indent

import pytest

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.message import MessageQueue

ROOT = Path(__file__).parents[2]
LONG_S = 60

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


def start_program(text: str, folder: Path) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "starters")])
    return subprocess.Popen(
        [sys.executable, "-c", "import logging; logging.disable()\n" + text, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )


def read_until(process: subprocess.Popen[str], wanted: str) -> list[str]:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line.strip())
        if lines[-1] == wanted:
            return lines
    raise AssertionError(f"the program ended without {wanted!r}: {lines}, {process.communicate()[1]}")


@pytest.mark.parametrize("form", ["app.start()", "with app:"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_handlers_finish_and_their_messages_are_committed(tmp_path: Path, form: str, ending: str) -> None:
    last_line, code = ENDINGS[ending]
    body = dedent(BODY) + last_line
    text = f"{dedent(PROGRAM)}\n{form}\n{indent(body, '    ') if form.startswith('with') else body}\n"
    process = start_program(text, tmp_path)
    try:
        read_until(process, "main")
        if ending.startswith("SIG"):
            process.send_signal(signal.Signals[ending])
        out, err = process.communicate(timeout=LONG_S)
    finally:
        process.kill()

    assert "handled" in out
    assert process.returncode == code, err
    assert ("RuntimeError: main" in err) == (ending == "raises")
    with EmbeddedBroker(tmp_path) as broker:
        assert broker.committed_offset("billing", MessageQueue("orders", broker.name, 0)) == 1


def test_a_second_sigterm_ends_the_process_at_once(tmp_path: Path) -> None:
    """A handler that hangs does not keep the process alive."""
    hanging = dedent(PROGRAM).replace("stopping.wait()", "threading.Event().wait()")
    hanging = hanging.replace("stopping.set()", 'show("stopping")')
    process = start_program(f"{hanging}\napp.start()\n{dedent(BODY)}\nthreading.Event().wait()\n", tmp_path)
    try:
        read_until(process, "main")
        process.send_signal(signal.SIGTERM)
        read_until(process, "stopping")

        process.send_signal(signal.SIGTERM)

        assert process.wait(LONG_S) == -signal.SIGTERM
    finally:
        process.kill()
        process.communicate()


def test_a_handler_of_the_program_for_sigterm_stays(tmp_path: Path) -> None:
    """A web server, for example, stops the application itself."""
    text = dedent(PROGRAM) + dedent("""
        def on_term(number, frame):
            show("own handler")
            sys.exit(0)
        signal.signal(signal.SIGTERM, on_term)
        app.start()
        """)
    process = start_program(f"{text}\n{dedent(BODY)}\nthreading.Event().wait()\n", tmp_path)
    try:
        read_until(process, "main")
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=LONG_S)
    finally:
        process.kill()

    assert (out.split(), process.returncode) == (["own", "handler", "handled"], 0)


def test_a_stopped_application_leaves_the_default_for_sigterm(tmp_path: Path) -> None:
    text = dedent(PROGRAM) + dedent("""
        with app:
            show("handler" if callable(signal.getsignal(signal.SIGTERM)) else "default")
        show("handler" if callable(signal.getsignal(signal.SIGTERM)) else "default")
        """)
    process = start_program(text, tmp_path)

    out, err = process.communicate(timeout=LONG_S)

    assert out.split() == ["handler", "default"], err


def test_a_forked_child_stops_nothing(tmp_path: Path) -> None:
    """The child ends by SIGTERM as any process, and its exit handlers leave the files of the parent alone."""
    text = dedent(PROGRAM) + dedent("""
        app.start()
        stopping.set()
        child = os.fork()
        if child == 0:
            sys.exit(0)
        show(f"exit {os.waitpid(child, 0)[1]}")
        child = os.fork()
        if child == 0:
            threading.Event().wait()
        os.kill(child, signal.SIGTERM)
        show(f"signal {os.waitpid(child, 0)[1]}")
        app.template.sync_send("orders", "1")
        handling.wait()
        """)
    process = start_program(text, tmp_path)

    out, err = process.communicate(timeout=LONG_S)

    assert out.splitlines() == ["exit 0", f"signal {int(signal.SIGTERM)}", "handling", "handled"], err
    assert process.returncode == 0
