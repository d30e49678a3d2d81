"""AdamW with clipping and schedules, built inside jit from a pytree of traced scalars.

The optax chain is made anew in every trace from an ``OptimizerHyper``, so a step can change its
learning rate, or be mapped over a batch of them, without compiling again::

    hyper = OptimizerHyper.create(learning_rate=1e-6, schedule="cosine", decay_steps=1000)
    optimizer = make_optimizer(hyper)                       # inside jit, or outside: both are cheap
    updates, opt_state = optimizer.update(grads, opt_state, params)
    hyper = hyper.replace(learning_rate=hyper.learning_rate * 0.5)    # compiles nothing
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

SCHEDULES = ("constant", "linear", "cosine")


@struct.dataclass
class OptimizerHyper:
    """AdamW's numbers: float32 device scalars, but for ``schedule``, which is static.

    Make it once with ``create``. ``None`` removes a term from the program; 0.0 keeps it.

    Attributes:
      learning_rate: peak learning rate.
      beta1, beta2, eps: Adam's decay rates and the addend of the denominator.
      weight_decay: decoupled decay, scaled by the learning rate; None: no decay in the program.
      max_grad_norm: global norm that gradients are clipped to; None: no clipping.
      warmup_steps: updates of linear warm-up; the first of them already moves (see
        ``learning_rate_at``).
      decay_steps: the update (counted from 0, warm-up included) at which a linear or cosine
        schedule reaches ``min_ratio``; None (0 in ``create``) with the constant schedule.
      min_ratio: final learning rate as a fraction of the peak.
      schedule: "constant", "linear" or "cosine".
    """

    learning_rate: jax.Array
    beta1: jax.Array
    beta2: jax.Array
    eps: jax.Array
    weight_decay: jax.Array | None
    max_grad_norm: jax.Array | None
    warmup_steps: jax.Array
    decay_steps: jax.Array | None
    min_ratio: jax.Array
    schedule: str = struct.field(pytree_node=False, default="constant")

    @classmethod
    def create(
        cls,
        *,
        learning_rate: float,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float | None = 0.0,
        max_grad_norm: float | None = 1.0,
        warmup_steps: int = 0,
        decay_steps: int = 0,
        min_ratio: float = 0.0,
        schedule: str = "constant",
    ) -> "OptimizerHyper":
        """Checks Python numbers and moves each to the device as float32.

        Raises:
          ValueError: a number outside its range, an unknown schedule, or decay steps that are
            missing, or given to a schedule that would ignore them.
        """
        _require(schedule in SCHEDULES, f"set schedule to one of {SCHEDULES}, not {schedule!r}.")
        _require(learning_rate >= 0, f"set learning_rate to 0 or more, not {learning_rate}.")
        _require(0 <= beta1 < 1 and 0 <= beta2 < 1, "set beta1 and beta2 to values in [0, 1).")
        _require(eps > 0, f"set eps above 0, not {eps}.")
        _require(
            max_grad_norm is None or max_grad_norm > 0,
            f"set max_grad_norm above 0, or to None for no clipping, not {max_grad_norm}.",
        )
        _require(
            (decay_steps == 0) == (schedule == "constant"),
            f"set decay_steps for a linear or cosine schedule and leave it 0 for a constant one: "
            f"schedule is {schedule!r} and decay_steps {decay_steps}.",
        )
        _require(
            decay_steps == 0 or decay_steps > warmup_steps,
            f"set decay_steps above warmup_steps: {decay_steps} against {warmup_steps}.",
        )
        return cls(
            learning_rate=_scalar(learning_rate),
            beta1=_scalar(beta1),
            beta2=_scalar(beta2),
            eps=_scalar(eps),
            weight_decay=None if weight_decay is None else _scalar(weight_decay),
            max_grad_norm=None if max_grad_norm is None else _scalar(max_grad_norm),
            warmup_steps=_scalar(warmup_steps),
            decay_steps=_scalar(decay_steps) if decay_steps else None,
            min_ratio=_scalar(min_ratio),
            schedule=schedule,
        )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _scalar(number: float) -> jax.Array:
    return jnp.asarray(number, jnp.float32)


def learning_rate_at(hyper: OptimizerHyper, step: jax.Array) -> jax.Array:
    """The learning rate of update number ``step`` (0 is the first).

    ``peak * min(1, (step + 1) / warmup) * decay(p)``, ``p`` running from 0 at the end of the
    warm-up to 1 at ``decay_steps``; linear: ``1 - (1 - m) p``, cosine: ``m + (1 - m)(1 + cos pi
    p)/2`` with ``m = min_ratio``. The first update of a warm-up is at ``peak / warmup``;
    transformers' and verl's schedules start at exactly 0, which spends an update on nothing.

    Args:
      hyper: the schedule's numbers.
      step: i32 scalar, updates applied so far.

    Returns:
      f32 scalar.
    """
    step = jnp.asarray(step, jnp.float32)
    rate = hyper.learning_rate * jnp.minimum(1.0, (step + 1.0) / jnp.maximum(hyper.warmup_steps, 1))
    if hyper.schedule == "constant" or hyper.decay_steps is None:
        return rate
    span = jnp.maximum(hyper.decay_steps - hyper.warmup_steps, 1.0)
    progress = jnp.clip((step - hyper.warmup_steps) / span, 0.0, 1.0)
    if hyper.schedule == "cosine":
        progress = 0.5 * (1.0 - jnp.cos(jnp.pi * progress))
    return rate * (1.0 - (1.0 - hyper.min_ratio) * progress)


def decay_mask(params: Any) -> Any:
    """Which leaves weight decay applies to: those that multiply, not those that scale or shift.

    A leaf is left out when it has fewer than two axes, or when a name on its path holds "norm" or
    "bias". The name decides because layers are stacked: a norm scale is ``[L, D]``, a bias
    ``[L, N]``, and both look like matrices. Embeddings are decayed, as in transformers.

    Returns:
      A tree like ``params`` of Python bools.
    """

    def decays(path: tuple[Any, ...], leaf: Any) -> bool:
        names = jax.tree_util.keystr(path).lower()
        return leaf.ndim >= 2 and "norm" not in names and "bias" not in names

    return jax.tree_util.tree_map_with_path(decays, params)


def make_optimizer(hyper: OptimizerHyper) -> optax.GradientTransformation:
    """Clipping by global norm, then AdamW at the schedule's learning rate.

    The state's structure depends only on which terms are None, so ``init`` and ``update`` may use
    different ``OptimizerHyper`` values. The schedule counts updates in the optax state, which is
    left as it was when an update is skipped: a skipped update does not advance it.

    Args:
      hyper: traced or concrete scalars.

    Returns:
      An optax transformation; moments have the parameters' dtype, so keep master weights float32.
    """
    parts = []
    if hyper.max_grad_norm is not None:
        parts.append(optax.clip_by_global_norm(hyper.max_grad_norm))
    parts.append(optax.scale_by_adam(b1=hyper.beta1, b2=hyper.beta2, eps=hyper.eps))
    if hyper.weight_decay is not None:
        parts.append(optax.add_decayed_weights(hyper.weight_decay, mask=decay_mask))
    parts.append(optax.scale_by_learning_rate(functools.partial(learning_rate_at, hyper)))
    return optax.chain(*parts)
