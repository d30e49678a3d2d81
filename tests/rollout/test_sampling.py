"""Sampling against exact float64 probabilities: distribution, cuts, log-probs, edges, keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from jaxrlhf.rollout import sampling

LAST = 1 - 2.0**-24  # the largest uniform there is


def oracle(logits, temperature, top_k=None, top_p=None):
    """(probabilities f64[V], ids in CDF order) of one row, from the definitions."""
    logits = np.asarray(logits, np.float64)
    order = np.arange(len(logits))
    if top_k is not None and top_k >= len(logits):
        top_k = None
    if top_k is not None or top_p is not None:
        order = np.argsort(-logits, kind="stable")[:top_k]
    weights = np.exp((logits[order] - logits[order].max()) / temperature)
    probs = weights / weights.sum()
    if top_p is not None and top_p < 1:
        probs = np.where(np.cumsum(probs) - probs < top_p, probs, 0)
        probs /= probs.sum()
    full = np.zeros(len(logits))
    full[order] = probs
    return full, order


# Jitted: op by op, every prefix sum compiles a dozen small programs.
sample = jax.jit(sampling.sample, static_argnames="top_k")
cdf_gap = jax.jit(sampling.cdf_gap, static_argnames="top_k")
row_keys = jax.jit(sampling.row_keys)
token_uniforms = jax.jit(sampling.token_uniforms)


def draw(logits, uniforms, temperature, top_k=None, top_p=None):
    logits = np.broadcast_to(np.asarray(logits, np.float32), (len(uniforms), len(logits)))
    uniforms = np.asarray(uniforms, np.float32)
    out = sample(logits, uniforms, temperature=temperature, top_k=top_k, top_p=top_p)
    return tuple(np.asarray(x) for x in out)


CASES = [
    (1.0, None, None),
    (0.5, None, None),
    (1.5, None, None),
    (1.0, 20, None),
    (1.0, None, 0.8),
    (1.3, None, 1.0),
    (0.7, 20, 0.9),
]


def p_value(counts, probs):
    """Chi-square against exact probabilities, cells of fewer than 5 expected taken together."""
    expected = counts.sum() * probs
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    used = expected > 0
    statistic = ((observed - expected)[used] ** 2 / expected[used]).sum()
    return stats.chi2.sf(statistic, used.sum() - 1)


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), CASES)
def test_frequencies_follow_the_exact_probabilities(rng, temperature, top_k, top_p):
    logits = (2 * rng.standard_normal(90)).astype(np.float32)
    logits[[3, 17]] = -np.inf
    rows = 60_000
    keys = row_keys(sampling.step_key(1, 2), jnp.arange(rows) // 4, jnp.arange(rows) % 4)
    tokens, _ = draw(logits, token_uniforms(keys, 5), temperature, top_k, top_p)
    probs, _ = oracle(logits, temperature, top_k, top_p)
    counts = np.bincount(tokens, minlength=len(logits))
    assert counts[probs == 0].sum() == 0
    assert p_value(counts, probs) > 1e-3
    # The test can fail: a temperature 10 % off is seen.
    assert p_value(counts, oracle(logits, temperature * 1.1, top_k, top_p)[0]) < 1e-3


def test_consecutive_tokens_of_a_row_are_independent():
    keys = row_keys(sampling.step_key(0, 0), jnp.arange(20_000), jnp.zeros(20_000, int))
    cells = [np.asarray(token_uniforms(keys, t) * 8).astype(int) for t in (0, 1)]
    table = np.bincount(cells[0] * 8 + cells[1], minlength=64)
    assert stats.chisquare(table).pvalue > 1e-3


logit = st.one_of(
    st.integers(-512, 512).map(lambda i: i / 64),  # no two that differ by rounding alone
    st.sampled_from([-np.inf, 0.0, 1.0, 1e4, -1e4, 88.0, -104.0]),
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    logits=st.lists(logit, min_size=1, max_size=40).filter(lambda x: max(x) > -np.inf),
    temperature=st.sampled_from([0.01, 0.5, 1.0, 1.5, 10.0]),
    top_k=st.sampled_from([None, 3]),
    top_p=st.sampled_from([None, 0.05, 0.3, 0.90001, 1.0]),
)
def test_token_and_log_prob_agree_with_float64(logits, temperature, top_k, top_p):
    logits = np.asarray(logits + [-np.inf] * (40 - len(logits)), np.float32)
    uniforms = np.append(np.linspace(0, 0.999, 13, dtype=np.float32), np.float32(LAST))
    tokens, log_probs = draw(logits, uniforms, temperature, top_k, top_p)
    probs, order = oracle(logits, temperature, top_k, top_p)
    if top_p is not None and top_p < 1:
        whole, _ = oracle(logits, temperature, top_k)
        before = np.cumsum(whole[order]) - whole[order]
        if np.abs(before - top_p).min() < 1e-6:  # float32 cannot tell on which side of the cut
            return
    ends = np.cumsum(probs[order])
    place = np.array([list(order).index(t) for t in tokens])
    assert (probs[tokens] > 0).all()
    assert (uniforms < ends[place] + 1e-6).all()
    assert (uniforms > ends[place] - probs[tokens] - 1e-6).all()
    # Dividing 1e4 by a small temperature in float32 is off by 1e4 / T * 2^-24.
    scale = np.abs(logits[np.isfinite(logits)]).max() / temperature
    np.testing.assert_allclose(log_probs, np.log(probs[tokens]), atol=1e-5 + scale * 2e-7)


@pytest.mark.parametrize("size", [1, 33, 4097])
@pytest.mark.parametrize("kind", ["ends", "only_first", "only_last", "every_other", "tail"])
def test_no_token_of_probability_zero_at_the_ends_of_the_cdf(size, kind):
    logits = np.zeros(size, np.float32)
    allowed = {
        "ends": np.arange(size) == size // 2,
        "only_first": np.arange(size) == 0,
        "only_last": np.arange(size) == size - 1,
        "every_other": np.arange(size) % 2 == 0,
        "tail": np.arange(size) <= 2 * size // 3,
    }[kind]
    logits[~allowed] = -np.inf
    uniforms = np.array([0, 2.0**-24, 0.5, 1 - 2.0**-20, 1 - 2.0**-23, LAST, 1.0], np.float32)
    for top_p in (None, 0.999999, 1.0) if size == 33 else (None,):
        tokens, log_probs = draw(logits, uniforms, 1.0, top_p=top_p)
        assert allowed[tokens].all()
        if top_p != 0.999999:
            np.testing.assert_allclose(log_probs, -np.log(allowed.sum()), rtol=1e-5, atol=1e-6)


def test_float_rounding_never_reaches_an_excluded_token(rng):
    """Sums of many unequal masses, drawn at the block boundaries where a prefix sum may wobble."""
    logits = (4 * rng.standard_normal(3000)).astype(np.float32)
    logits[rng.random(3000) < 0.6] = -np.inf
    ends = np.cumsum(oracle(logits, 1.0)[0])
    uniforms = np.clip(ends.astype(np.float32), 0, LAST)
    tokens, log_probs = draw(logits, uniforms, 1.0)
    assert np.isfinite(logits[tokens]).all()
    assert np.isfinite(log_probs).all()


@pytest.mark.parametrize("offset", [-2e-6, 2e-6])
@pytest.mark.parametrize("kept", [1, 2, 5, 8])
def test_top_p_boundary(offset, kept):
    probs = np.array([0.05, 0.3, 0.04, 0.2, 0.25, 0.06, 0.07, 0.03])
    top_p = np.sort(probs)[::-1][:kept].sum() + offset
    expected, _ = oracle(np.log(probs), 1.0, top_p=top_p)
    count = min(kept + (offset > 0), 8)
    assert (expected > 0).sum() == count
    tokens, log_probs = draw(np.log(probs), np.linspace(0, LAST, 4001), 1.0, top_p=top_p)
    assert set(tokens) == set(np.flatnonzero(expected))
    np.testing.assert_allclose(log_probs, np.log(expected[tokens]), atol=1e-5)


def test_cuts_keep_the_lower_id_of_equal_logits():
    logits = np.array([0.0, 1.0, 1.0, 1.0], np.float32)
    uniforms = np.linspace(0, LAST, 101)
    assert set(draw(logits, uniforms, 1.0, top_k=2)[0]) == {1, 2}
    assert set(draw(logits, uniforms, 1.0, top_p=0.5)[0]) == {1, 2}
    assert set(draw(logits, uniforms, 0.0)[0]) == {1}


@pytest.mark.parametrize("cuts", [{}, {"top_k": 3}, {"top_p": 0.5}])
def test_greedy_is_the_most_likely_token_and_no_nan(rng, cuts):
    logits = jnp.asarray(5 * rng.standard_normal((6, 130)), jnp.float32)
    logits = logits.at[2, 7].set(1e30).at[3].set(-jnp.inf).at[3, 9].set(-4.0)
    uniforms = jnp.linspace(0, LAST, 6)
    tokens, log_probs = sample(logits, uniforms, temperature=0.0, **cuts)
    np.testing.assert_array_equal(tokens, np.argmax(logits, axis=-1))
    _, at_one = sample(logits, jnp.zeros(6), temperature=1.0, top_k=1)
    assert np.isfinite(log_probs).all()
    np.testing.assert_array_equal(at_one, 0)
    if not cuts:
        expected = np.max(jax.nn.log_softmax(logits), axis=-1)
        np.testing.assert_allclose(log_probs, expected, atol=1e-5)
    tiny, _ = sample(logits, uniforms, temperature=1e-30, **cuts)
    np.testing.assert_array_equal(tiny, tokens)


def test_one_program_for_every_temperature_and_top_p():
    traces = []

    @jax.jit
    def run(temperature, top_p):
        traces.append(1)
        logits = jnp.arange(40.0)[None] / 10
        kwargs = {"temperature": temperature, "top_p": top_p}
        return sampling.sample(logits, jnp.array([0.4]), **kwargs)[0]

    chosen = {
        int(run(jnp.float32(t), jnp.float32(p))[0]) for t in (0.0, 0.7, 1.0) for p in (0.3, 1.0)
    }
    assert len(traces) == 1
    assert len(chosen) > 1


def test_the_sort_is_in_the_program_only_with_top_p():
    def text(**cuts):
        def run(x, u):
            return sampling.sample(x, u, temperature=1.0, **cuts)

        return str(jax.make_jaxpr(run)(jnp.zeros((2, 512)), jnp.zeros(2)))

    assert " sort[" in text(top_p=0.9)
    assert " sort[" not in text()
    assert " sort[" not in text(top_k=5)
    assert "top_k[" in text(top_k=5)
    # One uniform a row: no random bits over the vocabulary.
    assert "random" not in text()


def test_a_row_with_bad_logits_says_so_and_leaves_its_neighbours_alone(rng):
    good = jnp.asarray(rng.standard_normal((5, 300)), jnp.float32)
    bad = good.at[1, 4].set(jnp.nan).at[2, 4].set(jnp.inf).at[3].set(-jnp.inf)
    uniforms = jnp.linspace(0.1, 0.9, 5)
    for cuts in ({}, {"top_k": 4}, {"top_p": 0.7}):
        for temperature in (0.0, 0.8):
            clean = sample(good, uniforms, temperature=temperature, **cuts)
            dirty = sample(bad, uniforms, temperature=temperature, **cuts)
            assert np.isnan(np.asarray(dirty[1])[1:4]).all()
            assert ((np.asarray(dirty[0]) >= 0) & (np.asarray(dirty[0]) < 300)).all()
            for a, b in zip(clean, dirty, strict=True):
                np.testing.assert_array_equal(np.asarray(a)[[0, 4]], np.asarray(b)[[0, 4]])


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), CASES[:2] + CASES[-1:])
def test_cdf_gap_is_the_distance_to_the_nearest_boundary(rng, temperature, top_k, top_p):
    logits = (3 * rng.standard_normal(200)).astype(np.float32)
    uniforms = rng.random(64).astype(np.float32)
    kwargs = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    tokens, _ = draw(logits, uniforms, **kwargs)
    rows = jnp.broadcast_to(jnp.asarray(logits), (64, 200))
    gap = np.asarray(cdf_gap(rows, jnp.asarray(uniforms), **kwargs))
    probs, order = oracle(logits, temperature, top_k, top_p)
    ends = np.cumsum(probs[order])
    place = np.array([list(order).index(t) for t in tokens])
    low = ends[place] - probs[tokens]
    np.testing.assert_allclose(gap, np.minimum(uniforms - low, ends[place] - uniforms), atol=5e-7)


def test_cdf_gap_finds_constructed_near_ties():
    logits = jnp.log(jnp.array([[0.25, 0.5, 0.25]] * 3))
    near = cdf_gap(logits, jnp.array([0.250004, 0.4, 0.749997]), temperature=1.0)
    np.testing.assert_array_equal(np.asarray(near) < 1e-5, [True, False, True])
    greedy = cdf_gap(jnp.log(jnp.array([[0.3, 0.5, 0.2]])), jnp.zeros(1), temperature=0.0)
    np.testing.assert_allclose(greedy, 0.2, atol=1e-6)


def test_a_row_draws_the_same_wherever_it_stands(rng):
    prompt_ids = jnp.asarray(rng.integers(0, 2**31 - 1, 16))
    sample_ids = jnp.arange(16) % 4
    key = sampling.step_key(3, 9)
    keys = row_keys(key, prompt_ids, sample_ids)
    uniforms = np.asarray(token_uniforms(keys, 2))
    order = jnp.asarray(rng.permutation(16)[:5])
    some = row_keys(key, prompt_ids[order], sample_ids[order])
    np.testing.assert_array_equal(token_uniforms(some, 2), uniforms[order])
    # Tokens too, whatever the neighbours' logits.
    logits = jnp.asarray(rng.standard_normal((16, 600)), jnp.float32)
    tokens, _ = sample(logits, jnp.asarray(uniforms), temperature=1.0)
    alone, _ = sample(logits[order], jnp.asarray(uniforms)[order], temperature=1.0)
    np.testing.assert_array_equal(alone, np.asarray(tokens)[order])


def test_seed_step_prompt_sample_and_token_each_change_the_noise():
    def uniform(seed=0, step=0, prompt=0, sample=0, token=0):
        key = sampling.step_key(seed, step)
        keys = row_keys(key, jnp.array([prompt]), jnp.array([sample]))
        return float(token_uniforms(keys, token)[0])

    names = ("seed", "step", "prompt", "sample", "token")
    drawn = [uniform(**{name: value}) for name in names for value in (1, 2)] + [uniform()]
    assert len(set(drawn)) == 11
    assert uniform(step=1) == uniform(step=1)
    assert all(0 <= u <= LAST for u in drawn)


@pytest.mark.parametrize(
    "key", [lambda: jnp.zeros(2, jnp.uint32), lambda: jax.random.key(0, impl="rbg")]
)
def test_other_keys_are_refused(key):
    with pytest.raises(ValueError, match="step_key"):
        sampling.row_keys(key(), jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32))
