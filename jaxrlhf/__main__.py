"""``python -m jaxrlhf``: versions, devices, and which extras work here."""

import importlib
import importlib.metadata
import platform

import jax

from jaxrlhf import __version__

EXTRAS = {
    "train": (
        "absl flax jinja2 matplotlib ml_collections optax orbax.checkpoint pyarrow rich "
        "safetensors tensorboardX transformers"
    ),
    "wandb": "wandb",
    "test": "hypothesis pytest",
}


def _missing(modules: str) -> list[str]:
    """The modules of a space-separated list that do not import, each with its reason."""
    out = []
    for module in modules.split():
        try:
            importlib.import_module(module)
        except ImportError as error:
            out.append(f"{module} ({error})")
    return out


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def main() -> None:
    """Prints the report."""
    print(f"jaxrlhf {__version__} on Python {platform.python_version()}, {platform.platform()}")
    for name in ("jax", "jaxlib", "numpy", "flax", "optax", "orbax-checkpoint", "transformers"):
        print(f"  {name} {_version(name)}")
    devices = jax.devices()
    print(f"devices: {len(devices)} x {devices[0].device_kind} ({devices[0].platform})")
    for extra, modules in EXTRAS.items():
        missing = _missing(modules)
        print(f"extra {extra}: {'works' if not missing else 'missing ' + ', '.join(missing)}")
    for extra, platform_name in (("cuda", "gpu"), ("tpu", "tpu")):
        works = devices[0].platform == platform_name
        print(f"extra {extra}: {'works' if works else 'no such device found'}")


if __name__ == "__main__":
    main()
