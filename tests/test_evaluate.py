"""Validation's metrics: what the scorer tells, and nothing that it does not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.evaluate import validate
from jaxrlhf.rewards.scoring import score_rows
from jaxrlhf.types import FINISH_LENGTH, FINISH_STOP, Rollout


class _Sampler:
    """Answers every prompt with one token; the last answer is cut."""

    def generate(self, params, prompts, **_):
        n = len(prompts)
        tokens = jnp.asarray([[*prompt, 7] for prompt in prompts])
        return Rollout(
            tokens=tokens,
            prompt_lengths=jnp.full(n, 2),
            lengths=jnp.full(n, 3),
            response_mask=jnp.arange(3)[None] == jnp.full((n, 1), 2),
            log_probs=jnp.zeros((n, 3)),
            finish_reason=jnp.asarray([FINISH_STOP] * (n - 1) + [FINISH_LENGTH], jnp.int8),
            group_ids=jnp.arange(n),
            policy_version=jnp.zeros((n, 3), jnp.int32),
        )


def metrics(entries):
    result = validate(
        _Sampler(),
        {},
        prompts=[[1, 2]] * len(entries),
        records=[{}] * len(entries),
        decode=str,
        score=lambda *texts: score_rows(lambda *_: entries, *texts, on_error="skip"),
        key=jax.random.key(0),
    )
    assert result.responses == ["[7]"] * len(entries)
    return result.metrics


ALWAYS = {"val/unscored_fraction": 0.0, "val/truncated_fraction": 0.25, "val/length_mean": 1.0}
NAN = float("nan")


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([0.25, 0.5, 1.5, -0.25], {"val/score": 0.5}),
        ([0.25, None, 0.75, None], {"val/score": 0.5, "val/unscored_fraction": 0.5}),
        ([None] * 4, {"val/score": NAN, "val/unscored_fraction": 1.0}),
        (
            [{"score": 0.5, "correct": c, "short": 1} for c in (0, 1, 1, 1)],
            {"val/score": 0.5, "val/accuracy": 0.75, "val/short": 1.0},
        ),
        (
            [None, *[{"score": 0.5, "correct": 1}] * 3],
            {"val/score": 0.5, "val/accuracy": 1.0, "val/unscored_fraction": 0.25},
        ),
        (
            [{"score": 0.5, "accuracy": 1, "length_mean": 9}] * 4,
            {"val/score": 0.5, "val/accuracy/mean": 1.0, "val/length_mean/mean": 9.0},
        ),
    ],
)
def test_metrics_are_of_scored_rows_and_accuracy_is_the_scorers(entries, expected):
    got = metrics(entries)
    assert got.keys() == ALWAYS.keys() | expected.keys()
    for name, value in (ALWAYS | expected).items():
        np.testing.assert_equal(got[name], value, err_msg=name)
