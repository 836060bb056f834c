"""Time and memory of imports, beside FastStream's and Celery's, and what the pytest plugin adds to a run.

Each import runs in a process of its own, the interpreter's start not counted; medians of some turns, in which all
take part, so that a slow moment of the machine hits all alike.
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
from bench.peer.python_environment import install, python_of

_PEERS = ("faststream==0.7.8", "celery==5.7.0")
_TURNS = 9
_MEASURE = """
import json, sys, time
start = time.perf_counter()
{statement}
seconds = time.perf_counter() - start
heavy = [name for name in {heavy!r} if name in sys.modules]
fields = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps([seconds, int(fields["VmHWM"].split()[0]) / 1024, heavy]))
"""
_HEAVY = ["numpy", "dependency_injector", "pydantic_settings", "pyspark", "mqtemplate.brokers.remote.broker"]
_IMPORTS = {
    "import mqtemplate": (sys.executable, "import mqtemplate"),
    "  and the names of a listener and of an application": (
        sys.executable,
        "from mqtemplate import MQApplication, message_listener",
    ),
    "  and all public names": (sys.executable, "from mqtemplate import *"),
    "import faststream": (str(python_of("imports")), "import faststream"),
    "import celery; celery.Celery": (str(python_of("imports")), "import celery; celery.Celery"),
}


def main() -> None:
    problem = install("imports", *_PEERS)
    if problem:
        print(f"The peers are missing: {problem}")
    imports = {name: each for name, each in _IMPORTS.items() if each[0] == sys.executable or not problem}
    results: dict[str, list[tuple[float, float, list[str]]]] = {name: [] for name in imports}
    for _ in range(_TURNS + 1):  # the first turn fills the caches of the file system and is not counted
        for name, (python, statement) in imports.items():
            results[name].append(measure(python, statement))
    for name, rounds in results.items():
        target = "0.12 s, 35 MB" if name == "import mqtemplate" else "-"
        report(name, statistics.median(seconds for seconds, _, _ in rounds[1:]), "s", target)
        report("    resident", statistics.median(mib for _, mib, _ in rounds[1:]), "MiB", target)
        if heavy := rounds[-1][2]:
            print(f"    loaded: {', '.join(heavy)}")
    for setting in ("", "1"):
        title = "a pytest run without our fixtures: the plugin adds" + (", bytecode not written" if setting else "")
        report(title, plugin_cost(setting), "s", "0.05")


def measure(python: str, statement: str) -> tuple[float, float, list[str]]:
    code = _MEASURE.format(statement=statement, heavy=_HEAVY)
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    seconds, mib, heavy = json.loads(done.stdout)
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
