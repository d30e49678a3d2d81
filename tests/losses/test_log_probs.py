"""Block log-probs against the plain softmax: values, gradients, memory, what is compiled."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from jaxrlhf import losses

B, D, V, BLOCK = 2, 5, 11, 4


def naive(hidden, matrix, tokens, segment_ids, temperature, softcap):
    """The definition, with everything in memory; position t - 1 speaks about token t."""
    logits = hidden[:, :-1] @ matrix.T
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    log_softmax = jax.nn.log_softmax(logits / temperature)
    log_probs = jnp.take_along_axis(log_softmax, tokens[:, 1:, None], -1)[..., 0]
    logsumexp = jax.nn.logsumexp(logits / temperature, axis=-1)
    entropy = -jnp.sum(jnp.exp(log_softmax) * log_softmax, axis=-1)
    same = segment_ids[:, 1:] == segment_ids[:, :-1]
    return losses.TokenLogProbs(
        *(jnp.pad(jnp.where(same, x, 0), ((0, 0), (1, 0))) for x in (log_probs, logsumexp, entropy))
    )


def dense(hidden, matrix, tokens, segment_ids, temperature, softcap):
    logits = hidden @ matrix.T
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    return losses.dense_token_log_probs(logits, tokens, segment_ids, temperature=temperature)


def fused(hidden, matrix, tokens, segment_ids, temperature, softcap):
    return losses.token_log_probs(
        hidden, matrix, tokens, segment_ids,
        temperature=temperature, softcap=softcap, block_size=BLOCK,
    )  # fmt: skip


@functools.cache
def value_and_gradients(function, softcap: float | None):
    """stats, and the gradients by hidden and matrix of a sum of all three with random weights."""

    def total(hidden, matrix, tokens, segment_ids, temperature, probes):
        stats = function(hidden, matrix, tokens, segment_ids, temperature, softcap)
        return sum(jnp.vdot(x, probe) for x, probe in zip(stats, probes, strict=True)), stats

    return jax.jit(jax.grad(total, (0, 1), has_aux=True))


def batch(rng, length: int, dtype=np.float64):
    hidden = rng.normal(size=(B, length, D)).astype(dtype)
    matrix = rng.normal(size=(V, D)).astype(dtype)
    tokens = rng.integers(0, V, size=(B, length)).astype(np.int32)
    segment_ids = np.cumsum(rng.random((B, length)) < 0.2, axis=1).astype(np.int32)
    probes = rng.normal(size=(3, B, length)).astype(dtype)
    return hidden, matrix, tokens, segment_ids, probes


def relative(x, y) -> float:
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    return np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-30)


@pytest.mark.parametrize(
    ("function", "length", "softcap", "x64"),
    [
        (fused, 2, None, True),  # one position
        (fused, 9, None, True),  # two full blocks
        (fused, 12, 3.0, True),  # three blocks, of which the last overlaps
        (fused, 12, None, False),
        (fused, 9, 3.0, False),
        (dense, 9, 3.0, True),
        (dense, 9, None, False),
    ],
)
def test_equals_the_plain_softmax(rng, function, length, softcap, x64):
    hidden, matrix, tokens, segment_ids, probes = batch(rng, length, "f8" if x64 else "f4")
    with jax.enable_x64(x64):
        for temperature in (0.5, 1.0, 1.5):
            arguments = (hidden, matrix, tokens, segment_ids, temperature, probes)
            gradients, stats = value_and_gradients(function, softcap)(*arguments)
            expected_gradients, expected = value_and_gradients(naive, softcap)(*arguments)
            tolerance = 1e-12 if x64 else 2e-6
            assert all(x.dtype == hidden.dtype for x in (*stats, *gradients))
            for x, y in zip(stats, expected, strict=True):
                np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)
            for x, y in zip(gradients, expected_gradients, strict=True):
                assert relative(x, y) < tolerance


@hypothesis.settings(max_examples=10, deadline=None)
@hypothesis.given(length=st.integers(1, 10), block=st.integers(1, 12))
def test_blocks_cover_every_position_once(length, block):
    """Sizes are a shape: checked on the plan alone, without compiling a program for each."""
    from jaxrlhf.losses.log_probs import over_blocks

    size, starts, overlaps = over_blocks(length, block)
    counted = [
        int(start) + i
        for start, overlap in zip(starts, overlaps, strict=True)
        for i in range(int(overlap), size)
    ]
    assert size <= block
    assert counted == list(range(length))


def test_no_segments_any_leading_axes_and_a_single_token(rng):
    hidden, matrix, tokens, _, _ = batch(rng, 9, np.float32)
    run = jax.jit(functools.partial(losses.token_log_probs, block_size=BLOCK))
    whole = run(hidden, matrix, tokens)
    ones = run(hidden, matrix, tokens, np.ones_like(tokens))
    stacked = run(hidden[:, None], matrix, tokens[:, None])
    row = run(hidden[1], matrix, tokens[1])
    for x, y, z, r in zip(whole, ones, stacked, row, strict=True):
        np.testing.assert_array_equal(x, y)
        np.testing.assert_array_equal(x, z[:, 0])
        np.testing.assert_allclose(x[1], r, rtol=1e-5, atol=1e-6)
        assert (x[:, 0] == 0).all()
    alone = losses.token_log_probs(hidden[:, :1], matrix, tokens[:, :1])
    assert all((x.shape, x.dtype) == ((B, 1), np.float32) and not x.any() for x in alone)


def test_bfloat16_inputs_are_summed_in_float32(rng):
    """Values to float32's error, gradients to bfloat16's, also over hundreds of blocks."""
    length = 402
    hidden, matrix, tokens, segment_ids, _ = batch(rng, length, np.float64)
    low = [jnp.asarray(x, jnp.bfloat16) for x in (hidden, matrix)]
    exact = [np.asarray(x, np.float64) for x in low]
    probes = np.zeros((3, B, length))
    probes[0] = 1.0  # all of one sign: a bfloat16 sum over the blocks would stall
    gradients, stats = value_and_gradients(fused, None)(
        *low, tokens, segment_ids, 1.0, probes.astype(np.float32)
    )
    with jax.enable_x64(True):
        expected_gradients, expected = jax.tree.map(
            np.asarray,
            value_and_gradients(naive, None)(*exact, tokens, segment_ids, 1.0, probes),
        )
    for x, y in zip(stats, expected, strict=True):
        assert x.dtype == jnp.float32
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)
    for x, y in zip(gradients, expected_gradients, strict=True):
        assert x.dtype == jnp.bfloat16
        assert relative(x, y) < 4e-3


def test_bfloat16_hidden_with_float32_matrix(rng):
    hidden, matrix, tokens, segment_ids, probes = batch(rng, 9, np.float32)
    low = jnp.asarray(hidden, jnp.bfloat16)
    arguments = (matrix, tokens, segment_ids, 1.0, probes)
    mixed, stats = value_and_gradients(fused, None)(low, *arguments)
    expected, same = value_and_gradients(fused, None)(low.astype(np.float32), *arguments)
    assert mixed[0].dtype == jnp.bfloat16
    assert mixed[1].dtype == stats.log_probs.dtype == jnp.float32
    np.testing.assert_allclose(stats.log_probs, same.log_probs, rtol=1e-6)
    np.testing.assert_allclose(mixed[1], expected[1], rtol=1e-5, atol=1e-6)


def test_extreme_logits():
    hidden = np.zeros((1, 3, 2), np.float32)
    hidden[0, 0], hidden[0, 1] = [1e4, 0], [0, 0]
    matrix = np.array([[1, 0], [-1, 0], [0, 1], [0, -1]], np.float32)
    tokens = np.array([[0, 0, 3]], np.int32)
    probes = np.ones((3, 1, 3), np.float32)
    gradients, stats = value_and_gradients(fused, None)(
        hidden, matrix, tokens, np.ones_like(tokens), 1.0, probes
    )
    np.testing.assert_allclose(stats.log_probs[0], [0, 0, -np.log(4)], atol=1e-6)
    np.testing.assert_allclose(stats.entropy[0], [0, 0, np.log(4)], atol=1e-6)
    np.testing.assert_allclose(stats.logsumexp[0], [0, 1e4, np.log(4)], rtol=1e-6)
    assert all(np.isfinite(x).all() for x in gradients)


def test_forbidden_tokens_in_dense_logits(rng):
    """A logit of -inf: as if the token were not there, in value and gradient."""
    logits = rng.normal(size=(1, 3, 4)).astype(np.float32)
    tokens = np.array([[0, 2, 1]], np.int32)
    extended = np.concatenate([logits, np.full((1, 3, 2), -np.inf, np.float32)], axis=-1)

    @jax.jit
    def run(logits):
        def total(logits):
            stats = losses.dense_token_log_probs(logits, tokens)
            return sum(jnp.sum(jnp.square(x)) for x in stats), stats

        return jax.grad(total, has_aux=True)(logits)

    (gradient, stats), (short, expected) = run(extended), run(logits)
    for x, y in zip(stats, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)
    np.testing.assert_allclose(gradient[..., :4], short, rtol=1e-5, atol=1e-6)
    assert (gradient[..., 4:] == 0).all()


def dense_from_logits(logits, matrix, tokens, segment_ids, temperature, softcap):
    del matrix, softcap
    return losses.dense_token_log_probs(logits, tokens, segment_ids, temperature=temperature)


@pytest.mark.parametrize("function", [fused, dense_from_logits])
@hypothesis.settings(max_examples=10, deadline=None)
@hypothesis.given(seed=st.integers(0, 2**32 - 1), garbage=st.sampled_from([np.nan, np.inf, 1e38]))
def test_positions_that_do_not_matter_do_not_leak(function, seed, garbage):
    """The last of a row, the last of a segment, and those before a token without weight."""
    rng = np.random.default_rng(seed)
    hidden, matrix, tokens, segment_ids, probes = batch(rng, 9)
    hidden = hidden if function is fused else rng.normal(size=(B, 9, V))
    masked = rng.random((B, 9)) < 0.4
    probes[:, masked] = 0
    unused = np.ones((B, 9), bool)
    unused[:, :-1] = masked[:, 1:] | (segment_ids[:, 1:] != segment_ids[:, :-1])
    dirty = np.where(unused[..., None], garbage, hidden)
    with jax.enable_x64(True):
        run = weighted_gradients(function)
        expected = run(hidden, matrix, tokens, segment_ids, probes)
        found = run(dirty, matrix, tokens, segment_ids, probes)
        found, expected = jax.tree.map(np.asarray, (found, expected))
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)
    assert (found[1][unused] == 0).all()


@functools.cache
def weighted_gradients(function):
    def total(hidden, matrix, tokens, segment_ids, probes):
        stats = function(hidden, matrix, tokens, segment_ids, 0.7, 3.0)
        return sum(losses.weighted_sum(x, w) for x, w in zip(stats, probes, strict=True))

    def flat(*arguments):
        value, gradients = jax.value_and_grad(total, (0, 1))(*arguments)
        return value, *gradients

    return jax.jit(flat)


def test_temperature_is_traced_and_not_differentiated(rng):
    hidden, matrix, tokens, segment_ids, _ = batch(rng, 9, np.float32)
    traces = []

    @jax.jit
    def run(temperature, function=fused):
        traces.append(1)
        return tuple(
            jax.value_and_grad(
                lambda t, f=f: jnp.sum(f(hidden, matrix, tokens, segment_ids, t, None).log_probs)
            )(temperature)
            for f in (fused, dense)
        )

    results = [run(jnp.float32(t)) for t in (0.5, 1.0, 1.5)]
    assert len(traces) == 1
    assert len({float(x[0][0]) for x in results}) == 3
    assert all(gradient == 0 for x in results for _, gradient in x)


def test_memory_does_not_grow_with_the_vocabulary():
    """The compiled value and gradient: T from 256 to 2048 adds at most 4 B T D elements."""
    batch_size, hidden_size, vocabulary = 2, 32, 4096

    def total(hidden, matrix, tokens, weights):
        stats = losses.token_log_probs(hidden, matrix, tokens, temperature=0.7)
        return losses.weighted_sum(stats.entropy * 0.01 - stats.log_probs, weights)

    def temporaries(function, length: int) -> int:
        shapes = [
            jax.ShapeDtypeStruct((batch_size, length, hidden_size), jnp.float32),
            jax.ShapeDtypeStruct((vocabulary, hidden_size), jnp.float32),
            jax.ShapeDtypeStruct((batch_size, length), jnp.int32),
            jax.ShapeDtypeStruct((batch_size, length), jnp.float32),
        ]
        compiled = jax.jit(function).lower(*shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    for function in (total, jax.value_and_grad(total, (0, 1))):
        short, long = temporaries(function, 256), temporaries(function, 2048)
        print(f"temporary bytes: {short} at T=256, {long} at T=2048")
        assert short > batch_size * 128 * vocabulary * 4  # a block of logits is counted
        assert long - short <= 4 * 4 * batch_size * (2048 - 256) * hidden_size


def test_unused_entropy_costs_nothing():
    """XLA drops the entropy from the forward and the backward loop when nobody reads it."""
    hidden, matrix = jnp.zeros((B, 300, D)), jnp.zeros((V, D))
    tokens = jnp.zeros((B, 300), jnp.int32)

    def flops(*fields) -> float:
        def total(hidden, matrix):
            stats = losses.token_log_probs(hidden, matrix, tokens)
            return sum(jnp.sum(getattr(stats, field)) for field in fields)

        lowered = jax.jit(jax.value_and_grad(total, (0, 1))).lower(hidden, matrix)
        return lowered.compile().cost_analysis()["flops"]

    block = B * 100 * V  # 299 positions are 3 blocks of 100; a loop's body is counted once
    assert flops("log_probs", "entropy") - flops("log_probs") > 4 * block


def test_composes_with_vmap_scan_remat_and_shard_map(rng):
    hidden, matrix, tokens, segment_ids, _ = batch(rng, 9, np.float32)

    def total(hidden, matrix, tokens, segment_ids):
        stats = fused(hidden, matrix, tokens, segment_ids, 0.7, None)
        return jnp.sum(stats.log_probs) + jnp.sum(stats.entropy)

    arguments = (hidden, matrix, tokens, segment_ids)
    gradient = jax.grad(total, (0, 1))
    expected = jax.jit(gradient)(*arguments)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    rows, whole = PartitionSpec("data"), PartitionSpec()

    @jax.jit
    def by_scan(hidden, matrix, tokens, segment_ids):
        def step(d_matrix, row):
            h, t, s = (x[None] for x in row)
            d_hidden, d_rows = gradient(h, matrix, t, s)
            return d_matrix + d_rows, d_hidden[0]

        d_matrix, d_hidden = jax.lax.scan(
            step, jnp.zeros_like(matrix), (hidden, tokens, segment_ids)
        )
        return d_hidden, d_matrix

    @jax.jit
    def by_vmap(hidden, matrix, tokens, segment_ids):
        d_hidden, d_matrix = jax.vmap(gradient, (0, None, 0, 0))(
            hidden[:, None], matrix, tokens[:, None], segment_ids[:, None]
        )
        return d_hidden[:, 0], d_matrix.sum(0)

    sharded = jax.shard_map(
        gradient, mesh=mesh, in_specs=(rows, whole, rows, rows), out_specs=(rows, whole)
    )
    remat = jax.grad(jax.checkpoint(total), (0, 1))
    for other in (by_scan, by_vmap, jax.jit(remat), jax.jit(sharded)):
        for x, y in zip(other(*arguments), expected, strict=True):
            assert relative(x, y) < 1e-6


def test_align_to_tokens_rolls_scalars():
    scalars = jnp.array([[1.0, 2, jnp.nan, 4, 5]])
    np.testing.assert_array_equal(losses.align_to_tokens(scalars), [[0, 1, 2, np.nan, 4]])
    segment_ids = jnp.array([[1, 1, 1, 2, 2]])
    found = losses.align_to_tokens(scalars, segment_ids)
    np.testing.assert_array_equal(found, [[0, 1, 2, 0, 4]])
    gradient = jax.grad(lambda x: jnp.sum(losses.align_to_tokens(x, segment_ids) ** 2))(scalars)
    np.testing.assert_array_equal(gradient, [[2, 4, 0, 8, 0]])


def test_errors_say_what_to_change():
    hidden, matrix = jnp.ones((2, 3, 4)), jnp.ones((7, 4))
    tokens = jnp.ones((2, 3), jnp.int32)
    with pytest.raises(ValueError, match=r"hidden has shape \(2, 3, 4\)"):
        losses.token_log_probs(hidden, matrix, tokens[:1])
    with pytest.raises(ValueError, match=r"output_matrix has shape \(4, 7\): it must be \[V, 4\]"):
        losses.token_log_probs(hidden, matrix.T, tokens)
    with pytest.raises(ValueError, match="segment_ids"):
        losses.token_log_probs(hidden, matrix, tokens, tokens[0])
    with pytest.raises(ValueError, match="block_size"):
        losses.token_log_probs(hidden, matrix, tokens, block_size=0)
    with pytest.raises(ValueError, match="logits"):
        losses.dense_token_log_probs(hidden[0], tokens)
    with pytest.raises(ValueError, match="segment_ids"):
        losses.align_to_tokens(hidden[..., 0], tokens[0])
