"""Rules for every test: no foreign settings, no deadlines, all log events, distribution over processes, skips."""

from __future__ import annotations

import gc
import logging
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.thirds import QUICK_EXAMPLES
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from xdist.scheduler import LoadFileScheduling

# A property that holds slowly on a busy machine holds all the same. So does one whose examples are drawn slowly.
settings.register_profile("mqtemplate", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", settings.get_profile("mqtemplate"), max_examples=QUICK_EXAMPLES)
settings.load_profile("mqtemplate")


_LONG = ("conformance", "spark", "slow", "thorough")
_SHARED = ("tests/spark/", "tests/conformance/")
"""Folders whose tests share a Spark session, or programs of RocketMQ. Each process that runs some starts its own."""


def pytest_configure(config: pytest.Config) -> None:
    """Settings of the developer's shell must not reach the applications that tests start."""
    if "not thorough" in config.option.markexpr:
        settings.load_profile("quick")
    gc.disable()  # until the tests are collected: that creates millions of objects, and they all stay
    for name in [name for name in os.environ if name.startswith(("MQTEMPLATE_", "ROCKETMQ_"))]:
        del os.environ[name]
    # Changes by commands are logged there, and not in the log of the developer.
    folder = tempfile.TemporaryDirectory(prefix="mqtemplate-state-")
    config.add_cleanup(folder.cleanup)
    os.environ["XDG_STATE_HOME"] = folder.name
    # A shell starts a program in the background with SIGINT ignored, and its children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Every event of the library reaches pytest, which shows them for a test that fails.
    logging.getLogger("mqtemplate").setLevel(logging.DEBUG)


@pytest.fixture
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Delete hours are local time. In these tests that is UTC, where the virtual clock starts at midnight."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.hookimpl(optionalhook=True)  # the quick tests run without pytest-xdist too
def pytest_xdist_auto_num_workers() -> int:
    """Return three workers more than there are processors: tests that wait for other processes need none."""
    return (os.cpu_count() or 1) + 3


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadFileScheduling | None:
    """Run the tests of a file in one process, and of a folder of `_SHARED`."""
    from xdist.scheduler import LoadFileScheduling

    class ByFileOrFolder(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            folders = (folder for folder in _SHARED if nodeid.startswith(folder))
            return next(folders, super()._split_scope(nodeid))

    return ByFileOrFolder(config, log) if config.getvalue("dist") == "loadfile" else None


def multiply_limits(items: list[pytest.Item], factor: int) -> None:
    """Multiply the limits of tests, which are guards against hanging, for a slow machine."""
    for item in items:
        marker = item.get_closest_marker("timeout")
        limit_s = marker.args[0] if marker is not None else float(item.config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(limit_s * factor), append=False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move folders of one process, then files with long tests to the front, for an even end. Skip what cannot run."""
    if PATIENCE_S > 60:
        multiply_limits(items, PATIENCE_S // 60)
    long_files = {item.path for item in items if any(marker.name in _LONG for marker in item.iter_markers())}
    items.sort(key=lambda item: (not item.nodeid.startswith(_SHARED), item.path not in long_files))
    spark_tests = [item for item in items if item.get_closest_marker("spark")]
    reason = _why_not_spark() if spark_tests else None
    if reason:
        for item in spark_tests:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Leave the collected tests out of later garbage collections: passing over them took a third of the collection."""
    gc.freeze()
    gc.enable()


def _why_not_spark() -> str | None:
    from mqtemplate.errors import SparkError
    from mqtemplate.spark.driver.jvm import find_java
    from mqtemplate.spark.driver.sessions import require_pyspark

    try:
        require_pyspark()
        find_java()
    except SparkError as error:
        return str(error)
    return None
