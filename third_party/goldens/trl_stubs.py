"""Stand-ins for the parts of a TRL trainer that a loss method reads but does not compute with."""

import collections
import types
from collections.abc import Callable
from typing import Any

import inputs
import torch
from record import Identity, tensors


def load(identity: Identity) -> dict[str, torch.Tensor]:
    """Torch copies of a case's inputs, in bfloat16 where it says so."""
    return tensors(inputs.make(identity), bfloat16=bool(identity.get("bfloat16")))


class Accelerator:
    """One process: nothing to gather or reduce."""

    num_processes, process_index, sync_gradients = 1, 0, True
    device = torch.device("cpu")

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x

    gather_for_metrics = gather

    def unwrap_model(self, model: Any) -> Any:
        return model

    def reduce(self, x: torch.Tensor, reduction: str) -> torch.Tensor:
        return x

    def pad_across_processes(self, x: torch.Tensor, dim: int, pad_index: float) -> torch.Tensor:
        return x


def trainer(cls: type, **attributes: Any) -> Any:
    """An instance of the real class whose __init__ never ran, with these attributes."""
    self = object.__new__(cls)
    model = torch.nn.Module()  # reads: training, and whether it checkpoints gradients
    model.is_gradient_checkpointing = False  # type: ignore[assignment]
    metrics = {mode: collections.defaultdict(list) for mode in ("train", "eval")}
    common = {
        "accelerator": Accelerator(),
        "_metrics": metrics,
        "model": model,
        "aux_loss_enabled": False,
        "_total_train_tokens": 0,
        "_tp_size": 1,
        "current_gradient_accumulation_steps": 1,
    }
    for name, value in {**common, **attributes}.items():
        object.__setattr__(self, name, value)
    return self


def last_metrics(self: Any, *names: str) -> dict[str, float]:
    """The last logged value of each of these metrics."""
    return {name: self._metrics["train"][name][-1] for name in names}


def fused_outputs(
    log_probs: torch.Tensor, mask: torch.Tensor, **extra: torch.Tensor
) -> types.SimpleNamespace:
    """What TRL's fused LM head returns: per-token fields that are zero outside the mask."""
    inside = torch.where(mask, log_probs, 0.0)
    fields = {
        "log_probs": inside,
        "entropy": torch.zeros_like(inside),
        "mean_logits": torch.zeros_like(inside),
        "is_top1": mask,
        "label_mask": mask,
    }
    return types.SimpleNamespace(**{**fields, **extra})


def returning(outputs: Any) -> Callable[..., Any]:
    """A model that gives these outputs whatever it is asked."""
    return lambda *args, **kwargs: outputs
