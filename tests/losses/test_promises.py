"""What every public function promises, checked on all of them by the same few properties.

The table of cases is `promises.py`. `run` compiles a case once: outputs, and gradients of the
outputs' sum with random weights on the unmasked tokens.
"""

import functools
import importlib.util
import inspect
import pathlib

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from jaxrlhf import losses

spec = importlib.util.spec_from_file_location(
    "promises", pathlib.Path(__file__).with_name("promises.py")
)
promises = importlib.util.module_from_spec(spec)
spec.loader.exec_module(promises)

CASES, inputs, total = promises.CASES, promises.inputs, promises.total
ROWS, LENGTH, ARRAYS = promises.ROWS, promises.LENGTH, promises.ARRAYS


def test_every_public_function_has_a_case_or_a_reason():
    public = {name for name in losses.__all__ if not inspect.isclass(getattr(losses, name))}
    covered = set().union(*map(promises.functions_of, CASES))
    assert covered | set(promises.EXEMPT) == public
    assert not covered & set(promises.EXEMPT)


@functools.cache
def run(name: str):
    value_and_gradients = jax.value_and_grad(
        functools.partial(total, CASES[name]), argnums=0, has_aux=True
    )

    def flat(arrays, mask, probe):
        (_, outputs), gradients = value_and_gradients(arrays, mask, probe)
        return outputs, gradients

    return jax.jit(flat)


def compute(name: str, arrays, mask, probe):
    with jax.enable_x64(True):
        results = run(name)(tuple(arrays[: CASES[name].arrays]), mask, probe)
        return jax.tree.map(np.asarray, results)


def assert_close(found, expected):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)


def move(tree, columns):
    """Reorder the columns of every per-token array."""
    return jax.tree.map(lambda x: np.take_along_axis(x, columns, 1) if x.ndim else x, tree)


every_case = pytest.mark.parametrize("name", CASES)
seeds = hypothesis.given(seed=st.integers(0, 2**32 - 1))
quick = hypothesis.settings(max_examples=8, deadline=None)


@every_case
@quick
@seeds
def test_garbage_under_the_mask_leaks_nowhere(name, seed):
    arrays, mask, probe, rng = inputs(seed)
    garbage = rng.choice([np.nan, np.inf, -np.inf, 1e300], size=(ARRAYS, *mask.shape))
    dirty = [np.where(mask, x, g) for x, g in zip(arrays, garbage, strict=True)]
    outputs, gradients = compute(name, dirty, mask, probe)
    assert_close((outputs, gradients), compute(name, arrays, mask, probe))
    for x in (*outputs, *gradients):
        assert np.isfinite(x).all()
        assert x.ndim == 0 or (x[~mask] == 0).all()


@every_case
def test_what_must_not_be_differentiated_is_not(name):
    arrays, _, probe, _ = inputs(0)
    _, gradients = compute(name, arrays, np.ones((ROWS, LENGTH), bool), probe)
    for i, gradient in enumerate(gradients):
        assert gradient.any() == (i < CASES[name].differentiated)


@every_case
@quick
@seeds
def test_row_order_does_not_matter(name, seed):
    arrays, mask, probe, rng = inputs(seed)
    order = rng.permutation(ROWS)
    expected = jax.tree.map(lambda x: x[order] if x.ndim else x, compute(name, arrays, mask, probe))
    permuted = compute(name, [x[order] for x in arrays], mask[order], probe[order])
    assert_close(permuted, expected)


@every_case
@quick
@seeds
def test_mask_is_a_subset_wherever_the_padding_stands(name, seed):
    """Unmasked tokens pushed to the left end, or to the right end, of rows full of NaN."""
    arrays, mask, probe, _ = inputs(seed)
    if not CASES[name].skips_masked:
        mask = np.sort(mask, axis=1)  # no gaps: padding alone may move
    arrays = [np.where(mask, x, np.nan) for x in arrays]
    expected = compute(name, arrays, mask, probe)
    for side in (~mask, mask):
        columns = np.argsort(side, axis=1, kind="stable")
        moved = compute(name, *move((arrays, mask, probe), columns))
        assert_close(moved, move(expected, columns))


@every_case
def test_amount_of_padding_and_eager_mode_change_nothing(name):
    arrays, mask, probe, _ = inputs(3)
    arrays, mask, probe = (
        [np.where(mask, x, np.nan)[:, :6] for x in arrays], mask[:, :6], probe[:, :6]
    )  # fmt: skip
    wide = [np.pad(x, ((0, 0), (0, 2)), constant_values=np.inf) for x in arrays]
    pad = functools.partial(np.pad, pad_width=((0, 0), (0, 2)))
    expected, _ = compute(name, wide, pad(mask), pad(probe))
    with jax.enable_x64(True):
        taken = [jnp.asarray(x) for x in arrays[: CASES[name].arrays]]
        outputs = jax.tree.leaves(CASES[name].function(*taken, jnp.asarray(mask)))
        outputs = jax.tree.map(np.asarray, outputs)
    assert_close(outputs, [x[:, :6] if x.ndim else x for x in expected])


@every_case
def test_nothing_unmasked_gives_0_and_no_gradient(name):
    arrays, _, probe, _ = inputs(7)
    outputs, gradients = compute(name, arrays, np.zeros((ROWS, LENGTH), bool), probe)
    assert_close(outputs, [np.full_like(x, CASES[name].empty) for x in outputs])
    assert not any(g.any() for g in gradients)


@every_case
def test_vmap_and_any_leading_axes_equal_one_batch(name):
    """A row of its own is a batch whose other rows are masked."""
    case = CASES[name]
    batches = [inputs(seed)[:3] for seed in (1, 2)]
    arrays, mask, _ = jax.tree.map(lambda *x: np.stack(x), *batches)

    @jax.jit
    def other_forms(arrays, mask):
        forms = {"vmap": jax.vmap(case.function)(*arrays, mask)}
        first, mask = [x[0] for x in arrays], mask[0]
        if case.leading_axes:
            cut = [x.reshape(2, ROWS // 2, LENGTH) for x in (*first, mask)]
            forms["axes"] = case.function(*cut)
            forms["row"] = case.function(*(x[1] for x in (*first, mask)))
        return {form: jax.tree.leaves(tree) for form, tree in forms.items()}

    with jax.enable_x64(True):
        forms = other_forms(arrays[: case.arrays], mask)
        forms = jax.tree.map(np.asarray, forms)
    expected = [compute(name, *batch)[0] for batch in batches]
    assert_close(forms["vmap"], [np.stack(x) for x in zip(*expected, strict=True)])
    if case.leading_axes:
        whole = [x.reshape(ROWS, LENGTH) if x.ndim else x for x in forms["axes"]]
        assert_close(whole, expected[0])
        first, mask, probe = batches[0]
        alone = compute(name, first, mask & (np.arange(ROWS) == 1)[:, None], probe)[0]
        assert_close(forms["row"], [x[1] if x.ndim else x for x in alone])


@every_case
def test_value_and_gradient_under_shard_map(name):
    """Lowered, not compiled: what varies over devices and what does not is a matter of types."""
    arrays, mask, probe, _ = inputs(6)
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(AxisType.Auto,))
    rows = PartitionSpec("rows")

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=rows, out_specs=rows)
    def sharded(arrays, mask, probe):
        run = jax.grad(functools.partial(total, CASES[name]), has_aux=True)
        gradients, outputs = run(arrays, mask, probe)
        # A device's scalar needs an axis, along which the devices' are stacked.
        return gradients, [x if x.ndim else x[None] for x in outputs]

    taken = tuple(arrays[: CASES[name].arrays])
    gradients, _ = sharded.lower(taken, mask, probe).out_info
    assert [x.shape for x in gradients] == [x.shape for x in taken]


@every_case
def test_float32_and_bfloat16_inputs_give_float32(name):
    arrays, mask, _, _ = inputs(4)
    for dtype in (jnp.float32, jnp.bfloat16):
        taken = [jnp.asarray(x, dtype) for x in arrays[: CASES[name].arrays]]
        outputs = jax.tree.leaves(jax.eval_shape(CASES[name].function, *taken, mask))
        assert {x.dtype for x in outputs} == {np.dtype(np.float32)}


def test_hyper_parameters_are_traced():
    """One program for all values; each value has an effect; 0 is a value."""
    arrays, mask, _, _ = inputs(5)
    x, y, z, _ = (jnp.asarray(a, jnp.float32) for a in arrays)
    hidden, matrix = jnp.ones((1, 3, 2)), jnp.array([[1.0, 0], [0, 2]])
    traces = []

    @jax.jit
    def step(hyper):
        traces.append(1)
        kl = losses.kl_estimate(x, y, kind="k3", clip=hyper["log_ratio_clip"], mask=mask)
        scores = losses.masked_mean(z, mask, axis=-1)
        clips = {"clip_low": hyper["clip_low"], "clip_high": hyper["clip_high"]}
        surrogate = functools.partial(losses.clipped_surrogate, x, y, z, mask=mask, **clips)
        state = losses.adaptive_controller(
            losses.init_kl_state(hyper["kl_coef"]), 0.11, 64,
            target=hyper["target"], horizon=hyper["horizon"],
        )  # fmt: skip
        outputs = {
            "gae": losses.gae(x, y, mask, gamma=hyper["gamma"], lam=hyper["lam"]),
            "rewards": losses.token_rewards(scores, kl, mask, kl_coef=hyper["kl_coef"]),
            "surrogate": surrogate(log_ratio_clip=hyper["log_ratio_clip"]),
            "dual": surrogate(dual_clip=hyper["dual_clip"]),
            "value": losses.clipped_value_loss(x, y, z, value_clip=hyper["value_clip"], mask=mask),
            "fractions": losses.clip_fractions(x, y, z, mask=mask, **clips),
            "log_probs": losses.token_log_probs(
                hidden, matrix, jnp.zeros((1, 3), jnp.int32), temperature=hyper["temperature"]
            ),
            "z_loss": losses.cross_entropy(x, logsumexp=y, z_loss=hyper["z_loss"], mask=mask),
            "weights": losses.token_weights(
                mask, mode="seq_mean_token_sum_norm", norm=hyper["norm"]
            ),
            "controller": state,
        }
        return jnp.stack([jnp.sum(v) for v in jax.tree.leaves(outputs)])

    usual = {
        "gamma": 0.9, "lam": 0.8, "kl_coef": 0.1, "clip_low": 0.1, "clip_high": 0.2,
        "dual_clip": 1.1, "value_clip": 0.05, "log_ratio_clip": 0.4, "temperature": 1.0,
        "z_loss": 0.1, "norm": 4.0, "target": 0.1, "horizon": 1000.0,
    }  # fmt: skip
    usual = {name: jnp.float32(value) for name, value in usual.items()}
    base = step(usual)
    assert np.isfinite(base).all()
    for name in usual:
        changed = step(usual | {name: usual[name] * 0.5})
        assert (changed != base).any(), name
    zero_is_fine = set(usual) - {"temperature", "norm", "target", "horizon"}
    assert np.isfinite(step(usual | dict.fromkeys(zero_is_fine, jnp.float32(0)))).all()
    assert len(traces) == 1
