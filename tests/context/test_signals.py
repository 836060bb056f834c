"""Ctrl-C and SIGTERM, in separate processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from textwrap import dedent

import pytest

from mqtemplate.context.signals import StopRequests
from tests.programs import environment

LONG_S = 60

PROGRAM = """
    import asyncio, sys
    from mqtemplate import MQApplication, RocketMQTemplate
    from mqtemplate_starter_embedded import EmbeddedAutoConfiguration

    def show(text):
        print(text, flush=True)

    class Service:
        def on_start(self): show("started")
        def on_stop(self): show("stopping"); HANG and sys.stdin.read()
        def close(self): show("closed")

    def main(service: Service):
        show("main"); sys.stdin.read()

    async def async_main(service: Service):
        show("main"); await asyncio.Event().wait()

    app = MQApplication(Service, settings={"rocketmq.name-server": "embedded:memory",
        "mqtemplate.logging.enabled": False}, starters=[EmbeddedAutoConfiguration])
    class Ready(type(app.is_ready)):
        def set(self): super().set(); show("ready")
    app.is_ready = Ready()
    app.run(MAIN)
    show("returned")
    """


class Program:
    """A running program and its output."""

    def __init__(self, *, main: str = "None", hang: bool = False) -> None:
        text = dedent(PROGRAM).replace("MAIN", main).replace("HANG", str(hang))
        self.process = subprocess.Popen(
            [sys.executable, "-c", "import logging; logging.disable()\n" + text],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )

    def read_until(self, wanted: str) -> list[str]:
        assert self.process.stdout is not None
        lines = []
        for line in self.process.stdout:
            lines.append(line.strip())
            if line.strip() == wanted:
                return lines
        raise AssertionError(f"the program ended without {wanted!r}: {lines}")

    def end(self) -> tuple[list[str], int]:
        out, _ = self.process.communicate(timeout=LONG_S)
        ours = {"started", "stopping", "closed", "returned", "main"}
        return [line for line in out.splitlines() if line in ours], self.process.returncode


@pytest.fixture
def program(request: pytest.FixtureRequest) -> Iterator[Program]:
    running = Program(**getattr(request, "param", {}))
    yield running
    running.process.kill()
    running.process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_an_application_in_order(program: Program, number: signal.Signals) -> None:
    program.read_until("ready")

    program.process.send_signal(number)

    assert program.end() == (["stopping", "closed", "returned"], 0)


@pytest.mark.parametrize("program", [{"main": "main"}, {"main": "async_main"}], indirect=True)
def test_a_signal_interrupts_main_and_stops_in_order(program: Program) -> None:
    """An ``async def`` main is cancelled."""
    program.read_until("main")

    program.process.send_signal(signal.SIGINT)

    assert program.end() == (["stopping", "closed", "returned"], 0)


@pytest.mark.parametrize("program", [{"main": "async_main, keep_running=True"}], indirect=True)
def test_a_signal_ends_an_application_that_runs_on_after_an_async_main(program: Program) -> None:
    program.read_until("main")

    program.process.send_signal(signal.SIGTERM)

    assert program.end() == (["stopping", "closed", "returned"], 0)


@pytest.mark.parametrize("program", [{"hang": True}], indirect=True)
def test_a_second_signal_ends_the_process_at_once(program: Program) -> None:
    """A stop that hangs does not keep the process alive."""
    program.read_until("ready")
    program.process.send_signal(signal.SIGINT)
    program.read_until("stopping")

    program.process.send_signal(signal.SIGINT)

    assert program.process.wait(LONG_S) == -signal.SIGINT


def test_after_the_first_signal_the_kernel_ends_the_process_at_the_second() -> None:
    """A handler in Python would run only after a blocking call, if the signal arrives just before the call starts."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    requests = StopRequests()

    with requests.from_signals():
        signal.raise_signal(signal.SIGTERM)
        after = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    assert requests.wait() == "SIGTERM"
    assert after == [signal.SIG_DFL, signal.SIG_DFL]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="this system does not mask signals of one thread")
def test_a_signal_ends_a_wait_that_it_does_not_interrupt() -> None:
    """It is as if it arrived just before the main thread waits. Python calls the handler after the wait, if nothing
    wakes the thread."""
    begins = threading.Event()

    def interrupt() -> None:
        begins.wait()
        os.kill(os.getpid(), signal.SIGINT)

    def wait() -> None:
        begins.set()
        threading.Event().wait(LONG_S)

    other = threading.Thread(target=interrupt)
    other.start()
    requests = StopRequests()
    with requests.from_signals():
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # the other thread gets it
        try:
            with requests.interrupting(), pytest.raises(KeyboardInterrupt):
                wait()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    other.join()
    assert requests.signalled
