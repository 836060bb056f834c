"""The shape of the house: who may import whom, what is public, how long a thing may be."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]

FLOORS: dict[str, int] = {
    # room -> floor, as docs/architecture/README.md draws them; a package is one room, a file beside it another
    "mqtemplate.errors": 0,
    "mqtemplate.clock": 0,
    "mqtemplate.services": 0,
    "mqtemplate.java_hash": 0,
    "mqtemplate.metrics": 0,
    "mqtemplate.compression": 1,
    "mqtemplate.message": 1,
    "mqtemplate.pending": 1,
    "mqtemplate.results": 1,
    "mqtemplate.selectors.tags": 1,
    "mqtemplate.selectors.sql92": 1,
    "mqtemplate.record.codec": 2,
    "mqtemplate.record.run": 2,
    "mqtemplate.converter": 2,
    "mqtemplate.broker": 2,
    "mqtemplate.store": 3,
    "mqtemplate.remoting.protocol": 3,
    "mqtemplate.delay": 4,
    "mqtemplate.remoting": 4,
    "mqtemplate.brokers": 5,
    "mqtemplate.template": 6,
    "mqtemplate.listener": 6,
    "mqtemplate.server": 6,
    "mqtemplate.context": 7,
    "mqtemplate.spark": 7,
    "mqtemplate.testing": 7,
    "mqtemplate.cli": 7,
    "mqtemplate.__main__": 8,
    "mqtemplate": 7.5,  # the front door: only starters, examples and users come through it
    "starters": 8,
    "examples": 8,
}

VISITS = {
    # on one floor: who -> whom
    ("mqtemplate.selectors.tags", "mqtemplate.selectors.sql92"),
    ("mqtemplate.testing", "mqtemplate.context"),
    ("mqtemplate.cli", "mqtemplate.context"),
}

OVER_THE_PORT_ONLY = ["mqtemplate.template", "mqtemplate.listener"]
BEHIND_THE_PORT = [
    "mqtemplate.store",
    "mqtemplate.delay",
    "mqtemplate.brokers",
    "mqtemplate.remoting.protocol",
    "mqtemplate.remoting",
]

LONGEST_FILE = 600
LONGEST_FUNCTION = 60


class Import(NamedTuple):
    """One module names another, anywhere in its text; functions and ``if TYPE_CHECKING`` count too."""

    importer: str
    imported: str
    line: int

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


@cache
def source_files() -> dict[str, Path]:
    """Dotted name -> file, for everything that is shipped or shown."""
    files = {}
    for base, top in ((ROOT, "mqtemplate"), (ROOT, "examples"), (ROOT / "starters", "")):
        for path in sorted((base / top).rglob("*.py")):
            dotted = ".".join(path.relative_to(base).with_suffix("").parts)
            files[dotted.removesuffix(".__init__")] = path
    return files


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def room_of(module: str) -> str | None:
    """The longest name in `FLOORS` that holds *module*; None for other people's modules."""
    if module.startswith("mqtemplate_starter_"):
        return "starters"
    parts = module.split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    room = next((name for name in names if name in FLOORS), None)
    # A file that nobody gave a floor would else count as the front door.
    return None if room == "mqtemplate" and module != "mqtemplate" else room


def imports_of(module: str, path: Path) -> Iterator[Import]:
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module, alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                deeper = f"{origin}.{alias.name}"
                is_module = deeper in source_files() and (module == origin or alias.name not in offers(origin))
                yield Import(module, deeper if is_module else origin, node.lineno)


@cache
def offers(package: str) -> frozenset[str]:
    """What a package says is public: one of the names may be called as a file beside it."""
    return frozenset(getattr(importlib.import_module(package), "__all__", ()))


def house_imports() -> list[Import]:
    """The imports that stay within the house."""
    return [
        found
        for module, path in source_files().items()
        for found in imports_of(module, path)
        if found.imported in source_files()
    ]


def is_one_file(room: str) -> bool:
    return source_files()[room].name != "__init__.py" if room in source_files() else False


def points_down(found: Import) -> bool:
    here, there = room_of(found.importer), room_of(found.imported)
    if here is None or there is None:
        return False
    if here == there or (here, there) in VISITS:
        return True
    # Files on one floor may know each other, as results know messages; the test for cycles keeps them in order.
    same_floor_files = FLOORS[here] == FLOORS[there] and is_one_file(there)
    return FLOORS[there] < FLOORS[here] or same_floor_files


def test_every_module_has_a_floor() -> None:
    """A new room is given its place in `FLOORS` before anything else."""
    homeless = [module for module in source_files() if room_of(module) is None]

    assert homeless == []


def test_imports_point_down_only() -> None:
    upward = [str(found) for found in house_imports() if not points_down(found)]

    assert upward == []


def test_what_users_call_knows_the_port_and_no_broker_behind_it() -> None:
    """C3: template and listeners work over any broker, so they may not see one."""
    peeping = [
        str(found)
        for found in house_imports()
        if room_of(found.importer) in OVER_THE_PORT_ONLY and room_of(found.imported) in BEHIND_THE_PORT
    ]

    assert peeping == []


def test_examples_use_public_names_only() -> None:
    """What an example needs, a user needs: it must be at the front door."""
    side_doors = [
        str(found)
        for found in house_imports()
        if found.importer.startswith("examples") and found.imported.startswith("mqtemplate.")
    ]

    assert side_doors == []


def test_starters_enter_rooms_by_the_door() -> None:
    """A starter, ours or anybody's, uses what a room offers: not a file inside it."""
    climbing = [
        str(found)
        for found in house_imports()
        if room_of(found.importer) == "starters" and room_of(found.imported) not in ("starters", found.imported)
    ]

    assert climbing == []


def test_no_two_modules_import_each_other_by_any_way_round() -> None:
    graph: dict[str, set[str]] = {module: set() for module in source_files()}
    for found in house_imports():
        graph[found.importer].add(found.imported)

    cycle = find_cycle(graph)

    assert not cycle, " -> ".join(cycle)


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """The first ring of modules found, its beginning repeated at its end; empty if there is none."""
    done: set[str] = set()

    def walk(module: str, trail: list[str]) -> list[str]:
        if module in trail:
            return [*trail[trail.index(module) :], module]
        if module in done:
            return []
        done.add(module)
        return next(filter(None, (walk(after, [*trail, module]) for after in sorted(graph[module]))), [])

    return next(filter(None, (walk(module, []) for module in graph)), [])


def test_a_ring_of_imports_would_be_found() -> None:
    """A guard that cannot fail guards nothing."""
    ring = {"a": {"b"}, "b": {"c"}, "c": {"b"}}

    assert find_cycle(ring) == ["b", "c", "b"]


# --- what is public ---------------------------------------------------------------------------------


def library_modules() -> list[str]:
    return [name for name in source_files() if not name.startswith("examples") and not name.endswith("__main__")]


def public_definitions(tree: ast.Module) -> set[str]:
    """Classes, functions and constants that a module makes itself and does not mark as its own with an underscore."""
    names: set[str] = set()
    for node in tree.body:
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.Assign(value=ast.Call(func=ast.Name(id="TypeVar" | "ParamSpec"))):
                continue  # a letter for the type checker
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
    return {name for name in names if not name.startswith("_")}


@pytest.mark.parametrize("name", library_modules())
def test_all_is_what_exists(name: str) -> None:
    """Each name in ``__all__`` can be imported, and nothing public is left out."""
    module = importlib.import_module(name)

    declared = list(module.__all__)

    assert [public for public in declared if not hasattr(module, public)] == []
    assert public_definitions(tree_of(source_files()[name])) - set(declared) == set()
    assert len(declared) == len(set(declared))


def test_a_package_only_says_what_is_public() -> None:
    """An ``__init__.py`` holds imports (``__getattr__`` is a late one) and ``__all__``; what works has its own file."""
    allowed = (ast.Import, ast.ImportFrom)
    working = [
        f"{module}:{node.lineno}"
        for module, path in source_files().items()
        if path.name == "__init__.py" and module.startswith("mqtemplate") and not module.startswith("mqtemplate_")
        for node in tree_of(path).body
        if not isinstance(node, allowed) and not is_docstring(node) and not is_about_names(node)
    ]

    assert working == []


def is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def is_about_names(node: ast.stmt) -> bool:
    match node:
        case ast.Assign(targets=[ast.Name(id="__all__")]) | ast.FunctionDef(name="__getattr__" | "__dir__"):
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
    return False


# --- length and manners -----------------------------------------------------------------------------


def test_files_are_short() -> None:
    lengths = {module: len(path.read_text(encoding="utf-8").splitlines()) for module, path in source_files().items()}

    assert {module: length for module, length in lengths.items() if length > LONGEST_FILE} == {}


def test_functions_are_short() -> None:
    long_ones = [
        f"{module}:{node.lineno} {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for module, path in source_files().items()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
        if node.end_lineno - node.lineno >= LONGEST_FUNCTION
    ]

    assert long_ones == []


def places(pattern: str, paths: list[Path]) -> list[str]:
    """Where a pattern stands, as ``file:line``."""
    return [
        f"{path.relative_to(ROOT)}:{number}"
        for path in paths
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if re.search(pattern, line)
    ]


def test_nothing_is_left_for_later() -> None:
    """What is missing is not there yet, or an issue says so; code does not promise."""
    assert places(r"\b(TODO|FIXME|XXX|HACK)\b|NotImplementedError", list(source_files().values())) == []


def test_no_error_is_swallowed_unseen() -> None:
    silent = [
        f"{module}:{node.lineno}"
        for module, path in source_files().items()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ExceptHandler) and (node.type is None or swallows_everything(node))
    ]

    assert silent == []


def swallows_everything(handler: ast.ExceptHandler) -> bool:
    everything = isinstance(handler.type, ast.Name) and handler.type.id in {"Exception", "BaseException"}
    return everything and all(isinstance(node, ast.Pass | ast.Continue) for node in handler.body)


def test_no_test_sleeps() -> None:
    """Time is the clock's, and threads are waited for by events: a sleep is slow when long and a lottery when short."""
    others = [path for path in sorted((ROOT / "tests").rglob("*.py")) if path != Path(__file__)]

    assert places(r"\bsleep\s*\(", others) == []
