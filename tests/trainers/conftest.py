"""A nano model, rollouts with uneven rows, and the pipeline from rollout to experience."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.specs import abstract_params
from jaxrlhf.types import FINISH_LENGTH, FINISH_STOP, Rollout

CONFIG = ModelConfig(
    family="llama",
    vocab_size=17,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    rope_theta=1e4,
    norm_eps=1e-6,
    tie_embeddings=True,
    max_positions=128,
    init_std=0.3,
)


@pytest.fixture(scope="session")
def config():
    return CONFIG


@dataclasses.dataclass(frozen=True)
class Models:
    actor: dict
    ref: dict
    critic: dict

    def astype(self, dtype):
        cast = jax.tree.map(lambda x: jnp.asarray(x, dtype), (self.actor, self.ref, self.critic))
        return Models(*cast)


jax.tree_util.register_dataclass(Models, ["actor", "ref", "critic"], [])


@pytest.fixture(autouse=True)
def quick_compilation():
    """These programs run for microseconds and compile for seconds: leave optimisation out."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="session")
def quick_jit():
    """jit that compiles faster still, where XLA knows the option."""
    options = {"xla_cpu_use_fusion_emitters": False}
    try:
        jax.jit(lambda x: x + 1, compiler_options=options)(0)
    except jax.errors.JaxRuntimeError:
        options = {}
    return functools.partial(jax.jit, compiler_options=options)


def random_params(seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: rng.normal(x.ndim == 1, 0.3, x.shape).astype(np.float32), abstract_params(CONFIG)
    )


@pytest.fixture(scope="session")
def models():
    """Three different models, so that ratios, KLs and values are not all 1 and 0 (numpy leaves)."""
    actor, other, backbone = (random_params(seed) for seed in range(3))
    ref = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, actor, other)
    kernel = np.random.default_rng(3).normal(0, 0.3, CONFIG.hidden_size).astype(np.float32)
    return Models(actor, ref, {"backbone": backbone, "head": {"kernel": kernel}})


@pytest.fixture(scope="session")
def make_rollout():
    """Rows with given prompt and response lengths; the same rows whatever T and the pad id."""

    def make(prompt_lengths, response_lengths, *, num_tokens=None, pad_id=0, seed=0):
        prompts, responses = np.array(prompt_lengths), np.array(response_lengths)
        lengths = (prompts + responses).astype(np.int32)
        width = num_tokens or int(lengths.max())
        random = np.random.default_rng(seed)
        tokens = random.integers(1, CONFIG.vocab_size, size=(len(lengths), 64))[:, :width]
        index = np.arange(width)[None]
        mask = (index >= prompts[:, None]) & (index < lengths[:, None])
        log_probs = -random.uniform(0.5, 3, size=(len(lengths), 64))[:, :width]
        return Rollout(
            tokens=np.where(index < lengths[:, None], tokens, pad_id).astype(np.int32),
            prompt_lengths=prompts.astype(np.int32),
            lengths=lengths,
            response_mask=mask,
            log_probs=np.where(mask, log_probs, 0).astype(np.float32),
            finish_reason=np.where(responses == 16, FINISH_LENGTH, FINISH_STOP).astype(np.int8),
            group_ids=np.arange(len(lengths), dtype=np.int32),
            policy_version=np.where(mask, 0, -1).astype(np.int32),
        )

    return make


@pytest.fixture(scope="session")
def uneven(make_rollout):
    """Eight rows with 0 to 16 action tokens."""
    return make_rollout([3, 5, 2, 4, 6, 3, 2, 5], [2, 16, 1, 7, 12, 0, 5, 16])
