"""Structure of the code: the direction of imports, layers inside the packages, what is public, sizes and manners."""

from __future__ import annotations

import ast
import importlib
import re
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.structure import Import, Structure, nodes_of, tree_of

ROOT = Path(__file__).parents[1]

LEVELS: dict[str, float] = {
    # package or module -> level, as docs/architecture/README.md shows them; a package imports from lower levels only
    "mqtemplate.callables": 0,
    "mqtemplate.clock": 0,
    "mqtemplate.durations": 0,
    "mqtemplate.errors": 0,
    "mqtemplate.event_log": 0,
    "mqtemplate.exports": 0,
    "mqtemplate.extras": 0,
    "mqtemplate.futures": 0,
    "mqtemplate.hashes": 0,
    "mqtemplate.metrics": 0,
    "mqtemplate.numbers": 0,
    "mqtemplate.processes": 0,
    "mqtemplate.services": 0,
    "mqtemplate.topics": 0,
    "mqtemplate.user_code": 0,
    "mqtemplate.message": 1,
    "mqtemplate.pending": 1,
    "mqtemplate.key_limits": 1,
    "mqtemplate.results": 1,
    "mqtemplate.selectors": 1,
    "mqtemplate.broker": 2,
    "mqtemplate.converter": 2,
    "mqtemplate.converters": 2,
    "mqtemplate.grpc_protos": 2,
    "mqtemplate.record": 2,
    "mqtemplate.remoting.protocol": 3,
    "mqtemplate.store": 3,
    "mqtemplate.delay": 4,
    "mqtemplate.remoting": 4,
    "mqtemplate.engine": 5,
    "mqtemplate.http2": 5,
    "mqtemplate.brokers": 6,
    "mqtemplate.server": 6,
    "mqtemplate.calls": 7,
    "mqtemplate.listener": 8,
    "mqtemplate.scheduling": 8,
    "mqtemplate.template": 8,
    "mqtemplate.copy": 9,
    "mqtemplate.handover": 9,
    "mqtemplate.operations": 9,
    "mqtemplate.context": 10,
    "mqtemplate.http": 10,
    "mqtemplate.observability": 10,
    "mqtemplate.outbox": 10,
    "mqtemplate.outbox.django": 10,
    "mqtemplate.running": 10,
    "mqtemplate.running.hosting": 10,
    "mqtemplate.spark": 10,
    "mqtemplate.testing": 10,
    "mqtemplate.asyncapi": 11,
    "mqtemplate.cli": 11,
    "mqtemplate.console": 11,
    "mqtemplate.__main__": 12,
    "mqtemplate": 11.5,  # the public names: starters, examples and users import from here
    "starters": 12,
    "examples": 12,
}

SAME_LEVEL = {
    # importer -> imported, where both stand on one level
    ("mqtemplate.converter", "mqtemplate.converters"),  # the types of payloads
    ("mqtemplate.cli", "mqtemplate.console"),
    ("mqtemplate.running.hosting", "mqtemplate.context"),
    ("examples", "starters"),
    ("mqtemplate.outbox.django", "mqtemplate.outbox"),
    ("mqtemplate.running", "mqtemplate.context"),
    ("mqtemplate.testing", "mqtemplate.context"),
    ("mqtemplate.scheduling", "mqtemplate.listener"),
    ("mqtemplate.listener", "mqtemplate.template"),  # the options of what a handler sends on
    ("mqtemplate.handover", "mqtemplate.operations"),
    ("mqtemplate.operations", "mqtemplate.copy"),  # a repaired store directory is rebuilt as a new one
    ("mqtemplate.context", "mqtemplate.observability"),
    ("mqtemplate.context", "mqtemplate.http"),  # the least length of tokens
    ("mqtemplate.cli", "mqtemplate.asyncapi"),
}

FORBIDDEN = {
    # importer -> packages that it must not know, whatever their level
    "mqtemplate.template": ["mqtemplate.store", "mqtemplate.delay", "mqtemplate.brokers", "mqtemplate.remoting"],
    "mqtemplate.listener": ["mqtemplate.store", "mqtemplate.delay", "mqtemplate.brokers", "mqtemplate.remoting"],
    "mqtemplate.calls": ["mqtemplate.store", "mqtemplate.delay", "mqtemplate.brokers", "mqtemplate.remoting"],
    "mqtemplate.engine": ["mqtemplate.remoting", "mqtemplate.brokers", "mqtemplate.server"],
    "mqtemplate.brokers.embedded": ["mqtemplate.remoting"],
    "mqtemplate.brokers.remote": ["mqtemplate.store", "mqtemplate.brokers.embedded"],
    "mqtemplate.brokers.grpc": [
        "mqtemplate.store",
        "mqtemplate.engine",
        "mqtemplate.server",
        "mqtemplate.brokers.embedded",
    ],
}

PUBLIC_PACKAGES = ("mqtemplate.asyncapi", "mqtemplate.outbox")
"""Packages whose names users import from there, because few programs need them."""

LOADED_BY_NAME = {
    # module under 60 lines that at most one other imports -> who loads it
    r"mqtemplate\.__main__": "python -m mqtemplate",
    r"mqtemplate\.outbox\.django\..*": "Django",
    r"mqtemplate_starter_django\..*": "Django, and the entry points of starters",
    r"mqtemplate_starter_\w+\.(autoconfiguration|broker)": "the entry points of starters",
    r"mqtemplate\.running\.(gunicorn|worker)": "gunicorn and the workers of Celery",
    r"mqtemplate\.spark\.reader\.daemon": "Spark",
    r"mqtemplate\.testing\.contract\..*": "the tests of a broker of a user",
}

MAX_LINES_OF_FUNCTION = 60
MAX_ONE_IMPORTER = 65
MAX_PASS_THROUGH = 59
MAX_IMPORT_CHAIN = 26


@cache
def structure() -> Structure:
    return Structure(ROOT, examples=True)


def package_of(module: str) -> str | None:
    """Return the longest name in `LEVELS` that contains *module*; None for modules of other distributions."""
    if module.startswith(("mqtemplate_starter_", "pyspark_mqtemplate")):
        return "starters"
    parts = module.split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    package = next((name for name in names if name in LEVELS), None)
    # A module without a level of its own would otherwise count as `mqtemplate` itself.
    return None if package == "mqtemplate" and module != "mqtemplate" else package


def is_one_file(package: str) -> bool:
    return structure().modules[package].name != "__init__.py" if package in structure().modules else False


def points_down(found: Import) -> bool:
    importer, imported = package_of(found.importer), package_of(found.imported)
    if importer is None or imported is None:
        return False
    if importer == imported or (importer, imported) in SAME_LEVEL:
        return True
    # Modules on one level may import each other, as results import messages; the test for cycles orders them.
    same_level_modules = LEVELS[importer] == LEVELS[imported] and is_one_file(imported)
    return LEVELS[imported] < LEVELS[importer] or same_level_modules


def is_of_the_library(module: str) -> bool:
    return is_below(module, "mqtemplate")


def is_below(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


# --- direction of imports -----------------------------------------------------------------------


def test_every_module_has_a_level() -> None:
    """A new package gets its level in `LEVELS` first."""
    assert [module for module in structure().modules if package_of(module) is None] == []


def test_the_documented_levels_are_the_checked_ones() -> None:
    """The table in docs/architecture has each package and module at its level in `LEVELS`."""
    page = (ROOT / "docs" / "architecture" / "README.md").read_text(encoding="utf-8")
    documented = {
        name.removesuffix(".py").rstrip("/*").replace("/", "."): int(level)
        for level, names in re.findall(r"^\| (\d+) \| (.*?) \|", page, re.MULTILINE)
        for name in re.findall(r"`(.*?)`", names)
    }

    checked = {name.removeprefix("mqtemplate."): level for name, level in LEVELS.items()}
    assert documented == {name: level for name, level in checked.items() if name not in ("mqtemplate", "__main__")}


def test_imports_point_down_only() -> None:
    assert [str(found) for found in structure().imports if not points_down(found)] == []


@pytest.mark.parametrize("package", FORBIDDEN)
@pytest.mark.feature("C3")
def test_a_package_does_not_know_what_it_must_not(package: str) -> None:
    """The template and listeners work over any broker; the two brokers do not share what is below them."""
    wrong = [
        str(found)
        for found in structure().imports
        if is_below(found.importer, package) and any(is_below(found.imported, other) for other in FORBIDDEN[package])
    ]

    assert wrong == []


def test_examples_use_public_names_only() -> None:
    """A name that an example needs, a user needs: it must be exported by `mqtemplate`, or by a documented package."""
    wrong = [
        str(found)
        for found in structure().imports
        if found.importer.startswith("examples")
        and found.imported.startswith("mqtemplate.")
        and found.imported not in PUBLIC_PACKAGES
    ]

    assert wrong == []


def test_starters_import_from_packages_not_from_modules_inside_them() -> None:
    """A starter, ours or a user's, uses the names that a package exports."""
    wrong = [
        str(found)
        for found in structure().imports
        if package_of(found.importer) == "starters" and package_of(found.imported) not in ("starters", found.imported)
    ]

    assert wrong == []


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules of one import cycle, the first repeated at the end; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def test_no_import_cycle() -> None:
    cycle = find_cycle(structure().graph)

    assert not cycle, " -> ".join(cycle)


def test_an_import_cycle_would_be_found() -> None:
    """A guard that cannot fail proves nothing."""
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) in (["b", "c", "b"], ["c", "b", "c"])


def test_chains_of_imports_are_short() -> None:
    """The longest way from a module down its imports; a reader follows it to understand the module."""
    longest = library().longest_chain()

    assert len(longest) <= MAX_IMPORT_CHAIN, " -> ".join(longest)


# --- layers inside the packages -----------------------------------------------------------------


@cache
def library() -> Structure:
    return Structure(ROOT)


def test_sub_packages_do_not_import_each_other() -> None:
    """The parts of a package are layers: sub-packages, and the modules directly in it (``package.*``)."""
    assert library().two_way_pairs() == []


def test_a_small_module_has_two_importers_or_a_reason() -> None:
    small = [name for name in library().small_modules() if not any(re.fullmatch(each, name) for each in LOADED_BY_NAME)]

    assert small == []


def test_a_reason_for_a_small_module_is_needed() -> None:
    small = library().small_modules()

    assert [each for each in LOADED_BY_NAME if not any(re.fullmatch(each, name) for name in small)] == []


def test_few_modules_have_one_importer() -> None:
    """A module that one other module imports is often a part of it."""
    assert len(library().one_importer()) <= MAX_ONE_IMPORTER


def test_few_methods_only_pass_on() -> None:
    """A caller that has the object can call it."""
    assert len(library().pass_through_methods()) <= MAX_PASS_THROUGH


def test_a_class_has_a_name_of_its_own() -> None:
    assert library().class_names_twice() == {}


# --- what is public -----------------------------------------------------------------------------


def exporting_modules() -> list[str]:
    """Packages, and the modules directly in `mqtemplate`, say what they export; inside a package a name does."""
    return [
        name
        for name, path in structure().modules.items()
        if (path.name == "__init__.py" or path.parent.name == "mqtemplate")
        and not name.startswith("examples")
        and path.stem != "__main__"
    ]


def public_definitions(tree: ast.Module) -> set[str]:
    """Classes, functions and constants that a module defines without a leading underscore."""
    names: set[str] = set()
    for node in tree.body:
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.Assign(value=ast.Call(func=ast.Name(id="TypeVar" | "ParamSpec"))):
                continue  # a name for the type checker
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
    return {name for name in names if not name.startswith("_")}


@pytest.mark.parametrize("name", exporting_modules())
def test_all_is_what_exists(name: str) -> None:
    """Each name in ``__all__`` can be imported, and no public definition is missing in it."""
    module = importlib.import_module(name)
    if name == "mqtemplate_starter_django" and find_spec("django.tasks") is None:
        pytest.importorskip("django_tasks", reason="its backend needs tasks, and this Django is older than 6")

    declared = list(getattr(module, "__all__", ()))

    assert [public for public in declared if not hasattr(module, public)] == []
    assert public_definitions(tree_of(structure().modules[name])) - set(declared) == set()
    assert len(declared) == len(set(declared))


@pytest.mark.parametrize("name", [each for each in exporting_modules() if each.startswith("mqtemplate_starter_")])
def test_a_starter_exports_no_name_of_its_modules(name: str) -> None:
    """Its names are imported late, and the import of a module would put the module in place of the name."""
    modules = {file.stem for file in structure().modules[name].parent.glob("*.py")}

    assert {*getattr(importlib.import_module(name), "__all__", ())} & modules == set()


def test_a_package_only_says_what_is_public() -> None:
    """An ``__init__.py`` has imports (``__getattr__`` is a late one) and ``__all__``; code has a module of its own."""
    wrong = [
        f"{module}:{node.lineno}"
        for module, path in structure().modules.items()
        if path.name == "__init__.py" and module.startswith("mqtemplate") and not module.startswith("mqtemplate_")
        for node in tree_of(path).body
        if not isinstance(node, ast.Import | ast.ImportFrom) and not is_docstring(node) and not is_about_names(node)
    ]

    assert wrong == []


def is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def is_about_names(node: ast.stmt) -> bool:
    match node:
        case ast.Assign(targets=[ast.Name(id="__all__" | "__version__")]):
            return True
        case ast.Assign(targets=[ast.Name(id=name)]):
            return name.startswith("_")  # the table of a late import
        case ast.FunctionDef(name="__getattr__" | "__dir__") | ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.If(test=test):
            return ast.unparse(test).startswith("sys.version_info <")  # before the first import
    return False


# --- sizes and manners --------------------------------------------------------------------------


def test_functions_are_short() -> None:
    long_ones = [
        f"{module}:{node.lineno} {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for module, path in structure().modules.items()
        for node in nodes_of(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
        if node.end_lineno - node.lineno >= MAX_LINES_OF_FUNCTION
    ]

    assert long_ones == []


def lines_matching(pattern: str, paths: list[Path]) -> list[str]:
    """Return where a pattern matches, as ``file:line``."""
    return [
        f"{path.relative_to(ROOT)}:{number}"
        for path in paths
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if re.search(pattern, line)
    ]


def test_no_work_is_left_for_later() -> None:
    """Missing work belongs into an issue."""
    assert lines_matching(r"\b(TODO|FIXME|XXX|HACK)\b|NotImplementedError", list(structure().modules.values())) == []


def test_no_error_is_swallowed() -> None:
    silent = [
        f"{module}:{node.lineno}"
        for module, path in structure().modules.items()
        for node in nodes_of(path)
        if isinstance(node, ast.ExceptHandler) and (node.type is None or swallows_everything(node))
    ]

    assert silent == []


def swallows_everything(handler: ast.ExceptHandler) -> bool:
    everything = isinstance(handler.type, ast.Name) and handler.type.id in {"Exception", "BaseException"}
    return everything and all(isinstance(node, ast.Pass | ast.Continue) for node in handler.body)


def test_no_test_sleeps() -> None:
    """Tests use the virtual clock, or wait for events: a sleep is slow when long and fails at random when short."""
    others = [path for path in sorted((ROOT / "tests").rglob("*.py")) if path != Path(__file__)]

    assert lines_matching(r"\bsleep\s*\(", others) == []
