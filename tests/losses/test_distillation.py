"""Exact divergences: numpy in float64, blocks equal dense, gradients, memory, masked garbage."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from jaxrlhf import losses
from jaxrlhf.losses.distillation import DIVERGENCES

B, T, D, V = 2, 11, 5, 13
KINDS = [(kind, 0.3 if kind == "jensen_shannon" else None) for kind in DIVERGENCES]
kinds = pytest.mark.parametrize(("kind", "mix"), KINDS)


def sides(rng, length: int = T) -> list[np.ndarray]:
    """Hidden states and matrices of policy and reference; the reference is wider."""
    shapes = [(B, length, D), (V, D), (B, length, D + 2), (V, D + 2)]
    return [rng.normal(size=shape) for shape in shapes]


def softmax(z):
    weights = np.exp(z - z.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def kl(p, q):
    return np.sum(p * np.log(np.where(p > 0, p, 1) / np.where(p > 0, q, 1)), axis=-1)


def oracle(logits, ref_logits, kind, mix, temperature=1.0):
    p, q = softmax(logits / temperature), softmax(ref_logits / temperature)
    m = 0.5 * (p + q) if mix is None else mix * q + (1 - mix) * p
    weight = 0.5 if mix is None else mix
    values = {
        "reverse_kl": kl(p, q),
        "forward_kl": kl(q, p),
        "jensen_shannon": weight * kl(q, m) + (1 - weight) * kl(p, m),
    }
    out = np.zeros(logits.shape[:-1])
    out[..., 1:] = values[kind][..., :-1]
    return out


@kinds
def test_dense_equals_numpy_and_its_gradient_the_difference_quotient(rng, kind, mix):
    logits, ref_logits = rng.normal(size=(2, 3, 4, 6))
    logits[0, 0, 2] = ref_logits[0, 0, 2] = -np.inf  # forbidden on both sides
    probe = rng.normal(size=(3, 4))
    arguments = {"kind": kind, "mix": mix, "temperature": 0.7}

    def total(logits, ref_logits):
        out = losses.dense_divergence(logits, ref_logits, **arguments)
        return jnp.sum(out * probe), out

    with jax.enable_x64(True):
        (_, out), grads = jax.value_and_grad(total, (0, 1), has_aux=True)(logits, ref_logits)
    out, grad, ref_grad = map(np.asarray, (out, *grads))
    np.testing.assert_allclose(out, oracle(logits, ref_logits, kind, mix, 0.7), rtol=1e-12)
    assert (out[:, 1:] > 0).all()
    assert (ref_grad == 0).all()
    for index in [(0, 0, 1), (0, 0, 2), (1, 2, 3), (2, 3, 0)]:
        ends = []
        for step in (1e-6, -1e-6):
            moved = logits.copy()
            moved[index] += step
            ends.append(np.sum(probe * oracle(moved, ref_logits, kind, mix, 0.7)))
        np.testing.assert_allclose(grad[index], (ends[0] - ends[1]) / 2e-6, atol=1e-8)


@kinds
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_blocks_equal_dense(rng, kind, mix, softcap):
    """Values and gradients by hidden and matrix, with a last block that overlaps the one before."""
    arrays = sides(rng)
    segments = np.array([[1] * 4 + [2] * 7, [1] * T])
    probe = rng.normal(size=(B, T))
    arguments = {"kind": kind, "mix": mix, "temperature": 1.3}

    def cap(logits, bound):
        return logits if bound is None else bound * jnp.tanh(logits / bound)

    def dense(hidden, matrix, ref_hidden, ref_matrix):
        logits = cap(hidden @ matrix.T, softcap)
        return losses.dense_divergence(logits, ref_hidden @ ref_matrix.T, segments, **arguments)

    def blocks(*arrays):
        return losses.token_divergence(
            *arrays, segments, softcap=softcap, block_size=4, **arguments
        )

    def run(function):
        def total(arrays):
            out = function(*arrays)
            return jnp.sum(out * probe), out

        with jax.enable_x64(True):
            (_, out), grads = jax.jit(jax.value_and_grad(total, has_aux=True))(arrays)
        return np.asarray(out), [np.asarray(grad) for grad in grads]

    (expected, expected_grads), (ours, grads) = run(dense), run(blocks)
    np.testing.assert_allclose(ours, expected, rtol=1e-11)
    assert (ours[:, 0] == 0).all()
    assert ours[0, 4] == 0
    for grad, expected_grad in zip(grads[:2], expected_grads[:2], strict=True):
        np.testing.assert_allclose(grad, expected_grad, rtol=1e-10, atol=1e-12)
    assert all((grad == 0).all() for grad in grads[2:])


def test_equal_models_do_not_diverge_and_estimates_agree_in_expectation(rng):
    """E over the policy's tokens of k1 and k3 is the reverse KL; JS is symmetric at mix 1/2."""
    hidden, matrix, *_ = sides(rng)
    for kind in DIVERGENCES:
        same = losses.token_divergence(hidden, matrix, hidden, matrix, kind=kind, block_size=4)
        np.testing.assert_allclose(same, 0, atol=1e-6)
    logits, ref_logits = rng.normal(size=(2, 1, 2, V))
    with jax.enable_x64(True):
        exact = losses.dense_divergence(logits, ref_logits)[0, 1]
        log_p, log_q = (jax.nn.log_softmax(x[0, 0]) for x in (logits, ref_logits))
        for kind in ("k1", "k3"):
            mean = jnp.sum(jnp.exp(log_p) * losses.kl_estimate(log_p, log_q, kind=kind))
            np.testing.assert_allclose(mean, exact, rtol=1e-12)
        js = functools.partial(losses.dense_divergence, kind="jensen_shannon")
        np.testing.assert_allclose(js(logits, ref_logits), js(ref_logits, logits), rtol=1e-12)
        assert js(logits, ref_logits)[0, 1] < np.log(2)
        forward = losses.dense_divergence(ref_logits, logits, kind="forward_kl")[0, 1]
        np.testing.assert_allclose(forward, exact, rtol=1e-12)


@pytest.mark.parametrize("softcap", [None, 2.0])
@kinds
def test_dead_positions_may_hold_anything(rng, kind, mix, softcap):
    hidden, matrix, ref_hidden, ref_matrix = (x.astype(np.float32) for x in sides(rng))
    mask = np.ones((B, T), bool)
    mask[0, 3] = mask[1, 8:] = False
    dirty, ref_dirty = hidden.copy(), ref_hidden.copy()
    dirty[0, 2], dirty[1, 7:], ref_dirty[1, 8] = np.nan, np.inf, np.nan

    def total(hidden, matrix, ref_hidden):
        out = losses.token_divergence(
            hidden, matrix, ref_hidden, ref_matrix, kind=kind, mix=mix, softcap=softcap,
            block_size=4,
        )  # fmt: skip
        return losses.aggregate(out, mask, mode="token_mean")

    compute = jax.jit(jax.value_and_grad(total, (0, 1)))
    value, grads = compute(hidden, matrix, ref_hidden)
    dirty_value, dirty_grads = compute(dirty, matrix, ref_dirty)
    np.testing.assert_array_equal(value, dirty_value)
    assert np.isfinite(value)
    for grad, dirty_grad in zip(grads, dirty_grads, strict=True):
        np.testing.assert_array_equal(grad, dirty_grad)


def test_extreme_logits_are_finite(rng):
    logits = np.float32(1e3) * rng.choice([-1, 1], size=(2, 2, 3, 6)).astype(np.float32)
    for kind in DIVERGENCES:
        value, grad = jax.value_and_grad(
            lambda z, kind=kind: jnp.sum(losses.dense_divergence(z, logits[1], kind=kind))
        )(logits[0])
        assert np.isfinite(value)
        assert np.isfinite(grad).all()


def test_bfloat16_vmap_and_shard_map(rng):
    arrays = [x.astype(np.float32) for x in sides(rng)]
    divergence = functools.partial(losses.token_divergence, block_size=4)
    low = [jnp.asarray(x, jnp.bfloat16) for x in arrays]
    value, grads = jax.value_and_grad(lambda x: jnp.sum(divergence(*x)))(low)
    exact = jnp.sum(divergence(*(x.astype(jnp.float32) for x in low)))
    assert value.dtype == jnp.float32
    assert grads[0].dtype == grads[1].dtype == jnp.bfloat16
    np.testing.assert_allclose(value, exact, rtol=1e-5)

    plain = divergence(*arrays)
    mapped = jax.vmap(divergence, in_axes=(0, None, 0, None))(*arrays)
    np.testing.assert_allclose(mapped, plain, rtol=2e-5, atol=1e-6)

    mesh = jax.make_mesh((1,), ("rows",), axis_types=(AxisType.Auto,))
    rows, whole = PartitionSpec("rows"), PartitionSpec()

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(rows, whole, rows, whole), out_specs=(rows, whole)
    )
    def sharded(*arrays):
        def total(matrix):
            out = divergence(arrays[0], matrix, *arrays[2:])
            return jnp.sum(out), out

        d_matrix, out = jax.grad(total, has_aux=True)(arrays[1])
        return out, d_matrix

    out, d_matrix = jax.jit(sharded)(*arrays)
    np.testing.assert_allclose(out, plain, rtol=2e-5, atol=1e-6)
    expected = jax.grad(lambda m: jnp.sum(divergence(arrays[0], m, *arrays[2:])))(arrays[1])
    np.testing.assert_allclose(d_matrix, expected, rtol=1e-4, atol=1e-5)


def test_memory_does_not_grow_with_time_times_vocabulary():
    batch_size, hidden_size, vocabulary = 2, 32, 4096

    def total(hidden, matrix, ref_hidden, ref_matrix):
        return jnp.sum(losses.token_divergence(hidden, matrix, ref_hidden, ref_matrix))

    def temporaries(length: int) -> int:
        states = jax.ShapeDtypeStruct((batch_size, length, hidden_size), jnp.float32)
        matrix = jax.ShapeDtypeStruct((vocabulary, hidden_size), jnp.float32)
        compiled = jax.jit(jax.value_and_grad(total, (0, 1))).lower(states, matrix, states, matrix)
        return compiled.compile().memory_analysis().temp_size_in_bytes

    short, long = temporaries(256), temporaries(2048)
    print(f"temporary bytes: {short} at T=256, {long} at T=2048")
    assert short > batch_size * 128 * vocabulary * 4  # a block of logits is counted
    assert long - short <= 4 * 4 * batch_size * (2048 - 256) * hidden_size


def test_wrong_arguments_are_named(rng):
    hidden, matrix, ref_hidden, ref_matrix = sides(rng)
    with pytest.raises(ValueError, match="ref_output_matrix has 12 rows"):
        losses.token_divergence(hidden, matrix, ref_hidden, ref_matrix[:-1])
    with pytest.raises(ValueError, match="ref_hidden"):
        losses.token_divergence(hidden, matrix, ref_hidden[:, 1:], ref_matrix)
    with pytest.raises(ValueError, match="output_matrix has shape"):
        losses.token_divergence(hidden, matrix.T, ref_hidden, ref_matrix)
    with pytest.raises(ValueError, match="mix has no effect"):
        losses.token_divergence(hidden, matrix, ref_hidden, ref_matrix, mix=0.5)
    with pytest.raises(ValueError, match="jensen_shannon"):
        losses.dense_divergence(hidden, hidden, kind="tv")
    with pytest.raises(ValueError, match="ref_logits"):
        losses.dense_divergence(hidden, hidden[:1])
    one = losses.token_divergence(hidden[:, :1], matrix, ref_hidden[:, :1], ref_matrix)
    np.testing.assert_array_equal(one, np.zeros((B, 1)))
