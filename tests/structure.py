"""Figures of the structure: code lines, modules, importers, layers, methods that only pass on, test lines.

Run ``python -m tests.structure [ROOT]``; ROOT is a checkout, by default this one, so that two commits can be compared.
``--list`` names what is counted. `tests.test_shape` guards the figures that have a limit.
"""

from __future__ import annotations

import argparse
import ast
import gc
import io
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, cached_property
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

_NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
SMALL_MODULE_LINES = 60
_IDIOMS = {"Meta", "Migration"}
"""Names that a framework wants: the class of options inside each model of Django, and the class of each migration."""


class Import(NamedTuple):
    """One module imports another, at any place in its text; functions and ``if TYPE_CHECKING`` count too."""

    importer: str
    imported: str
    line: int

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


class Structure:
    """The modules of one checkout, and what can be counted in them.

    Args:
        root: The checkout.
        examples: Take the examples too, beside the library and the starters.

    Attributes:
        modules: Dotted name -> file.
        imports: The imports of these modules from each other.
        graph: Dotted name -> names of the modules that it imports.
    """

    def __init__(self, root: Path, *, examples: bool = False) -> None:
        self.root = root
        self.modules = _modules(root, examples=examples)

    @cached_property
    def imports(self) -> list[Import]:
        with _no_collection():
            return [found for name in self.modules for found in self._imports(name) if found.imported in self.modules]

    @cached_property
    def graph(self) -> dict[str, set[str]]:
        with _no_collection():
            return {name: self.imported_by(name) for name in self.modules}

    def imported_by(self, name: str) -> set[str]:
        """Return the names of the modules that one module imports. No other modules than these are read for it."""
        return {found.imported for found in self._imports(name) if found.imported in self.modules} - {name}

    @cached_property
    def importers(self) -> Counter[str]:
        return Counter(imported for imported_names in self.graph.values() for imported in imported_names)

    def is_package(self, name: str) -> bool:
        """Return True for a package, False for a module."""
        return self.modules[name].name == "__init__.py"

    def code_lines(self) -> int:
        """Return the lines of the library and the starters that are not blank, a comment or a docstring."""
        return sum(code_lines(path) for path in self.modules.values())

    def test_lines(self) -> int:
        """Return the code lines below ``tests/``."""
        return sum(code_lines(path) for path in (self.root / "tests").rglob("*.py"))

    def one_importer(self) -> list[str]:
        """Return the modules that exactly one other module imports."""
        return [name for name in self.modules if not self.is_package(name) and self.importers[name] == 1]

    def small_modules(self) -> list[str]:
        """Return the modules under 60 lines that fewer than two modules import."""
        return [
            name
            for name, path in self.modules.items()
            if not self.is_package(name)
            and len(path.read_text(encoding="utf-8").splitlines()) < SMALL_MODULE_LINES
            and self.importers[name] < 2
        ]

    def two_way_pairs(self) -> list[tuple[str, str]]:
        """Return the pairs of sub-packages of one package that import each other.

        ``package.*`` stands for the modules directly in a package.
        """
        edges: dict[str, set[str]] = defaultdict(set)
        for importer, imported_names in self.graph.items():
            for imported in imported_names:
                edge = self._siblings(importer, imported)
                if edge is not None:
                    edges[edge[0]].add(edge[1])
        return sorted({(a, b) for a in edges for b in edges[a] if a < b and a in edges.get(b, ())})

    def _siblings(self, importer: str, imported: str) -> tuple[str, str] | None:
        """Return the two parts of the innermost package that contains both modules."""
        one, other = importer.split("."), imported.split(".")
        shared = 0
        while shared < min(len(one), len(other)) and one[shared] == other[shared]:
            shared += 1
        if shared < 2:
            return None
        package = ".".join(one[:shared])
        if self.is_package(package) and package in (importer, imported):
            return None  # a package that exports what is below it
        first, second = (self._part(".".join(each[: shared + 1]), package) for each in (one, other))
        return None if first == second else (first, second)

    def _part(self, name: str, package: str) -> str:
        return name if name in self.modules and self.is_package(name) else f"{package}.*"

    def pass_through_methods(self) -> list[str]:
        """Return the methods that only call a method of an attribute, with their own parameters."""
        return [f"{name}:{found}" for name, path in self.modules.items() for found in _pass_through(path)]

    def class_names_twice(self) -> dict[str, list[str]]:
        """Return the names of classes that several modules define, with the modules."""
        owners: dict[str, list[str]] = defaultdict(list)
        for name, path in self.modules.items():
            for node in nodes_of(path):
                if isinstance(node, ast.ClassDef) and node.name not in _IDIOMS:
                    owners[node.name].append(name)
        return {name: found for name, found in sorted(owners.items()) if len(found) > 1}

    def longest_chain(self) -> list[str]:
        """Return the longest way from a module down its imports."""
        chains: dict[str, list[str]] = {}
        for name in TopologicalSorter(self.graph).static_order():
            longest = max((chains[imported] for imported in self.graph[name]), key=len, default=[])
            chains[name] = [name, *longest]
        return max(chains.values(), key=len)

    def _imports(self, name: str) -> Iterator[Import]:
        package = name if self.is_package(name) else name.rpartition(".")[0]
        for node in nodes_of(self.modules[name]):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield Import(name, alias.name, node.lineno)
            elif isinstance(node, ast.ImportFrom):
                parts = package.split(".")
                above = parts[: len(parts) - node.level + 1] if node.level else []
                origin = ".".join([*above, *([node.module] if node.module else [])])
                for alias in node.names:
                    submodule = f"{origin}.{alias.name}"
                    is_module = submodule in self.modules and (
                        name == origin or alias.name not in self._exports(origin)
                    )
                    yield Import(name, submodule if is_module else origin, node.lineno)

    def _exports(self, package: str) -> frozenset[str]:
        """Return the ``__all__`` of a package: a public name may equal the name of a module beside it."""
        for node in tree_of(self.modules[package]).body if package in self.modules else ():
            match node:
                case ast.Assign(targets=[ast.Name(id="__all__")], value=ast.List(elts=names)):
                    return frozenset(each.value for each in names if isinstance(each, ast.Constant))
        return frozenset()


def code_lines(path: Path) -> int:
    """Return the number of lines that are neither blank, nor a comment, nor a docstring."""
    text = path.read_text(encoding="utf-8")
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in nodes_of(path):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def _modules(root: Path, *, examples: bool) -> dict[str, Path]:
    found = {}
    for base, top in ((root, "mqtemplate"), *([(root, "examples")] if examples else []), (root / "starters", "")):
        for path in sorted((base / top).rglob("*.py")):
            dotted = ".".join(path.relative_to(base).with_suffix("").parts)
            found[dotted.removesuffix(".__init__")] = path
    return found


@cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Return all nodes of the syntax tree of a file. Several tests use them, and `ast.walk` is slow."""
    return list(ast.walk(tree_of(path)))


@contextmanager
def _no_collection() -> Iterator[None]:
    """Create objects that all stay: garbage collections, which find nothing, took half of the time."""
    was_enabled = gc.isenabled()
    gc.collect()  # what is garbage now would stay too
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def _pass_through(path: Path) -> list[str]:
    return [
        f"{node.name}.{method.name}"
        for node in nodes_of(path)
        if isinstance(node, ast.ClassDef)
        for method in node.body
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and _only_passes_on(method)
    ]


def _only_passes_on(method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    body = [each for each in method.body if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))]
    if len(body) != 1 or not isinstance(body[0], ast.Return | ast.Expr):
        return False
    call = body[0].value.value if isinstance(body[0].value, ast.Await) else body[0].value
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return False
    if not _is_attribute_of_self(call.func.value):
        return False
    arguments = method.args
    taken = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)][1:]
    passed = [*call.args, *(keyword.value for keyword in call.keywords)]
    names = [each.id for each in passed if isinstance(each, ast.Name)]
    return len(names) == len(passed) and sorted(names) == sorted(taken)


def _is_attribute_of_self(node: ast.expr) -> bool:
    if not isinstance(node, ast.Attribute):
        return False
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id == "self"


def main() -> None:
    """Print the figures of a checkout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).parents[1], help="checkout to count")
    parser.add_argument("--list", action="store_true", help="name what is counted")
    options = parser.parse_args()
    structure = Structure(options.root.resolve())
    chain = structure.longest_chain()
    rows: list[tuple[str, int, list[str]]] = [
        ("code lines", structure.code_lines(), []),
        ("modules, with packages", len(structure.modules), []),
        ("modules with one importer", len(found := structure.one_importer()), found),
        ("small modules with one importer", len(found := structure.small_modules()), found),
        ("sub-packages that import each other", len(pairs := structure.two_way_pairs()), [" ".join(p) for p in pairs]),
        ("methods that only pass on", len(found := structure.pass_through_methods()), found),
        (
            "class names used twice",
            len(twice := structure.class_names_twice()),
            [f"{name}: {', '.join(owners)}" for name, owners in twice.items()],
        ),
        ("longest chain of imports", len(chain), chain),
        ("code lines of tests", structure.test_lines(), []),
    ]
    for title, count, names in rows:
        print(f"{title:<36} {count:>7,}")
        for each in names if options.list else ():
            print(f"    {each}")


if __name__ == "__main__":
    main()
