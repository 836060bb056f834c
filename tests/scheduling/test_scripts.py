"""Golden scripts: the runs of schedules on a virtual clock, in one process or several."""

from __future__ import annotations

import contextlib
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from mqtemplate import CatchUp, MQApplication, ScheduledRun, Schedules, VirtualClock, scheduled
from mqtemplate.broker import Broker, Capability
from mqtemplate.brokers.embedded.broker import EmbeddedBroker
from mqtemplate.durations import duration_ms, format_ms
from mqtemplate.engine.settings import EmbeddedSettings
from mqtemplate.errors import MQTemplateError
from mqtemplate.scheduling.discovery import make_schedules
from mqtemplate.scheduling.topic import SHORT_STEP_MS, RunMessage, find_run_key
from mqtemplate.testing.harness import Harness
from tests.golden import check_script, scripts_in
from tests.kit import IN_MEMORY

SCRIPTS = scripts_in(Path(__file__).parent / "scripts")
NAMES = {each.__name__: each for each in (CatchUp, EmbeddedSettings, date, datetime, timedelta)} | {"UTC": UTC}


class Always:
    """A calendar that excludes everything."""

    def __contains__(self, day: object) -> bool:
        return True


class Commands:
    """Processes with one schedule each, ``report``, over one broker at 2026-01-01T00:00:00Z.

    A line of a run: its time, the process if it is not the first, how late it is, its attempt, ``manual``, its outcome.
    """

    def __init__(self, undo: contextlib.ExitStack) -> None:
        self._undo = undo

    def broker(self, *missing: str, settings: str = "EmbeddedSettings()") -> None:
        """Open a broker, perhaps without capabilities; everything before is stopped."""
        self._undo.close()
        clock = VirtualClock()
        self._broker = self._undo.enter_context(EmbeddedBroker(None, eval(settings, dict(NAMES)), clock=clock))
        self._broker.capabilities -= {Capability[name] for name in missing}
        self._apps: dict[str, MQApplication] = {}
        self._runs: list[str] = []

    def process(
        self, name: str = "one", *without: str, fails: str = "False", enabled: str = "True", **arguments: str
    ) -> list[str]:
        """Start a process with a schedule; ``bare``: without one. Print why that is refused.

        Args:
            fails: Expression of the run that is True for one that fails.
        """

        def report(run: ScheduledRun) -> None:
            has_failed = eval(fails, {"run": run})
            words = [run.scheduled_at.strftime("%m-%d %H:%M"), *([] if name == "one" else [name])]
            words += [f"late {format_ms(run.late // timedelta(milliseconds=1))}"] if run.late else []
            words += [f"attempt {run.attempt}"] if run.attempt > 1 else []
            self._runs.append(" ".join([*words, *["manual"] * run.is_manual, *["failed"] * has_failed]))
            if has_failed:
                raise OSError("the printer is out of paper")

        given: dict[str, Any] = {key: eval(text, NAMES | {"Always": Always}) for key, text in arguments.items()}
        try:
            self._function: Any = scheduled(**{"name": "report", **given})(report) if "bare" not in without else None
            settings = IN_MEMORY | {"mqtemplate.schedules.enabled": eval(enabled)}
            parts = [] if self._function is None else [self._function]
            app = MQApplication(
                *parts, settings=settings, environment={}, starters=[], overrides={Broker: self._broker}
            )
            self._undo.callback(app.stop)
            app.start()
        except MQTemplateError as error:
            return [f"{type(error).__name__}: {error}"]
        self._apps[name] = app
        return []

    def stop(self, name: str = "one") -> None:
        self._apps.pop(name).stop()

    def advance(self, span: str) -> list[str]:
        """Let time pass, and print the runs."""
        containers = [container for app in self._apps.values() for container in app.containers]
        Harness(self._broker, *containers, raise_handler_errors=False).advance(span)
        printed, self._runs = self._runs, []
        return printed

    def move(self, span: str) -> None:
        """Move the clock alone."""
        self._broker.clock.move_ms(duration_ms(span))  # type: ignore[attr-defined]

    def _schedules(self, process: str) -> Schedules:
        return self._apps[process].get(Schedules)

    def list(self, process: str = "one") -> list[str]:
        """Print the schedules that a process knows."""
        return [
            f"{state.name}: {state.trigger}, next {state.next_run:%m-%d %H:%M}, paused until {state.paused_until}"
            for state in self._schedules(process).list()
        ] or ["none"]

    def pending(self) -> list[str]:
        """Print the number of messages of the next runs."""
        return [f"{len(self._schedules('one').topic.pending('report'))}"]

    def again(self) -> None:
        """Send the pending message of the next run again, as a second process that starts at once does."""
        topic = self._schedules("one").topic
        key = find_run_key(topic.pending("report")[0].keys)
        assert key is not None
        topic.send(RunMessage.of_run("report", key.run_ms, make_schedules(self._function)[0].trigger, 0))

    def in_steps(self, span: str) -> None:
        """Send the first of the short steps towards a run, as a process of an older version does."""
        now_ms = self._broker.clock.now_ms()
        trigger = make_schedules(self._function)[0].trigger
        request = RunMessage.of_run("report", now_ms + duration_ms(span), trigger, now_ms)
        self._schedules("one").topic.send(request.in_steps(now_ms, SHORT_STEP_MS))

    def control(self, verb: str, name: str = "report", process: str = "one", until: str = "") -> list[str]:
        """Pause, resume or trigger a schedule."""
        options = {"until": eval(until, dict(NAMES))} if until else {}
        try:
            getattr(self._schedules(process), verb)(name, **options)
        except MQTemplateError as error:
            return [f"{type(error).__name__}: {error}"]
        return []


@pytest.mark.feature("X17")
@pytest.mark.parametrize("script", SCRIPTS, ids=[path.stem for path in SCRIPTS])
def test_a_schedule_runs_as_the_script_says(script: Path) -> None:
    with contextlib.ExitStack() as undo:
        check_script(script, Commands(undo))
