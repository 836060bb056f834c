"""Package for executors: the modules that tasks need, as one zip for ``--py-files`` or ``addPyFile``.

Tasks read, write, list pending messages, and run listeners over Spark Connect. Executors need numpy and pyarrow, and
nothing else of this library's dependencies.
"""

from __future__ import annotations

import ast
import importlib.util
import py_compile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from py_compile import PycInvalidationMode
from tempfile import TemporaryDirectory

_ROOT = Path(__file__).resolve().parents[3]
_STARTS = (
    "mqtemplate.spark.reader.source",
    "mqtemplate.spark.location.cluster",
    # Imported by name, where one is used:
    "mqtemplate.spark.sink.writer",
    "mqtemplate.spark.pending.reader",
    "mqtemplate.spark.location.connection",
    "mqtemplate.spark.listening.connect",
)
_COPIED = "annotated_types"  # a small module, which the settings of brokers import
_STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)
_FIXED_TIME = (1980, 1, 1, 0, 0, 0)  # equal modules are an equal zip


def write_package(path: Path) -> Path:
    """Write the zip, and return its path. Equal modules give equal bytes."""
    with zipfile.ZipFile(path, "w") as archive, TemporaryDirectory() as folder:
        compiled = Path(folder, "module.pyc")
        for name, file in [*_own_files(), *_copied_files()]:
            # Python uses the compiled form if it is of its own version, and compiles the source otherwise.
            py_compile.compile(str(file), str(compiled), name, invalidation_mode=PycInvalidationMode.UNCHECKED_HASH)
            for entry, data in ((name, file.read_bytes()), (f"{name}c", compiled.read_bytes())):
                archive.writestr(zipfile.ZipInfo(entry, _FIXED_TIME), data, zipfile.ZIP_DEFLATED)
    return path


def _own_files() -> Iterator[tuple[str, Path]]:
    for file in package_files():
        yield file.relative_to(_ROOT).as_posix(), file


def _copied_files() -> Iterator[tuple[str, Path]]:
    spec = importlib.util.find_spec(_COPIED)
    assert spec is not None
    assert spec.origin is not None
    yield f"{_COPIED}/__init__.py", Path(spec.origin)


def package_files() -> list[Path]:
    """Return the modules that a task imports, also those that it imports when they are used, with their packages."""
    found: dict[str, Path] = {}
    open_names = list(_STARTS)
    while open_names:
        name = open_names.pop()
        file = _file_of(name)
        if file is None or name in found:
            continue
        found[name] = file
        open_names += [name.rpartition(".")[0], *_imports(file)]
    return sorted(found.values())


def _file_of(name: str) -> Path | None:
    package, *rest = name.split(".")
    if package != "mqtemplate":
        return None
    base = _ROOT.joinpath(package, *rest)
    return next((file for file in (base.with_suffix(".py"), base / "__init__.py") if file.is_file()), None)


def _imports(file: Path) -> Iterator[str]:
    """Yield the modules that a module imports, except those that it needs for types only."""
    for node in _running(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _running(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all statements outside of ``if TYPE_CHECKING``."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, _STATEMENTS):  # most nodes are expressions
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        yield node
        yield from _running(node)
