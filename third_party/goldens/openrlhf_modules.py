"""Loads OpenRLHF's torch-only modules without deepspeed, flash_attn, vLLM or a ray cluster.

Packages whose __init__ imports those are replaced by bare ones with the same path. deepspeed is an
empty module only while openrlhf.models.utils is imported.
"""

import importlib
import importlib.util
import pathlib
import sys
import types

_BARE = (
    "openrlhf.models",
    "openrlhf.utils",
    "openrlhf.trainer",
    "openrlhf.trainer.ppo_utils",
    "openrlhf.trainer.ray",
)


def _bare_packages() -> None:
    spec = importlib.util.find_spec("openrlhf")
    assert spec is not None
    assert spec.origin is not None
    base = pathlib.Path(spec.origin).parent
    for name in _BARE:
        module = types.ModuleType(name)
        module.__path__ = [str(base.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = module
    launcher = types.ModuleType("openrlhf.trainer.ray.launcher")
    launcher.RayActorGroup = None  # type: ignore[attr-defined]  # an annotation only
    sys.modules[launcher.__name__] = launcher


_bare_packages()
_stub = importlib.util.find_spec("deepspeed") is None
if _stub:
    sys.modules["deepspeed"] = types.ModuleType("deepspeed")
utils = importlib.import_module("openrlhf.models.utils")
if _stub:
    del sys.modules["deepspeed"]
loss = importlib.import_module("openrlhf.models.loss")
kl_controller = importlib.import_module("openrlhf.trainer.ppo_utils.kl_controller")
length_penalty = importlib.import_module("openrlhf.trainer.ppo_utils.length_penalty")
experience_maker = importlib.import_module("openrlhf.trainer.ppo_utils.experience_maker")
