"""Sampler against trainer: log-probs, batch composition, padding, bfloat16."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.losses import dense_token_log_probs, token_log_probs
from jaxrlhf.models import specs, transformer
from jaxrlhf.rollout import native, sampling

KEY = sampling.step_key(2, 3)
FAMILIES = {
    "llama": {},
    "qwen2": {"family": "qwen2", "qkv_bias": True, "tie_embeddings": True},
    "qwen3": {"family": "qwen3", "qk_norm": True, "final_softcap": 8.0, "num_kv_heads": 4},
}


def make(config, **changes):
    defaults = {"max_prompt_length": 12, "max_response_length": 16, "stop_ids": [3, 40, 41]}
    defaults |= {"pad_id": 0, "chunk_length": 5, "batch_size": 8}
    return native.NativeSampler(config, **(defaults | changes))


@partial(jax.jit, static_argnames="config")
def _log_probs(params, tokens, positions, segments, temperature, config):
    hidden = transformer.forward(params, tokens, positions, segments, config=config)
    return token_log_probs(
        hidden,
        transformer.output_matrix(params, config),
        tokens,
        segments,
        temperature=temperature,
        softcap=config.final_softcap,
        block_size=8,
    ).log_probs


def trainer_log_probs(params, config, rollout, temperature):
    """As the trainer computes them: segments from the sampler's lengths, right-padded rows."""
    time = np.arange(rollout.tokens.shape[1])[None]
    segments = (time < rollout.lengths[:, None]).astype(np.int32)
    positions = np.broadcast_to(time, segments.shape)

    temperature = jnp.float32(temperature)
    out = _log_probs(params, rollout.tokens, positions, segments, temperature, config)
    return np.asarray(out)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_sampler_log_probs_equal_the_trainers(config, prompts, family):
    config = dataclasses.replace(config, **FAMILIES[family])
    params = specs.init_params(jax.random.key(1), config)
    if config.qkv_bias:
        for name in ("q_bias", "k_bias", "v_bias"):
            noise = jax.random.normal(jax.random.key(2), params["layers"][name].shape)
            params["layers"][name] = 0.3 * noise
    sampler = make(config, unroll=family != "qwen3")
    for temperature in (0.5, 1.0, 1.5):
        rollout = sampler.generate(
            params,
            prompts,
            prompt_ids=range(7),
            key=KEY,
            samples_per_prompt=4,
            temperature=temperature,
        )
        mask = rollout.response_mask
        expected = trainer_log_probs(params, config, rollout, temperature)
        gap = np.abs(expected - rollout.log_probs)[mask].max()
        ratio = np.abs(np.exp(expected - rollout.log_probs)[mask] - 1).max()
        mean = rollout.log_probs[mask].mean()
        print(
            f"{family} temperature {temperature}: {mask.sum()} tokens, mean log-prob {mean:.3f}, "
        )
        print(f"  largest |sampler - trainer| {gap:.1e}, largest |ratio - 1| {ratio:.1e}")
        assert gap <= 1e-4
        # The test can fail: at another temperature they differ.
        assert (
            np.abs(trainer_log_probs(params, config, rollout, 2.0) - rollout.log_probs)[mask].max()
            > 0.1
        )


def test_log_probs_under_cuts_are_of_the_cut_distribution(config, params, prompts, teacher_forced):
    cuts = {"top_k": 30, "top_p": 0.8}
    rollout = make(config, **cuts).generate(
        params, prompts, prompt_ids=range(7), key=KEY, samples_per_prompt=4, temperature=1.3
    )
    logits = teacher_forced(params, config, rollout).astype(np.float64) / 1.3
    mask = rollout.response_mask
    tokens, logits = rollout.tokens[mask], logits[mask]
    order = np.argsort(-logits, axis=-1, kind="stable")[:, : cuts["top_k"]]
    probs = np.exp(np.take_along_axis(logits, order, -1) - logits.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    before = np.cumsum(probs, -1) - probs
    top_p = cuts["top_p"]
    clear = (np.abs(before - top_p) > 1e-5).all(-1)
    probs = np.where(before < top_p, probs, 0)
    probs /= probs.sum(-1, keepdims=True)
    chosen = (probs * (order == tokens[:, None])).sum(-1)
    assert clear.mean() > 0.95
    assert (chosen[clear] > 0).all()
    np.testing.assert_allclose(np.log(chosen[clear]), rollout.log_probs[mask][clear], atol=1e-4)


# batch_size, samples per prompt, and the rest; the reference has 64 and 4.
SETTINGS = [
    (1, 1, {}),
    (5, 2, {"prompt_bucket": 5, "unroll": False, "chunk_length": 2}),
]


@pytest.fixture(scope="module")
def sharper(config):
    """Weights whose distributions have some 5 likely tokens, as a trained model's."""
    params = specs.init_params(jax.random.key(8), config)
    return {**params, "lm_head": params["lm_head"] * 1.6}


def test_a_rows_tokens_do_not_depend_on_its_batch(config, sharper, divergences):
    rng = np.random.default_rng(11)
    prompts = [rng.integers(3, 96, n).tolist() for n in rng.integers(1, 13, 64)]
    ids = rng.permutation(1000)[:64].tolist()
    base = make(config, batch_size=64, max_response_length=40).generate(
        sharper, prompts, prompt_ids=ids, key=KEY, samples_per_prompt=4
    )
    differing = compared = 0
    for batch_size, n, changes in SETTINGS:
        order = rng.permutation(64)  # other neighbours
        sampler = make(config, max_response_length=40, batch_size=batch_size, **changes)
        out = sampler.generate(
            sharper,
            [prompts[i] for i in order],
            prompt_ids=[ids[i] for i in order],
            key=KEY,
            samples_per_prompt=n,
        )
        rows = np.array([4 * i + s for i in order for s in range(n)])
        count, total = divergences(
            jax.tree.map(lambda x, rows=rows: x[rows], base),
            out,
            sharper,
            config,
            KEY,
            [ids[i] for i in order for _ in range(n)],
            list(range(n)) * 64,
        )
        differing, compared = differing + count, compared + total
    print(f"{differing} of {compared} tokens differ, each a near-tie (CDF gap < 1e-5)")
    assert compared > 5000
    assert differing < 1e-3 * compared


@pytest.fixture(scope="module")
def eight(config, sharper, prompts):
    return make(config).generate(
        sharper, prompts[:2], prompt_ids=range(2), key=KEY, samples_per_prompt=4
    )


def test_teacher_forced_batch_of_one_equals_batch_of_eight(config, sharper, eight):
    together = trainer_log_probs(sharper, config, eight, 1.0)
    largest = 0.0
    for row in range(8):
        one = jax.tree.map(lambda x, row=row: x[row : row + 1], eight)
        alone = trainer_log_probs(sharper, config, one, 1.0)
        largest = max(largest, np.abs(alone - together[row : row + 1])[one.response_mask].max())
    print(f"teacher-forced alone against batch of 8: largest difference {largest:.1e}")
    assert largest < 2e-5


def test_padding_amount_and_pad_id_change_no_log_prob(config, sharper, eight):
    mask = eight.response_mask
    expected = trainer_log_probs(sharper, config, eight, 1.0)[mask]
    beyond = np.arange(28)[None] >= eight.lengths[:, None]
    assert beyond.any()
    for pad in (3, 95):  # a stop id, an ordinary token
        padded = eight.replace(tokens=np.where(beyond, pad, eight.tokens))
        same = trainer_log_probs(sharper, config, padded, 1.0)[mask]
        np.testing.assert_array_equal(same, expected)
    wider = eight.replace(tokens=np.pad(eight.tokens, ((0, 0), (0, 13))))
    out = trainer_log_probs(sharper, config, wider, 1.0)[:, :28][mask]
    np.testing.assert_allclose(out, expected, atol=2e-5)


def test_bfloat16_gap_is_measured(config, sharper, prompts, teacher_forced):
    rollout = make(config, compute_dtype=jnp.bfloat16).generate(
        sharper, prompts, prompt_ids=range(7), key=KEY, samples_per_prompt=4
    )
    mask = rollout.response_mask
    gaps = {}
    for dtype in (jnp.float32, jnp.bfloat16):
        logits = teacher_forced(sharper, config, rollout, dtype)
        expected = np.asarray(dense_token_log_probs(np.roll(logits, -1, 1), rollout.tokens)[0])
        gaps[jnp.dtype(dtype).name] = np.abs(expected - rollout.log_probs)[mask]
    for name, gap in gaps.items():
        print(
            f"bfloat16 sampler against {name} trainer: mean {gap.mean():.1e}, max {gap.max():.1e}"
        )
    assert 1e-4 < gaps["float32"].mean() < 0.1
    assert gaps["float32"].max() < 1.0
    assert gaps["bfloat16"].mean() < 0.1
