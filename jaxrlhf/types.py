"""The pytrees that pass between sampler, scorers and trainers; every shape is documented here once.

Axes: B rows (prompts x samples), T tokens (prompt and response, right-padded).

Every per-token array is *token-aligned*: index ``t`` speaks about token ``t``, so
``log_probs[b, t] = log p(token_t | tokens_<t)`` and ``values[b, t]`` is the value of the state
before token ``t``. One mask therefore fits them all. Masks and lengths come from the sampler and
are never derived from ``token == pad``: pad may equal eos.
"""

from typing import Any

import jax
from flax import struct

FINISH_STOP = 0  # the row ended with one of the stop ids (which is the last response token)
FINISH_LENGTH = 1  # the row ran into the response limit: truncated
FINISH_ABORT = 2  # cut by the engine (a paused server): truncated as well


@struct.dataclass
class Rollout:
    """What a sampler returns.

    Attributes:
      tokens: i32[B, T], prompt then response, right-padded with an arbitrary id.
      prompt_lengths: i32[B], number of prompt tokens.
      lengths: i32[B], number of prompt and response tokens.
      response_mask: bool[B, T], True on tokens that the policy chose (actions).
      log_probs: f32[B, T], of the distribution that was sampled (temperature, top-k and top-p
        applied); 0 outside ``response_mask``.
      finish_reason: i8[B], one of the ``FINISH_*`` constants.
      group_ids: i32[B], rows that answer the same prompt share an id.
      policy_version: i32[B, T], the weight version that chose each token; -1 outside the mask.
    """

    tokens: jax.Array
    prompt_lengths: jax.Array
    lengths: jax.Array
    response_mask: jax.Array
    log_probs: jax.Array
    finish_reason: jax.Array
    group_ids: jax.Array
    policy_version: jax.Array


@struct.dataclass
class Evaluation:
    """Teacher-forced quantities of one rollout, all f32[B, T], 0 outside the response mask.

    ``ref_log_probs`` or ``values`` is None when the algorithm has no reference or no critic.
    """

    log_probs: jax.Array
    entropy: jax.Array
    ref_log_probs: jax.Array | None
    values: jax.Array | None


@struct.dataclass
class Experience:
    """One optimiser batch (or a slice of it) of reinforcement learning.

    Attributes:
      tokens, positions, segment_ids: i32[B, T]; segment 0 is padding, documents count from 1 and
        positions restart with each of them.
      response_mask: bool[B, T], the tokens that losses speak about.
      old_log_probs: f32[B, T], log-probs of the policy that is being improved.
      ref_log_probs: f32[B, T] or None, of the frozen reference (only for a KL term in the loss).
      old_values, returns: f32[B, T] or None (no critic).
      advantages: f32[B, T].
      loss_weights: f32[B, T], from ``losses.token_weights`` on the *whole* optimiser batch: the
        loss is the plain sum of per-token losses times these, so it can be cut anywhere.
      metric_weights: f32[B, T], the same for metrics: 1/N on each of the batch's N action tokens.
    """

    tokens: jax.Array
    positions: jax.Array
    segment_ids: jax.Array
    response_mask: jax.Array
    old_log_probs: jax.Array
    ref_log_probs: jax.Array | None
    old_values: jax.Array | None
    advantages: jax.Array
    returns: jax.Array | None
    loss_weights: jax.Array
    metric_weights: jax.Array


@struct.dataclass
class TokenBatch:
    """A supervised batch: tokens, positions, segment_ids i32[B, T]; loss_weights f32[B, T].

    ``loss_weights`` are token-aligned and sum to 1 over the whole optimiser batch.
    """

    tokens: jax.Array
    positions: jax.Array
    segment_ids: jax.Array
    loss_weights: jax.Array


@struct.dataclass
class PreferenceBatch:
    """Pairs of answers to the same prompt; a pair is one entry of axis 0, so no split parts it.

    Attributes:
      tokens: i32[B, 2, T], prompt and answer, right-padded, the chosen one first.
      lengths: i32[B, 2], real tokens of each row.
      prompt_lengths: i32[B], tokens of the prompt that both rows begin with.
      margins: f32[B], by how much the chosen answer is better; 0 where nobody said.
      loss_weights: f32[B], made on the whole optimiser batch, over which they sum to 1.
    """

    tokens: jax.Array
    lengths: jax.Array
    prompt_lengths: jax.Array
    margins: jax.Array
    loss_weights: jax.Array


@struct.dataclass
class TrainState:
    """Parameters, the optax state, and counters (i32 scalars).

    ``step`` counts applied updates (it drives the learning-rate schedule), ``skipped`` the
    non-finite updates that were left out, ``skipped_in_a_row`` those since the last applied one.
    An update whose batch carries no weight is left out too and moves no counter.
    """

    params: Any
    opt_state: Any
    step: jax.Array
    skipped: jax.Array
    skipped_in_a_row: jax.Array
