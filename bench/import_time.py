"""Processor time and memory of imports, beside FastStream's, Celery's and Dramatiq's, and what the pytest plugin adds.

Each import runs in a process of its own that reads bytecode; the interpreter's start is not counted. In each of some
turns all take part, so that a slow moment of the machine hits all alike; the least of the turns counts. The libraries
that the application is built on are measured alone too: the sum of two imports is more than both together.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.measure import report, run
from bench.peer.fresh_process import FreshProcesses, fresh_processes, install_peers, peers_python

_TURNS = 9
_MEASURE = """
import json, sys, time
start = time.process_time()
{statement}
seconds = time.process_time() - start
heavy = [name for name in {heavy!r} if name in sys.modules]
fields = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps([seconds, int(fields["VmHWM"].split()[0]) / 1024, heavy]))
"""
_HEAVY = [
    "numpy",
    "dependency_injector",
    "pydantic_settings",
    "structlog",
    "rich",
    "pyspark",
    "mqtemplate.brokers.remote.broker",
]
_OWN = "import mqtemplate"
_APPLICATION = "  and the name of an application"
_BASE = "import pydantic, dependency_injector.providers, structlog alone"
_IMPORTS = {
    # name -> statement of this environment
    _OWN: "import mqtemplate",
    _APPLICATION: "from mqtemplate import MQApplication",
    "  and the names of a listener and of an application": "from mqtemplate import MQApplication, message_listener",
    "  and all public names": "from mqtemplate import *",
    "import pydantic alone": "import pydantic; pydantic.BaseModel",
    "import dependency_injector.providers alone": "import dependency_injector.providers",
    "import structlog alone": "import structlog",
    _BASE: "import pydantic, dependency_injector.providers, structlog; pydantic.BaseModel",
    "import numpy alone": "import numpy",
}
_PEER_IMPORTS = {
    "import faststream": "import faststream",
    "import faststream.nats": "import faststream.nats",
    "import celery; celery.Celery": "import celery; celery.Celery",
    "import dramatiq": "import dramatiq",
}
_TARGETS = {_OWN: "0.12 s, 35 MB", _APPLICATION: "0.35 s"}


def main() -> None:
    problem = install_peers()
    if problem:
        print(f"The peers are missing: {problem}")
    imports = {name: (sys.executable, statement) for name, statement in _IMPORTS.items()}
    if not problem:
        imports |= {name: (peers_python(), statement) for name, statement in _PEER_IMPORTS.items()}
    results: dict[str, list[tuple[float, float, list[str]]]] = {name: [] for name in imports}
    with fresh_processes() as processes:
        for _ in range(_TURNS + 1):  # the first turn writes the bytecode and is not counted
            for name, (python, statement) in imports.items():
                results[name].append(measure(processes, python, statement))
    seconds = {name: min(each for each, _, _ in rounds[1:]) for name, rounds in results.items()}
    for name, rounds in results.items():
        report(name, seconds[name], "s CPU", _TARGETS.get(name, "-"))
        report("    resident", statistics.median(mib for _, mib, _ in rounds[1:]), "MiB", _TARGETS.get(name, "-"))
        if heavy := rounds[-1][2]:
            print(f"    loaded: {', '.join(heavy)}")
    report("an application's name, as a share of the three libraries", seconds[_APPLICATION] / seconds[_BASE], "", "-")
    for setting in ("", "1"):
        title = "a pytest run without our fixtures: the plugin adds" + (", bytecode not written" if setting else "")
        report(title, plugin_cost(setting), "s", "0.05")


def measure(processes: FreshProcesses, python: str, statement: str) -> tuple[float, float, list[str]]:
    output = processes.output_of(python, _MEASURE.format(statement=statement, heavy=_HEAVY))
    seconds, mib, heavy = json.loads(output)
    return seconds, mib, heavy


def plugin_cost(dont_write_bytecode: str) -> float:
    """Seconds that the plugin adds to ``pytest`` on one empty test: the median of the differences of pairs."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "test_nothing.py").write_text("def test_nothing(): pass\n")
        environment = os.environ | {"PYTHONDONTWRITEBYTECODE": dont_write_bytecode}
        environment.pop("PYTEST_ADDOPTS", None)

        def seconds(*options: str) -> float:
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, "test_nothing.py"]
            start = time.perf_counter()
            subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=True)
            return time.perf_counter() - start

        seconds()
        return statistics.median(seconds() - seconds("-p", "no:mqtemplate") for _ in range(_TURNS))


if __name__ == "__main__":
    run(main)
