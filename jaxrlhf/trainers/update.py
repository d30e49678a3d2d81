"""One optimiser step: micro-batch gradients, a check that they are finite, AdamW, metrics.

    state = init_train_state(params, hyper_opt)
    loss_fn = functools.partial(actor_loss, config=config)     # once: a new partial compiles anew
    state, metrics = update(
        state, batch, hyper_opt, hyper, loss_fn=loss_fn, num_micro_batches=4, name="policy"
    )                                                          # the old state is donated

A loss function is ``loss_fn(params, micro_batch, loss_hyper) -> (scalar, StepMetrics)``. Its scalar
is a plain sum of per-token losses times weights that were made on the whole optimiser batch, so
the sum over micro-batches *is* the batch's loss and no split can change it.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrlhf.optimizers import OptimizerHyper, learning_rate_at, make_optimizer
from jaxrlhf.types import TrainState


class StepMetrics(NamedTuple):
    """Scalars of one micro-batch: ``sums`` are added over micro-batches, ``maxima`` are maxed.

    A mean is a sum whose weights were made on the whole batch (``metric_weights``). Names of
    maxima end in ``_max``.
    """

    sums: dict[str, jax.Array]
    maxima: dict[str, jax.Array]


LEFT_OUT = ("skipped", "empty", "skipped_in_a_row_max")  # metrics of updates not applied
LossFn = Callable[[Any, Any, Any], tuple[jax.Array, StepMetrics]]


def init_train_state(params: Any, hyper: OptimizerHyper, *, copy: bool = True) -> TrainState:
    """A state at step 0.

    Args:
      params: master weights (float32).
      hyper: only which of its terms are None matters here.
      copy: copy the parameters, because ``update`` donates its state and would delete buffers that
        the caller still holds (a frozen reference made from the same tree). False saves one
        copy's memory when nobody else holds them.
    """
    if copy:
        params = jax.tree.map(jnp.copy, params)
    zeros = [jnp.zeros((), jnp.int32) for _ in range(3)]
    return TrainState(params, make_optimizer(hyper).init(params), *zeros)


def split_micro_batches(batch: Any, num_micro_batches: int) -> Any:
    """Reshapes every leaf ``[B, ...]`` to ``[n, B / n, ...]``, rows in order.

    Raises:
      ValueError: B does not divide; the message lists what would.
    """
    n_rows = jax.tree.leaves(batch)[0].shape[0]
    if num_micro_batches < 1 or n_rows % num_micro_batches:
        divisors = [n for n in range(1, n_rows + 1) if n_rows % n == 0]
        raise ValueError(
            f"set the number of micro-batches to a divisor of the mini-batch's {n_rows} rows "
            f"({', '.join(map(str, divisors))}), not {num_micro_batches}."
        )
    return jax.tree.map(
        lambda x: x.reshape(num_micro_batches, n_rows // num_micro_batches, *x.shape[1:]), batch
    )


def accumulate_gradients(
    params: Any, batch: Any, loss_hyper: Any, *, loss_fn: LossFn, num_micro_batches: int = 1
) -> tuple[Any, jax.Array, StepMetrics]:
    """Gradient, loss and metrics of the whole batch, one micro-batch in memory at a time.

    Gradients are summed in float32 or wider, whatever the parameters' dtype.

    Args:
      params: differentiated parameters.
      batch: pytree of ``[B, ...]`` leaves.
      loss_hyper: passed on to ``loss_fn``.
      loss_fn: see the module's docstring.
      num_micro_batches: static divisor of B.

    Returns:
      (gradients, loss, metrics), each the sum (or maximum) over micro-batches.
    """
    micro_batches = split_micro_batches(batch, num_micro_batches)

    def one(micro_batch: Any) -> tuple[Any, jax.Array, StepMetrics]:
        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, metrics), grads = grad_fn(params, micro_batch, loss_hyper)
        return jax.tree.map(lambda g: g.astype(_accumulator(g)), grads), loss, metrics

    if num_micro_batches == 1:  # no accumulator: one copy of the gradients less
        return one(jax.tree.map(lambda x: x[0], micro_batches))

    def body(total: Any, micro_batch: Any) -> tuple[Any, tuple[jax.Array, StepMetrics]]:
        grads, loss, metrics = one(micro_batch)
        return jax.tree.map(jnp.add, total, grads), (loss, metrics)

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, _accumulator(p)), params)
    grads, (losses, metrics) = jax.lax.scan(body, zeros, micro_batches)
    sums = {name: x.sum(axis=0) for name, x in metrics.sums.items()}
    maxima = {name: x.max(axis=0) for name, x in metrics.maxima.items()}
    return grads, losses.sum(axis=0), StepMetrics(sums, maxima)


def _accumulator(x: jax.Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


def apply_gradients(
    state: TrainState, grads: Any, hyper: OptimizerHyper, ok: jax.Array, skipped: jax.Array
) -> TrainState:
    """AdamW where ``ok``; otherwise parameters and optimiser state keep every bit.

    Args:
      state: before the update.
      grads: like ``state.params``, any float dtype.
      hyper: traced scalars.
      ok: bool scalar, whether to apply the update.
      skipped: bool scalar, whether an update that is not applied counts as skipped.

    Returns:
      The next state, its counters moved.
    """
    updates, opt_state = make_optimizer(hyper).update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)

    def keep(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(ok, new.astype(old.dtype), old)

    applied, left_out = ok.astype(jnp.int32), skipped.astype(jnp.int32)
    return TrainState(
        params=jax.tree.map(keep, params, state.params),
        opt_state=jax.tree.map(keep, opt_state, state.opt_state),
        step=state.step + applied,
        skipped=state.skipped + left_out,
        skipped_in_a_row=(state.skipped_in_a_row + left_out) * (1 - applied),
    )


def _carries_weight(batch: Any) -> jax.Array:
    """Whether any loss weight is not 0; a batch without a field ``loss_weights`` always does."""
    weights = getattr(batch, "loss_weights", None)
    return jnp.bool_(True) if weights is None else (weights != 0).any()


def pure_update(
    state: TrainState,
    batch: Any,
    hyper_opt: OptimizerHyper,
    loss_hyper: Any,
    *,
    loss_fn: LossFn,
    num_micro_batches: int = 1,
    name: str = "update",
) -> tuple[TrainState, dict[str, jax.Array]]:
    """``update`` without jit and donation, to be mapped, sharded or wrapped.

    An update whose loss or global gradient norm is not finite is left out: parameters and
    optimiser state keep every bit, ``skipped`` and ``skipped_in_a_row`` count it, and its metrics
    are 0 but ``{name}/skipped``, which is 1. So is one whose ``batch.loss_weights`` are all 0 (no
    scored row, say), where Adam's momentum and the weight decay alone would act; it is counted as
    ``{name}/empty`` only, for nothing is wrong with it. ``summarize`` leaves both kinds out.

    Args:
      state: parameters, optimiser state, counters.
      batch: pytree of ``[B, ...]`` leaves whose loss weights were made on this whole batch.
      hyper_opt: the optimiser's traced scalars.
      loss_hyper: the loss's traced scalars.
      loss_fn: static, the same object at every call; see the module's docstring.
      num_micro_batches: static divisor of B.
      name: static prefix of the metrics that are added here.

    Returns:
      (state, metrics): the loss function's metrics and ``{name}/grad_norm`` (before clipping),
      ``{name}/learning_rate``, ``{name}/skipped``, ``{name}/empty`` and
      ``{name}/skipped_in_a_row_max`` (the state's counter after this update); float scalars.

    Raises:
      ValueError: B does not divide into the micro-batches.
    """
    grads, loss, step_metrics = accumulate_gradients(
        state.params, batch, loss_hyper, loss_fn=loss_fn, num_micro_batches=num_micro_batches
    )
    grad_norm = optax.tree.norm(grads)
    finite, weighty = jnp.isfinite(loss) & jnp.isfinite(grad_norm), _carries_weight(batch)
    ok, skipped = finite & weighty, ~finite & weighty
    metrics = {
        **step_metrics.sums,
        **step_metrics.maxima,
        f"{name}/grad_norm": grad_norm,
        f"{name}/learning_rate": learning_rate_at(hyper_opt, state.step),
    }
    metrics = {key: jnp.where(ok, x, 0) for key, x in metrics.items()}
    state = apply_gradients(state, grads, hyper_opt, ok, skipped)
    left_out = (skipped, ~weighty, state.skipped_in_a_row)
    metrics |= {
        f"{name}/{key}": value.astype(jnp.float32)
        for key, value in zip(LEFT_OUT, left_out, strict=True)
    }
    return state, metrics


update = functools.partial(
    jax.jit,
    static_argnames=("loss_fn", "num_micro_batches", "name"),
    donate_argnames=("state",),
)(pure_update)


def summarize(history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """One dict of host floats from the metrics of several updates (it waits for the device).

    Means over the updates that were applied, maxima of the names that end in ``_max``. Of
    ``*/skipped`` and ``*/empty`` the total, and of ``*/skipped_in_a_row_max`` the maximum, over
    all updates; when none was applied these alone are returned: there is nothing else to say.

    Args:
      history: metric dicts of ``update``, all with the same keys.
    """
    rows = [{k: float(v) for k, v in metrics.items()} for metrics in jax.device_get(history)]
    if not rows:
        return {}
    about = {key for key in rows[0] if key.rpartition("/")[2] in LEFT_OUT}
    left_out = [key for key in about if not key.endswith("_max")]
    applied = [row for row in rows if not any(row[key] for key in left_out)]
    out = {}
    for key in rows[0]:
        column = [row[key] for row in (rows if key in about else applied)]
        if column and key.endswith("_max"):
            out[key] = max(column)
        elif column:
            out[key] = sum(column) / (1 if key in about else len(column))
    return out
