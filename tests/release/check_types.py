"""mypy, pyright, pyrefly and ty over the examples, as a project that has installed the wheel: ``make types``."""

from __future__ import annotations

import json
import shutil
import sys
import sysconfig
from pathlib import Path
from time import monotonic

from tests.release.environments import BUILD, ROOT, CheckFailedError, build_wheel, check_origin, run, step

TOOLS = ROOT / "build" / "check"
"""Environment of the type checkers, from the lock ``check``; make creates it."""

MYPY = """\
[mypy]
strict = true

# These have no types of their own.
[mypy-celery.*,django.*,pyarrow.*]
ignore_missing_imports = true
"""


def installed_wheel(folder: Path) -> Path:
    """Return the Python of an environment with the wheel, and with the other packages of ``.venv``.

    The packages come by a path file, which is not followed further: so the editable install of the clone stays hidden.
    """
    run(sys.executable, "-m", "venv", "--clear", "--without-pip", folder)
    inside = folder / "bin" / "python"
    wheel = build_wheel(folder / "dist")
    pip = ("-m", "pip", "--python", inside, "--disable-pip-version-check", "install", "--quiet")
    run(sys.executable, *pip, "--no-deps", "--no-index", wheel)
    site = run(inside, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    Path(site, "develop.pth").write_text(sysconfig.get_path("purelib") + "\n", "utf-8")
    return inside


def check_types() -> None:
    """Run each type checker over the examples, and those with types tests over the tests of types.

    Raises:
        CheckFailedError: One reports an error.
    """
    started = monotonic()
    folder = BUILD / "types"
    inside = installed_wheel(folder / "environment")
    project = folder / "project"
    shutil.rmtree(project, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__", "*.ipynb")
    shutil.copytree(ROOT / "examples", project / "examples", ignore=ignored)
    shutil.copytree(ROOT / "tests" / "typing", project / "typed", ignore=ignored)
    check_origin(inside, project)
    stubs = run(TOOLS / "bin" / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    (project / "mypy.ini").write_text(MYPY, "utf-8")
    settings = {"include": ["examples", "typed"], "extraPaths": [stubs], "typeCheckingMode": "standard"}
    (project / "pyrightconfig.json").write_text(json.dumps(settings), "utf-8")
    paths = {"python-interpreter-path": str(inside), "search-path": [stubs], "project-includes": ["examples", "typed"]}
    settings_of_pyrefly = [f"{name} = {json.dumps(value)}" for name, value in paths.items()]  # TOML, as JSON writes it
    # The project is in a folder that Git ignores.
    (project / "pyrefly.toml").write_text("\n".join([*settings_of_pyrefly, "use-ignore-files = false\n"]), "utf-8")
    step("a wheel, installed beside the packages of .venv", started)
    tools = TOOLS / "bin"
    commands: dict[str, tuple[Path | str, ...]] = {
        "pyright": (tools / "pyright", "--pythonpath", inside),
        "pyrefly": (tools / "pyrefly", "check"),
        "ty": (
            tools / "ty",
            "check",
            "--python",
            inside,
            "--extra-search-path",
            stubs,
            "--no-respect-ignore-files",
            "examples",
        ),
        "mypy --strict": (
            sys.executable,
            "-m",
            "mypy",
            "--python-executable",
            inside,
            "--cache-dir",
            BUILD / "mypy",
            "examples",
            "typed",
        ),
    }
    for name, command in commands.items():
        started = monotonic()
        # The package pyright otherwise asks a registry whether it is the newest one.
        output = run(*command, cwd=project, PYRIGHT_PYTHON_IGNORE_WARNINGS="1")
        lines = [line for line in output.splitlines() if "error" in line.lower() or "passed" in line or "issue" in line]
        step(f"{name}: {lines[-1].strip() if lines else 'no error'}", started)


def main() -> int:
    """Check, and print what failed."""
    try:
        check_types()
    except CheckFailedError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
