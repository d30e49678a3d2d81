"""Cross-entropy, z-loss and label smoothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf import losses


def test_cross_entropy_of_a_model_equals_the_plain_formula(rng):
    logits = rng.normal(size=(2, 5, 7))
    tokens = rng.integers(0, 7, size=(2, 5))
    normaliser = np.log(np.exp(logits[:, :-1]).sum(-1))
    chosen = np.take_along_axis(logits[:, :-1], tokens[:, 1:, None], -1)[..., 0]

    @jax.jit
    def both(logits, tokens):
        log_probs, logsumexp, _ = losses.dense_token_log_probs(logits, tokens)
        with_z = losses.cross_entropy(log_probs, logsumexp=logsumexp, z_loss=1e-2)
        return losses.cross_entropy(log_probs), with_z

    with jax.enable_x64(True):
        plain, with_z = map(np.asarray, both(logits, tokens))
    expected = normaliser - chosen
    np.testing.assert_allclose(plain[:, 1:], expected, rtol=1e-12)
    np.testing.assert_allclose(with_z[:, 1:], expected + 1e-2 * normaliser**2, rtol=1e-12)
    assert (plain[:, 0] == 0).all()


def test_z_loss_zero_is_honoured_none_needs_nothing():
    log_probs = jnp.array([-1.0, -2.0])
    np.testing.assert_array_equal(losses.cross_entropy(log_probs), [1, 2])
    zero = losses.cross_entropy(log_probs, logsumexp=jnp.ones(2), z_loss=0.0)
    np.testing.assert_array_equal(zero, [1, 2])
    with pytest.raises(ValueError, match="logsumexp"):
        losses.cross_entropy(log_probs, z_loss=0.0)


def test_label_smoothing_equals_the_cross_entropy_of_smoothed_targets(rng):
    hidden, matrix = rng.normal(size=(2, 6, 4)), rng.normal(size=(9, 4))
    tokens, segments = rng.integers(0, 9, size=(2, 6)), np.array([[1, 1, 1, 2, 2, 2], [1] * 6])
    targets = 0.8 * np.eye(9)[tokens] + 0.2 / 9
    logits = hidden @ matrix.T / 0.7
    log_softmax = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = -(targets[:, 1:] * log_softmax[:, :-1]).sum(-1)
    expected[0, 2] = 0.0

    with jax.enable_x64(True):
        log_probs, logsumexp, _ = losses.token_log_probs(
            hidden, matrix, tokens, segments, temperature=0.7
        )
        mean_logits = losses.mean_token_logits(hidden, matrix, segments, temperature=0.7)
        smoothed = losses.cross_entropy(
            log_probs, logsumexp=logsumexp, label_smoothing=0.2, mean_logits=mean_logits
        )
    np.testing.assert_allclose(smoothed[:, 1:], expected, rtol=1e-12)
    assert (np.asarray(smoothed)[:, 0] == 0).all()
    log_probs, logsumexp = np.float32(log_probs), np.float32(logsumexp)
    with pytest.raises(ValueError, match="mean_logits"):
        losses.cross_entropy(log_probs, logsumexp=logsumexp, label_smoothing=0.2)
    with pytest.raises(ValueError, match="output_matrix"):
        losses.mean_token_logits(hidden, matrix.T)
