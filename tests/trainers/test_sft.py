"""Supervised loss against a dense oracle; packed rows; it learns."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxrlhf.data.batching import pack_examples, pad_examples
from jaxrlhf.data.chat import Example
from jaxrlhf.data.packing import first_fit_decreasing
from jaxrlhf.losses.masked import token_weights
from jaxrlhf.models.transformer import forward, logits
from jaxrlhf.optimizers import OptimizerHyper
from jaxrlhf.trainers.forward import positions_and_segments
from jaxrlhf.trainers.sft import sft_loss
from jaxrlhf.trainers.update import accumulate_gradients, init_train_state, pure_update
from jaxrlhf.types import TokenBatch


def batch_of(rollout):
    positions, segments = positions_and_segments(rollout.lengths, rollout.tokens.shape[1])
    return TokenBatch(
        jnp.asarray(rollout.tokens), positions, segments, token_weights(rollout.response_mask)
    )


def test_loss_equals_dense_float64(config, models, uneven, quick_jit):
    batch = batch_of(uneven)

    def dense(params):
        inputs = (batch.tokens, batch.positions, batch.segment_ids)
        return logits(params, forward(params, *inputs, config=config), config)

    z = np.asarray(quick_jit(dense)(models.actor), np.float64)[:, :-1]
    log_p = z - np.log(np.exp(z).sum(-1, keepdims=True))
    chosen = np.take_along_axis(log_p, np.asarray(batch.tokens)[:, 1:, None], -1)[..., 0]
    want = -chosen[uneven.response_mask[:, 1:]].mean()
    loss, metrics = quick_jit(functools.partial(sft_loss, config=config))(models.actor, batch)
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    np.testing.assert_allclose(metrics.sums["sft/loss"], want, rtol=1e-5)


def test_a_packed_row_costs_what_its_documents_cost(config, models, make_rollout, quick_jit):
    batch = batch_of(make_rollout([2, 3], [5, 7]))
    join = functools.partial(np.concatenate, axis=0)
    cut = [(0, 7), (1, 10)]
    packed = TokenBatch(
        *(
            join([np.asarray(x)[row, :n] for row, n in cut])[None]
            for x in (batch.tokens, batch.positions)
        ),
        join([np.full(n, row + 1, np.int32) for row, n in cut])[None],
        join([np.asarray(batch.loss_weights)[row, :n] for row, n in cut])[None],
    )
    run = quick_jit(functools.partial(sft_loss, config=config))
    np.testing.assert_allclose(run(models.actor, packed)[0], run(models.actor, batch)[0], rtol=1e-5)


def test_it_learns_the_batch_by_heart(config, models, make_rollout, quick_jit):
    batch = batch_of(make_rollout([2] * 4, [4] * 4))
    opt = OptimizerHyper.create(learning_rate=2e-2, warmup_steps=5)
    loss = functools.partial(sft_loss, config=config)
    state = init_train_state(models.actor, opt)
    step = quick_jit(functools.partial(pure_update, loss_fn=loss, num_micro_batches=2))
    history = []
    for _ in range(60):
        state, metrics = step(state, batch, opt, None)
        history.append(float(metrics["sft/loss"]))
    assert history[0] > 2
    assert history[-1] < 0.05


def examples_of_several_turns(n, rng):
    examples = []
    for _ in range(n):
        mask = np.repeat([False, True, False, True], rng.integers(1, 5, 4))
        examples.append(Example(rng.integers(0, 17, len(mask)).astype(np.int32), mask))
    return examples


def test_packing_changes_neither_loss_nor_gradient(config, models, rng, quick_jit):
    """The same examples: one a row in one batch; packed, with rows of padding, in three parts."""
    examples = examples_of_several_turns(9, rng)
    packed = first_fit_decreasing([len(e.tokens) for e in examples], 32)
    assert len(packed) < 6
    padded = pad_examples(examples, pad_id=3, multiple=16)
    rows = [[examples[i] for i in row] for row in packed]
    packed = pack_examples(rows, pad_id=5, length=32, num_rows=6)
    loss = functools.partial(sft_loss, config=config)

    def gradient(batch, n):
        run = functools.partial(accumulate_gradients, loss_fn=loss, num_micro_batches=n)
        return quick_jit(run)(models.actor, TokenBatch(*batch), None)

    want, one_by_one, _ = gradient(padded, 1)
    got, together, _ = gradient(packed, 3)
    np.testing.assert_allclose(together, one_by_one, rtol=1e-6)
    flat = [np.concatenate([np.ravel(x) for x in jax.tree.leaves(g)]) for g in (want, got)]
    assert np.linalg.norm(flat[0]) > 0.1
    assert np.linalg.norm(flat[0] - flat[1]) <= 1e-6 * np.linalg.norm(flat[0])
