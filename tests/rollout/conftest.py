"""A tiny model whose distributions are neither flat nor peaked, and a checker of rollouts."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.models import specs, transformer
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.rollout import sampling
from jaxrlhf.types import FINISH_LENGTH, FINISH_STOP

NEAR_TIE = 1e-5


@pytest.fixture(scope="session")
def config():
    return ModelConfig(
        family="llama",
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rope_theta=1e4,
        norm_eps=1e-5,
        tie_embeddings=False,
        max_positions=64,
        init_std=0.3,
    )


@pytest.fixture(scope="session")
def params(config):
    return specs.init_params(jax.random.key(0), config)


@pytest.fixture(scope="session")
def prompts():
    rng = np.random.default_rng(7)
    return [rng.integers(3, 96, n).tolist() for n in (1, 5, 9, 12, 3, 8, 2)]


@partial(jax.jit, static_argnames=("config", "dtype"))
def _logits(params, tokens, positions, segments, config, dtype):
    hidden = transformer.forward(
        params, tokens, positions, segments, config=config, compute_dtype=dtype
    )
    return transformer.logits(params, hidden, config)


@pytest.fixture(scope="session")
def teacher_forced():
    """Float32 logits [B, T, V] that predict each token of a rollout; index t from tokens < t."""

    def run(params, config, rollout, dtype=jnp.float32):
        time = np.arange(rollout.tokens.shape[1])[None]
        segments = (time < rollout.lengths[:, None]).astype(np.int32)
        positions = np.broadcast_to(time, segments.shape)

        out = _logits(params, rollout.tokens, positions, segments, config, dtype)
        return np.roll(np.asarray(out, np.float32), 1, axis=1)

    return run


@pytest.fixture(scope="session")
def check_layout():
    """What must hold of any rollout, from the definitions in types.Rollout."""

    def check(rollout, prompts, n, stop_ids, max_response, pad_id, version=0):
        for row, prompt in enumerate(p for p in prompts for _ in range(n)):
            start, end = int(rollout.prompt_lengths[row]), int(rollout.lengths[row])
            assert start == len(prompt)
            assert rollout.tokens[row, :start].tolist() == list(prompt)
            response = rollout.tokens[row, start:end]
            assert 1 <= len(response) <= max_response
            assert not np.isin(response[:-1], stop_ids).any()
            stopped = response[-1] in stop_ids
            assert rollout.finish_reason[row] == (FINISH_STOP if stopped else FINISH_LENGTH)
            assert stopped or len(response) == max_response
            mask = np.zeros(rollout.tokens.shape[1], bool)
            mask[start:end] = True
            np.testing.assert_array_equal(rollout.response_mask[row], mask)
            assert (rollout.tokens[row, end:] == pad_id).all()
            assert (rollout.log_probs[row][~mask] == 0).all()
            assert (rollout.log_probs[row][mask] < 0).all()
            np.testing.assert_array_equal(rollout.policy_version[row], np.where(mask, version, -1))
        rows = np.arange(len(prompts) * n)
        np.testing.assert_array_equal(rollout.group_ids, rows // n)
        dtypes = {f.name: getattr(rollout, f.name).dtype for f in dataclasses.fields(rollout)}
        assert {str(d) for k, d in dtypes.items() if k not in SPECIAL} == {"int32"}
        assert {k: str(dtypes[k]) for k in SPECIAL} == SPECIAL

    return check


SPECIAL = {"response_mask": "bool", "log_probs": "float32", "finish_reason": "int8"}


@pytest.fixture(scope="session")
def divergences(teacher_forced):
    """Compares two rollouts at temperature 1; a row's first difference must be a near-tie.

    Returns how many rows differ and how many tokens were compared.
    """

    def compare(a, b, params, config, key, prompt_ids, sample_ids):
        logits = teacher_forced(params, config, a)
        keys = sampling.row_keys(key, jnp.asarray(prompt_ids), jnp.asarray(sample_ids))
        count = total = 0
        for row, start in enumerate(a.prompt_lengths):
            x = a.tokens[row, start : a.lengths[row]]
            y = b.tokens[row, start : b.lengths[row]]
            shared = min(len(x), len(y))
            same = int(np.append(np.flatnonzero(x[:shared] != y[:shared]), shared)[0])
            total += same
            span = slice(start, start + same)
            np.testing.assert_allclose(a.log_probs[row, span], b.log_probs[row, span], atol=1e-4)
            if same == len(x) == len(y):
                assert a.finish_reason[row] == b.finish_reason[row]
                continue
            count += 1
            uniform = sampling.token_uniforms(keys, same)[row : row + 1]
            at = jnp.asarray(logits[row : row + 1, start + same])
            gap = float(sampling.cdf_gap(at, uniform, temperature=1.0)[0])
            assert gap < NEAR_TIE, f"row {row} differs at token {same} with a gap of {gap}"
        return count, total

    return compare
