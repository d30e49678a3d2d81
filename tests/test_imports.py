"""Who may import whom (the design's table), lazy imports included."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "jaxrlhf"

# package or module -> (jaxrlhf modules, third-party modules) that it may import.
ALLOWED: dict[str, tuple[set[str], set[str]]] = {
    "losses": ({"losses"}, {"jax"}),
    "types": (set(), {"jax", "flax"}),
    "models": ({"models"}, {"jax", "numpy", "safetensors", "huggingface_hub"}),
    "sharding": ({"models"}, {"jax"}),
    "data": ({"data"}, {"numpy", "pyarrow", "tokenizers", "transformers"}),
    "rewards": ({"rewards"}, {"numpy"}),
    "rewards/reward_model.py": ({"rewards", "models", "data"}, {"jax", "numpy"}),
    "rollout": ({"rollout", "models", "types", "sharding"}, {"jax", "numpy"}),
    "trainers": (
        {"trainers", "losses", "models", "types", "sharding", "optimizers"},
        {"jax", "flax", "optax"},
    ),
    "evaluate": ({"rollout", "rewards", "losses", "models", "types"}, {"jax", "numpy"}),
    "optimizers": ({"types"}, {"jax", "optax", "flax"}),
    "checkpoint": ({"types"}, {"jax", "numpy", "orbax"}),
    "metrics": ({"types"}, {"jax", "numpy", "rich", "tensorboardX", "wandb"}),
    "progress": (set(), {"rich"}),
    "figures": (set(), {"matplotlib", "numpy"}),
    "distributed": ({"types"}, {"jax"}),
    "__init__": (set(), set()),
    "__main__": ({"__init__"}, {"jax"}),
}


def _unit(path: pathlib.Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _imports(path: pathlib.Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the full name"
            assert node.module is not None
            names |= {f"{node.module}.{a.name}" for a in node.names}
    return names


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_import_directions(path):
    exception = ALLOWED.get(path.relative_to(PACKAGE).as_posix())
    ours, theirs = exception or ALLOWED[_unit(path)]
    for name in _imports(path):
        top, *rest = name.split(".")
        if top == "jaxrlhf":
            assert rest, f"{path}: import a module of jaxrlhf, not the package"
            assert rest[0] in ours or rest[0] == "__version__", f"{path} must not import {name}"
        elif top in ("configs", "experiments"):
            raise AssertionError(f"{path}: the package must not import {name}")
        elif top not in sys.stdlib_module_names:
            assert top in theirs, f"{path} must not import {name}"


def test_one_scorer_alone_reads_models():
    assert [name for name in ALLOWED if "/" in name] == ["rewards/reward_model.py"]
    assert (PACKAGE / "rewards" / "reward_model.py").exists()


def test_losses_import_only_jax_and_numpy():
    code = (
        "import sys, jax, jax.numpy, numpy\n"
        "before = {m.split('.')[0] for m in sys.modules}\n"
        "import jaxrlhf.losses\n"
        "after = {m.split('.')[0] for m in sys.modules}\n"
        "print(sorted(after - before - set(sys.stdlib_module_names)))\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "['jaxrlhf']"
