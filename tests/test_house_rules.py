"""Rules of the house that no type checker sees: floors, what stages may import, and who may change a state."""

import ast
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest

ROOT = Path(str(resources.files("headrace")))
SOURCES = sorted(
    path
    for folder in ("fsm", "codec", "runtime", "specs")
    for path in (ROOT / folder).rglob("*.py")
    if "__pycache__" not in path.parts
)
FLOORS = {"specs": 0, "fsm": 0, "codec": 1, "runtime": 2}
ALLOWED = {
    "fsm": {"fsm", "specs"},
    "codec": {"codec", "fsm", "specs"},
    "runtime": {"runtime", "codec", "fsm", "specs", "_version"},
    "specs": {"specs"},
    "specs.conformance": {"specs.conformance", "specs", "fsm", "codec", "_version"},
}
BANNED_IN_STAGES = {"threading", "time", "random", "queue", "asyncio"}


def module_of(path: Path) -> tuple[str, ...]:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def floor_of(module: tuple[str, ...]) -> str:
    return "specs.conformance" if module[:2] == ("specs", "conformance") else module[0] if module else "top"


def imports(path: Path, *, at_import: bool = False) -> Iterator[tuple[str, ...]]:
    """Modules of the package that `path` imports; `at_import`: only those that run when it is imported."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    here = path.relative_to(ROOT).parts[:-1]
    nodes = list(_outside_functions(tree)) if at_import else list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.level:
            base = here[: len(here) - (node.level - 1)] + tuple((node.module or "").split(".") if node.module else ())
            for alias in node.names:
                deeper = (*base, alias.name)
                file = ROOT.joinpath(*deeper)
                is_module = file.with_suffix(".py").is_file() or (file / "__init__.py").is_file()
                yield deeper if is_module else base
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "headrace":
            yield tuple((node.module or "").split(".")[1:])
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "headrace":
                    yield tuple(alias.name.split(".")[1:])


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        yield child
        yield from _outside_functions(child)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: "/".join(path.relative_to(ROOT).parts))
def test_a_module_imports_only_from_its_own_floor_and_below(path: Path) -> None:
    here = floor_of(module_of(path))
    wrong = sorted(
        {".".join(module) or "the package's face" for module in imports(path) if floor_of(module) not in ALLOWED[here]}
    )
    assert not wrong, f"{'/'.join(path.relative_to(ROOT).parts)} imports {wrong}"


def test_no_two_modules_import_each_other_in_a_circle() -> None:
    graph: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for path in SOURCES:
        module = module_of(path)
        graph[module] = {
            # a package's face is imported with every module of it; what counts is the module that was asked for
            found
            for found in imports(path, at_import=True)
            if found != module and not (len(module) > len(found) and module[: len(found)] == found)
        }
    done: set[tuple[str, ...]] = set()

    def visit(module: tuple[str, ...], way: list[tuple[str, ...]]) -> None:
        if module in way:
            circle = [".".join(name) for name in [*way[way.index(module) :], module]]
            pytest.fail(f"a circle of imports: {' -> '.join(circle)}")
        if module in done or module not in graph:
            return
        for found in sorted(graph[module]):
            visit(found, [*way, module])
        done.add(module)

    for module in graph:
        visit(module, [])


@pytest.mark.parametrize("path", sorted((ROOT / "runtime" / "stages").glob("*.py")), ids=lambda path: path.name)
def test_stages_import_no_clock_no_thread_and_no_chance(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {
        alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    }
    names |= {
        (node.module or "").split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and not node.level
    }
    assert not names & BANNED_IN_STAGES


def assignments(name: str, path: Path) -> Iterator[tuple[str, str]]:
    """(function, source of the value) of every assignment to an attribute called `name`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for function in [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]:
        for node in ast.walk(function):
            targets = (
                node.targets
                if isinstance(node, ast.Assign)
                else [node.target]
                if isinstance(node, (ast.AnnAssign, ast.AugAssign))
                else []
            )
            for target in targets:
                for part in ast.walk(target):
                    if isinstance(part, ast.Attribute) and part.attr == name and isinstance(part.ctx, ast.Store):
                        value = getattr(node, "value", None)
                        yield function.name, "" if value is None else ast.unparse(value)


RUNTIME = [path for path in SOURCES if path.relative_to(ROOT).parts[0] == "runtime"]


def test_a_request_changes_state_only_in_the_advance_functions() -> None:
    found = {
        (path.name, function, attribute)
        for path in RUNTIME
        for attribute in ("state", "abort")
        for function, _ in assignments(attribute, path)
    }
    assert found == {
        ("life.py", "__init__", "state"),
        ("life.py", "__init__", "abort"),
        ("life.py", "advance", "state"),
        ("life.py", "advance_along", "state"),
        ("life.py", "advance_abort", "abort"),
    }


@pytest.mark.parametrize("name", ["ring.py", "sink.py", "service.py"])
def test_every_machine_of_a_ring_a_sink_or_a_manager_moves_by_its_table(name: str) -> None:
    found = list(assignments("_state", ROOT / "runtime" / name))
    assert found
    for function, value in found:
        if not value.endswith(".initial") and ".next(" not in value:
            pytest.fail(f"{name}: {function} sets a state to {value!r}, which is not what a table said")
