"""Every config key is read by code outside the loader: proven on the syntax trees of the package.

An attribute counts only where its owner is known to be that section: `config.train.steps`, an alias
(`train = config.train`), an annotated parameter or field (`train: TrainConfig`), `self._t = config.train`.
A section that is passed on whole by `vars(section)` counts for the parameters, used in its body, of the
constructors that take it.
"""

import ast
import re
from pathlib import Path

import pytest

import ms_zero
from ms_zero.config import schema

PACKAGE = Path(ms_zero.__file__).parent
RUN = "a run config"
OWNERS = {"RunConfig": RUN, "ModelConfig": "model", "RopeScaling": "model.rope_scaling"}
OWNERS["DataPart"] = "data.parts"
OWNERS["LatentConfig"] = "model.latent"
OWNERS |= {owner.__name__: "model" for owner in schema.MODEL_FAMILIES.values()}
OWNERS |= {owner.__name__: name for name, owner in schema.SECTIONS.items()}
SECTIONS = set(OWNERS.values()) - {RUN}
CONSTRUCTORS = {"model": {"GPT": schema.GPTConfig, "Llama": schema.LlamaConfig}}


def sources():
    """All modules that use a config; of the loader only the one that turns degrees into a mesh."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.parent != PACKAGE / "config" or path.name == "mesh.py":
            yield path, ast.parse(path.read_text())


class Reader(ast.NodeVisitor):
    """Collects `reads` ("section.key") and `passed` (sections given away whole) of one module."""

    def __init__(self):
        self.reads, self.passed = set(), set()
        self.scopes = [{"config": RUN}]
        self.fields = {}

    def owner(self, node):
        """The section that an expression denotes, RUN, or None."""
        if isinstance(node, ast.Name):
            return next((scope[node.id] for scope in reversed(self.scopes) if node.id in scope), None)
        if not isinstance(node, ast.Attribute):
            return None
        base = self.owner(node.value)
        if base == RUN:
            return node.attr if node.attr in SECTIONS else None
        if base is not None:
            return f"{base}.{node.attr}" if f"{base}.{node.attr}" in SECTIONS else None
        return RUN if node.attr in ("config", "_config") else self.fields.get(node.attr)

    def annotated(self, annotation):
        if annotation is None:
            return None
        names = re.findall(r"\w+", ast.unparse(annotation))
        return next((OWNERS[name] for name in names if name in OWNERS), None)

    def bind(self, target, owner):
        if isinstance(target, ast.Name):
            self.scopes[-1][target.id] = owner
        elif isinstance(target, ast.Attribute) and owner is not None:
            self.fields[target.attr] = owner

    def visit_FunctionDef(self, node):
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        scope = {
            arg.arg: self.annotated(arg.annotation)
            for arg in arguments
            if arg.arg != "config" or arg.annotation
        }
        self.scopes.append(scope)
        self.generic_visit(node)
        self.scopes.pop()

    def visit_ClassDef(self, node):
        for item in node.body:
            if isinstance(item, ast.AnnAssign) and self.annotated(item.annotation):
                self.fields[item.target.id] = self.annotated(item.annotation)
        for item in ast.walk(node):
            if isinstance(item, ast.FunctionDef) and item.name == "__init__":
                self.visit(item)  # so that methods above it know what self holds
        self.scopes.append({})
        self.generic_visit(node)
        self.scopes.pop()

    def visit_Assign(self, node):
        self.generic_visit(node)
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                for part, value in zip(target.elts, node.value.elts):
                    self.bind(part, self.owner(value))
            else:
                self.bind(target, self.owner(node.value))

    def visit_Attribute(self, node):
        owner = self.owner(node.value)
        if owner is not None and owner != RUN and isinstance(node.ctx, ast.Load):
            self.reads.add(f"{owner}.{node.attr}")
        self.generic_visit(node)

    def visit_Call(self, node):
        if isinstance(node.func, ast.Name) and node.func.id in ("vars", "asdict") and node.args:
            owner = self.owner(node.args[0])
            if owner is not None:
                self.passed.add(owner)
        self.generic_visit(node)


def used_parameters(tree, name):
    """Parameters of class `name`'s constructor that its body uses; None when the module has no such class."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == name:
            init = next(
                item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"
            )
            names = {
                item.id
                for statement in init.body
                for item in ast.walk(statement)
                if isinstance(item, ast.Name)
            }
            return {arg.arg for arg in (*init.args.args[1:], *init.args.kwonlyargs) if arg.arg in names}
    return None


def reads_of(text):
    reader = Reader()
    reader.visit(ast.parse(text))
    return reader.reads, reader.passed


@pytest.fixture(scope="module")
def package():
    reads, passed, trees = set(), set(), []
    for _, tree in sources():
        reader = Reader()
        reader.visit(tree)
        reads |= reader.reads
        passed |= reader.passed
        trees.append(tree)
    return reads, passed, trees


@pytest.mark.parametrize("section", schema.SECTIONS)
def test_every_key_is_read(package, section):
    reads, _, _ = package
    unread = [name for name in schema.keys_of(schema.SECTIONS[section]) if f"{section}.{name}" not in reads]
    assert unread == []


@pytest.mark.parametrize("name", CONSTRUCTORS["model"])
def test_every_model_key_reaches_the_model(package, name):
    reads, passed, trees = package
    used = {key.removeprefix("model.") for key in reads if key.startswith("model.")}
    if "model" in passed:
        found = [used_parameters(tree, name) for tree in trees]
        used |= next(parameters for parameters in found if parameters is not None)
    unread = [key for key in schema.keys_of(CONSTRUCTORS["model"][name]) if key not in used]
    assert unread == []


def test_every_key_of_a_model_with_experts_is_read(package):
    reads, _, _ = package
    assert [name for name in schema.keys_of(schema.MoEConfig) if f"model.{name}" not in reads] == []
    assert [name for name in schema.keys_of(schema.LatentConfig) if f"model.latent.{name}" not in reads] == []


def test_every_key_of_rope_scaling_is_read(package):
    reads, _, _ = package
    unread = [
        name for name in schema.keys_of(schema.RopeScaling) if f"model.rope_scaling.{name}" not in reads
    ]
    assert unread == []


def test_every_key_of_a_part_is_read(package):
    reads, _, _ = package
    assert [name for name in schema.keys_of(schema.DataPart) if f"data.parts.{name}" not in reads] == []


@pytest.mark.parametrize(
    ("code", "reads"),
    [
        ("config.train.steps", {"train.steps"}),
        ("loaded.config.train.steps", {"train.steps"}),
        ("def f(run: RunConfig): run.train.steps", {"train.steps"}),
        ("train = config.train\nprint(train.steps)", {"train.steps"}),
        ("def f(loaded):\n c = loaded.config\n o = c.optim\n return o.lr", {"optim.lr"}),
        ("a, b = config.train, config.optim\na.seed + b.eps", {"train.seed", "optim.eps"}),
        ("def f(x: OptimConfig): return x.lr", {"optim.lr"}),
        ("def f(config: OptimConfig): return config.lr", {"optim.lr"}),
        ("def f(x: GPTConfig | LlamaConfig): return x.family", {"model.family"}),
        ("def f(x: 'RopeScaling | None'): return x.factor", {"model.rope_scaling.factor"}),
        ("config.model.rope_scaling.factor", {"model.rope_scaling", "model.rope_scaling.factor"}),
        ("class A:\n t: TrainConfig\n def f(self): return self.t.steps", {"train.steps"}),
        (
            "class A:\n def f(self): return self.t.steps\n def __init__(self, config): self.t = config.train",
            {"train.steps"},
        ),
        # what must not count
        ("train.steps", set()),
        ("model.hidden_size\nself.model.hidden_size", set()),
        ("other.train.steps", set()),
        ("def f(train): return train.steps", set()),
        ("def f(config: Plan): return config.train.steps", set()),
        ("def f():\n train = config.train\ndef g(train): return train.steps", set()),
        ("train = config.train\ndef f(train): return train.steps", set()),
        ("train = config.train\ntrain = 3\ntrain.steps", set()),
        ("config.train.steps = 3", set()),
        ("'config.train.steps'  # config.train.steps", set()),
    ],
)
def test_the_scan_is_precise(code, reads):
    assert reads_of(code)[0] == reads


def test_the_scan_sees_sections_given_away_whole():
    assert reads_of("def build(config: GPTConfig): return GPT(**vars(config))")[1] == {"model"}
    assert reads_of("asdict(config.optim)\nvars(args)")[1] == {"optim"}
    tree = ast.parse("class GPT:\n def __init__(self, *, a, b, c):\n  self.a = a\n  f(c)")
    assert used_parameters(tree, "GPT") == {"a", "c"}
