"""The architecture as a test: who may import whom, and who may touch mindspore.

Reads the source of every module; imports inside functions count as well.
"""

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "ms_zero"

# Longest prefix wins. A module may import from its own package and from lower layers.
# The entry points of layer 6 stand on each other in this order.
LAYERS = {
    "ms_zero": 0,  # the package itself: its version
    "ms_zero.errors": 0,
    "ms_zero.mesh": 0,
    "ms_zero.hardware": 0,
    "ms_zero.rng": 0,
    "ms_zero.resources": 0,
    "ms_zero.template": 0,
    "ms_zero.native": 0,
    "ms_zero.pipeline": 0,  # __init__ stays empty
    "ms_zero.pipeline.balance": 0,
    "ms_zero.pipeline.schedule": 0,
    "ms_zero.config": 1,
    "ms_zero.presets": 1.5,
    "ms_zero.plan": 2,
    "ms_zero._compat": 2,
    "ms_zero._compat_frontend": 2,
    "ms_zero.comm": 2,
    "ms_zero.kernels": 2,
    "ms_zero.models": 3,
    "ms_zero.precision": 3,
    "ms_zero.zero": 3.5,  # on precision: what a policy says about dtypes, and the loss scale
    "ms_zero.parallel": 3,
    "ms_zero.pipeline.stage": 3,
    "ms_zero.pipeline.runtime": 3,
    "ms_zero.memory": 3,
    "ms_zero.optim": 4,
    "ms_zero.data": 4,
    "ms_zero.checkpoint": 4,
    "ms_zero.monitor": 4,
    "ms_zero.recipes": 5,
    "ms_zero.graph": 5,
    "ms_zero.trainer": 6.0,
    "ms_zero.runner": 6.1,
    "ms_zero.rlhf": 6.2,
    "ms_zero.testing": 6.3,
    "ms_zero.parity": 6.4,
    "ms_zero.cli": 6.5,
    "ms_zero.__main__": 6.6,
}
# Same layer, different module: layer 0 and layer 2 are built of small parts that lean on each other.
SAME_LAYER = {
    ("ms_zero", "ms_zero.presets"),  # lazily, as the package's own function
    ("ms_zero.hardware", "ms_zero.resources"),
    ("ms_zero.native", "ms_zero.resources"),
    ("ms_zero.comm", "ms_zero._compat"),
    ("ms_zero.kernels", "ms_zero._compat"),
}
FOUNDATIONS = ("ms_zero", "ms_zero.errors")  # anyone may import these
WITHOUT_MINDSPORE = (
    "ms_zero",
    "ms_zero.__main__",
    "ms_zero.errors",
    "ms_zero.mesh",
    "ms_zero.hardware",
    "ms_zero.rng",
    "ms_zero.resources",
    "ms_zero.template",
    "ms_zero.native",
    "ms_zero.pipeline.balance",
    "ms_zero.pipeline.schedule",
    "ms_zero.config",
    "ms_zero.presets",
    "ms_zero.plan",
    "ms_zero.data",
    "ms_zero.checkpoint",
    "ms_zero.monitor",
    "ms_zero.cli",
)
# The scheduler of a job does nothing but init(); only here, and only inside a function.
LAZY_MINDSPORE = ("ms_zero.cli.train",)
HOMES_OF_PRIVATE_API = ("ms_zero._compat", "ms_zero._compat_frontend")


@dataclass(frozen=True)
class Import:
    """One imported module or name: `import module` or `from module import name`."""

    module: str
    name: str | None
    line: int
    lazy: bool

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module


def module_name(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_of(path):
    name = module_name(path)
    return name if path.name == "__init__.py" else name.rpartition(".")[0]


def imports_of(tree, package):
    """Every import of a parsed module, relative ones resolved, `importlib.import_module("x")` included."""
    lazy_nodes = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(node)
    }
    found = []
    for node in ast.walk(tree):
        lazy = id(node) in lazy_nodes
        if isinstance(node, ast.Import):
            found += [Import(alias.name, None, node.lineno, lazy) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
                base = f"{parent}.{base}".rstrip(".")
            found += [Import(base, alias.name, node.lineno, lazy) for alias in node.names]
        elif is_dynamic_import(node):
            found.append(Import(node.args[0].value, None, node.lineno, lazy))
    return found


def is_dynamic_import(node):
    if not isinstance(node, ast.Call) or not ast.unparse(node.func).endswith(("import_module", "__import__")):
        return False
    return bool(node.args) and isinstance(node.args[0], ast.Constant)


def private_attributes(tree):
    """Attribute chains such as `ms.x._y` whose root came from mindspore: (line, chain)."""
    roots = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "mindspore":
                    roots.add(alias.asname or "mindspore")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "mindspore":
            roots.update((alias.asname or alias.name) for alias in node.names)
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        chain = ast.unparse(node)
        root, *attributes = chain.split(".")
        if root in roots and is_private(attributes[-1]):
            found.append((node.lineno, chain))
    return found


def is_private(name):
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def lookup(module, table):
    """The longest key of `table` that is `module` or a package around it."""
    while module not in table and "." in module:
        module = module.rpartition(".")[0]
    assert module in table, module
    return module


def unit_of(module):
    """The layer-table entry of a module. Only the package itself may fall back to `ms_zero`."""
    unit = lookup(module, LAYERS)
    return unit if unit != "ms_zero" or module == "ms_zero" else None


FILES = sorted(PACKAGE.rglob("*.py"))
TREES = {module_name(path): ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
PACKAGES = {module_name(path): package_of(path) for path in FILES}
IMPORTS = {module: imports_of(tree, PACKAGES[module]) for module, tree in TREES.items()}


def resolve(imported):
    """The module of ours that an import refers to, None for anything foreign."""
    if imported.module.split(".")[0] != "ms_zero":
        return None
    return imported.path if imported.path in TREES else imported.module


def is_mindspore(imported):
    return imported.module.split(".")[0] == "mindspore"


def is_light(module):
    """Whether a module has to do without mindspore."""
    names = [name for name in WITHOUT_MINDSPORE if name != "ms_zero"]
    return module == "ms_zero" or any(module == name or module.startswith(f"{name}.") for name in names)


def may_import(module, target):
    importer, imported = unit_of(module), unit_of(target)
    if target in FOUNDATIONS or importer == imported:
        return True
    if package_root(importer) == package_root(imported) and importer.count(".") > 1:
        return LAYERS[imported] <= LAYERS[importer]  # the layers within pipeline/
    return LAYERS[imported] < LAYERS[importer] or (importer, imported) in SAME_LAYER


def package_root(unit):
    return ".".join(unit.split(".")[:2])


def uses_private_name(module, package, imported):
    """Whether an import takes a private name of another module, or a private module of another package."""
    target = resolve(imported)
    if target is None or target == module:
        return False
    if imported.path != target and imported.name and is_private(imported.name):
        return True
    parent, _, last = target.rpartition(".")
    return is_private(last) and target not in HOMES_OF_PRIVATE_API and parent != package


def test_every_module_has_a_layer():
    assert [module for module in TREES if unit_of(module) is None] == []


def test_imports_go_down():
    wrong = [
        f"{module}:{imported.line} imports {imported.path}"
        for module, imports in IMPORTS.items()
        for imported in imports
        if resolve(imported) is not None and not may_import(module, resolve(imported))
    ]
    assert wrong == []


def test_private_names_stay_in_their_module():
    wrong = [
        f"{module}:{imported.line} imports {imported.path}"
        for module, imports in IMPORTS.items()
        for imported in imports
        if uses_private_name(module, PACKAGES[module], imported)
    ]
    assert wrong == []


def test_light_modules_do_not_import_mindspore():
    wrong = [
        f"{module}:{imported.line} imports {imported.path}"
        for module in filter(is_light, TREES)
        for imported in IMPORTS[module]
        if is_mindspore(imported) and not (imported.lazy and module in LAZY_MINDSPORE)
    ]
    assert wrong == []


def test_light_modules_do_not_get_mindspore_through_others():
    edges = {
        module: {resolve(imported) for imported in imports if not imported.lazy} - {None}
        for module, imports in IMPORTS.items()
    }
    heavy = {m for m, imports in IMPORTS.items() if any(is_mindspore(i) and not i.lazy for i in imports)}
    wrong = {module: reachable(module, edges) & heavy for module in filter(is_light, TREES)}
    assert {module: found for module, found in wrong.items() if found} == {}


def reachable(start, edges):
    seen, waiting = set(), [start]
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            waiting += edges.get(module, ())
    return seen


def test_private_mindspore_api_lives_in_compat_only():
    wrong = []
    for module in sorted(set(TREES) - set(HOMES_OF_PRIVATE_API)):
        for imported in filter(is_mindspore, IMPORTS[module]):
            if any(map(is_private, imported.path.split("."))):
                wrong.append(f"{module}:{imported.line} imports {imported.path}")
        wrong += [f"{module}:{line} uses {chain}" for line, chain in private_attributes(TREES[module])]
    assert wrong == []


@pytest.mark.parametrize(
    ("source", "allowed"),
    [
        ("from ms_zero.trainer import x", False),
        ("def f():\n    import ms_zero.trainer", False),
        ("from ..recipes import eager", False),
        ("import importlib; importlib.import_module('ms_zero.cli.main')", False),
        ("from ms_zero.zero import x", False),
        ("from ms_zero.comm import x", True),
        ("from .layers import x", True),
        ("import numpy", True),
    ],
)
def test_checker_knows_a_wrong_import_in_a_model(source, allowed):
    targets = [resolve(imported) for imported in imports_of(ast.parse(source), "ms_zero.models")]
    assert all(target is None or may_import("ms_zero.models.gpt", target) for target in targets) is allowed


def test_checker_knows_private_names():
    source = "import mindspore as ms\nfrom mindspore.common import _grad\nms.ops._x.y\nms.ops.z\nother._w"
    tree = ast.parse(source)
    assert private_attributes(tree) == [(3, "ms.ops._x")]
    (private,) = [i for i in imports_of(tree, "ms_zero") if any(map(is_private, i.path.split(".")))]
    assert private.path == "mindspore.common._grad"
    outside = Import("ms_zero.checkpoint.layout", "_hidden", 1, False)
    assert uses_private_name("ms_zero.runner", "ms_zero", outside)
