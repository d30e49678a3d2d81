"""Draw tokens from logits: one uniform a row, inverse CDF over blocks, keys that name the row.

Letters: B rows, V vocabulary, N candidates that are left (V, or k after top-k), K one block.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

KEY_IMPL = "threefry2x32"  # "rbg" bits of a row change with its neighbours under vmap


class _Draw(NamedTuple):
    tokens: jax.Array  # i32[B]
    log_probs: jax.Array  # f32[B]
    cdf_gap: jax.Array  # f32[B]


def step_key(seed: int, step: int) -> jax.Array:
    """Key of one step of one run: fold_in(key(seed), step), with the generator fixed by name.

    Args:
      seed: the run's seed.
      step: the run's step, so that no two steps share their noise.

    Returns:
      A typed scalar key, to be passed to `row_keys` or `NativeSampler.generate`.
    """
    return jax.random.fold_in(jax.random.key(seed, impl=KEY_IMPL), step)


def row_keys(key: jax.Array, prompt_ids: jax.Array, sample_ids: jax.Array) -> jax.Array:
    """One key per row that depends on who the row is and not on where it stands.

    key_b = fold_in(fold_in(key, prompt_id_b), sample_id_b).

    Args:
      key: typed threefry key that already holds (seed, step), see `step_key`.
      prompt_ids: i32[B], stable name of the prompt (its index in the data set).
      sample_ids: i32[B], which of the prompt's samples this row is.

    Returns:
      Typed keys [B].

    Raises:
      ValueError: if the key is raw or of another generator.
    """
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key) or (
        str(jax.random.key_impl(key)) != KEY_IMPL
    ):
        raise ValueError(
            f"the sampling key must be a typed {KEY_IMPL} key: "
            "make it with jaxrlhf.rollout.sampling.step_key(seed, step)"
        )
    fold = jax.vmap(jax.random.fold_in, in_axes=(0, 0))
    by_prompt = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, prompt_ids)
    return fold(by_prompt, sample_ids)


def token_uniforms(keys: jax.Array, token_index: jax.Array | int) -> jax.Array:
    """The uniform that decides response token `token_index` of every row.

    Args:
      keys: typed keys [B] of `row_keys`.
      token_index: i32 scalar, 0 for the first response token.

    Returns:
      f32[B] in [0, 1 − 2⁻²⁴], multiples of 2⁻²⁴.
    """
    keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, token_index)
    bits = jax.vmap(lambda key: jax.random.bits(key, dtype=jnp.uint32))(keys)
    return (bits >> 8).astype(jnp.float32) * jnp.float32(2**-24)


def sample(
    logits: jax.Array,
    uniforms: jax.Array,
    *,
    temperature: jax.Array | float,
    top_k: int | None = None,
    top_p: jax.Array | float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Sample one token a row, with its log-prob under the distribution that was sampled.

    q = softmax(logits / temperature), cut to the top_k most likely tokens, renormalised, then cut
    to the smallest set of most likely tokens whose mass reaches top_p, renormalised. The token is
    the first whose cumulative probability exceeds the uniform; one of probability 0 is never
    returned. Equal logits at a cut: the lower id stays.

    Args:
      logits: [..., V] with one leading axis B; computed in float32; −inf excludes a token.
      uniforms: f32[B] in [0, 1), see `token_uniforms`.
      temperature: traced scalar ≥ 0. At 0 the most likely token is taken (the lowest id of equal
        ones) and its log-prob is the one at temperature 1, after the same cuts.
      top_k: static; None keeps all.
      top_p: traced scalar in (0, 1]; None leaves the sort out of the program.

    Returns:
      tokens i32[B] and log_probs f32[B] = log q(token). A row with a NaN, a +inf or nothing but
      −inf has the log-prob NaN.

    vLLM and transformers cut in the same order; vLLM keeps every token that ties with the k-th,
    and by default reports log-probs before temperature and cuts.
    """
    draw = _draw(logits, uniforms, temperature, top_k, top_p)
    return draw.tokens, draw.log_probs


def cdf_gap(
    logits: jax.Array,
    uniforms: jax.Array,
    *,
    temperature: jax.Array | float,
    top_k: int | None = None,
    top_p: jax.Array | float | None = None,
) -> jax.Array:
    """How far the uniform was from deciding otherwise: a near-tie is a gap under 1e-5.

    gap = min(u − CDF before the chosen token, CDF with it − u); at temperature 0 the gap between
    the two largest probabilities. Two programs that sum in another order may choose differently
    only where the gap is about their rounding error.

    Args:
      logits, uniforms, temperature, top_k, top_p: as for `sample`.

    Returns:
      f32[B], at least 0 up to rounding.
    """
    return _draw(logits, uniforms, temperature, top_k, top_p).cdf_gap


def _draw(
    logits: jax.Array,
    uniforms: jax.Array,
    temperature: jax.Array | float,
    top_k: int | None,
    top_p: jax.Array | float | None,
) -> _Draw:
    temperature = jnp.asarray(temperature, jnp.float32)
    greedy = temperature <= 0
    logits = logits.astype(jnp.float32)
    # Shifted before the division: a tiny temperature then gives −inf, never inf − inf.
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / jnp.where(greedy, 1, temperature)
    values, ids = _candidates(scaled, top_k, top_p)
    index, log_total, gap = _inverse_cdf(values, uniforms)
    best, best_gap = _most_likely(values, log_total)
    index, gap = jnp.where(greedy, best, index), jnp.where(greedy, best_gap, gap)
    tokens = index if ids is None else _at(ids, index)
    return _Draw(tokens, _at(values, index) - log_total, gap)


def _candidates(
    scaled: jax.Array, top_k: int | None, top_p: jax.Array | float | None
) -> tuple[jax.Array, jax.Array | None]:
    """Values f32[B, N] of the tokens that are left (−inf: cut) and their ids (None: 0..V−1)."""
    ids = None
    if top_k is not None and top_k < scaled.shape[-1]:
        scaled, ids = lax.top_k(scaled, top_k)
    if top_p is None:
        return scaled, ids
    if ids is None:
        lanes = lax.broadcasted_iota(jnp.int32, scaled.shape, scaled.ndim - 1)
        negated, ids = lax.sort((-scaled, lanes), num_keys=1, is_stable=True)
        scaled = -negated
    return _cut_to_mass(scaled, top_p), ids


def _cut_to_mass(values: jax.Array, top_p: jax.Array | float) -> jax.Array:
    """Keep of descending values [B, N] the shortest head whose mass reaches top_p (never none)."""
    probs = jax.nn.softmax(values, axis=-1)
    before = jnp.cumsum(probs, axis=-1) - probs
    kept = jnp.sum(before < top_p, axis=-1, keepdims=True)
    lanes = lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1)
    # At top_p = 1 rounding must not cut the tail.
    return jnp.where((lanes < jnp.maximum(kept, 1)) | (jnp.asarray(top_p) >= 1), values, -jnp.inf)


def _inverse_cdf(values: jax.Array, uniforms: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Index [B] drawn from softmax(values), the logsumexp [B], and the CDF gap [B].

    Two levels: the block is found among the block sums, the token inside that one block, so only
    [B, N/K] + [B, K] numbers are cumulated. The largest value of a row must be 0.
    """
    blocks = _split(values)
    masses = jnp.sum(jnp.exp(blocks), axis=-1)
    total = jnp.sum(masses, axis=-1)
    target = uniforms * total
    block, below_block = _first_above(masses, target)
    chosen = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    inside = jnp.exp(chosen)
    lane, below = _first_above(inside, target - below_block)
    low = below_block + below
    gap = jnp.minimum(target - low, low + _at(inside, lane) - target) / total
    return block * blocks.shape[-1] + lane, jnp.log(total), gap


def _split(values: jax.Array) -> jax.Array:
    """[B, N] -> [B, N/K, K] with K near √N; the last block is filled with −inf."""
    rows, count = values.shape
    size = 1 << (count.bit_length() // 2)
    padded = jnp.pad(values, ((0, 0), (0, -count % size)), constant_values=-jnp.inf)
    return padded.reshape(rows, -1, size)


def _first_above(masses: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """First index whose cumulative mass exceeds the target, and the mass before it.

    A parallel prefix sum may rise or fall by an ulp where a mass is 0, and may end below the
    target: hence an index counts only with mass of its own, and the last such one is the default.
    """
    cumulative = jnp.cumsum(masses, axis=-1)
    lanes = lax.broadcasted_iota(jnp.int32, masses.shape, masses.ndim - 1)
    positive = masses > 0
    hit = positive & (cumulative > target[:, None])
    first = jnp.min(jnp.where(hit, lanes, masses.shape[-1]), axis=-1)
    last = jnp.max(jnp.where(positive, lanes, 0), axis=-1)
    index = jnp.minimum(first, last)
    return index, _at(cumulative, index) - _at(masses, index)


def _most_likely(values: jax.Array, log_total: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Lowest index [B] of the largest value (which is 0), and its lead in probability."""
    lanes = lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1)
    count = values.shape[-1]
    best = jnp.min(jnp.where(values >= 0, lanes, count - 1), axis=-1)
    second = jnp.max(jnp.where(lanes == best[:, None], -jnp.inf, values), axis=-1)
    return best, jnp.exp(-log_total) - jnp.exp(second - log_total)


def _at(values: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.take_along_axis(values, index[:, None], axis=-1)[:, 0]
