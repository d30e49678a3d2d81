"""Scores of a policy on prompts that it was not trained on."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrlhf.rewards.scoring import SampledText, Scores
from jaxrlhf.rollout.native import NativeSampler
from jaxrlhf.types import FINISH_STOP, Rollout


class Validation(NamedTuple):
    """``metrics`` by name, and per prompt the response's text and its scores."""

    metrics: dict[str, float]
    responses: list[SampledText]
    scores: Scores


def responses_text(
    rollout: Rollout, decode: Callable[[list[int]], str], tokenizer: str | None = None
) -> list[SampledText]:
    """The text of each row's response, from the ids that were sampled, up to where it ended.

    Args:
      rollout: the rows.
      decode: token ids to text.
      tokenizer: ``data.tokenizer.tokenizer_digest`` of whose ids they are, for scorers that read
        tokens; None where that is not known.
    """
    tokens, starts, ends = jax.device_get((rollout.tokens, rollout.prompt_lengths, rollout.lengths))
    return [
        SampledText(decode(row[a:b].tolist()), row[:b].tolist(), tokenizer)
        for row, a, b in zip(tokens, starts, ends, strict=True)
    ]


def validate(
    sampler: NativeSampler,
    params: Any,
    *,
    prompts: Sequence[Sequence[int]],
    records: Sequence[Mapping[str, Any]],
    decode: Callable[[list[int]], str],
    score: Callable[[list[str], Sequence[str], Sequence[Mapping[str, Any]]], Scores],
    key: jax.Array,
    temperature: float = 0.0,
    tokenizer: str | None = None,
    on_progress: Callable[[int, int, int], None] | None = None,
) -> Validation:
    """One response to every prompt, greedy by default, scored as in training.

    Args:
      sampler: the engine.
      params: the policy.
      prompts: token ids of each prompt.
      records: the data rows that belong to them, for the scorer.
      decode: token ids to text.
      score: (prompt texts, response texts, records) to Scores.
      key: PRNG key; no effect at temperature 0.
      temperature: of the sampled distribution; 0 is greedy.
      tokenizer: as in ``responses_text``.
      on_progress: called with (tokens, rows finished, rows in all) as generation goes on.

    Returns:
      Metrics, with the responses and scores: means over the scored rows (NaN where there is none)
      as ``val/score``, ``val/accuracy`` (of the part ``correct``; left out where the scorer names
      no such part) and ``val/<part>`` (``val/<part>/mean`` where that name is another metric's);
      ``val/truncated_fraction``, ``val/unscored_fraction`` and ``val/length_mean`` (tokens).
    """
    rollout = sampler.generate(
        params,
        prompts,
        prompt_ids=list(range(len(prompts))),
        key=key,
        temperature=temperature,
        on_progress=on_progress,
    )
    responses = responses_text(rollout, decode, tokenizer)
    scores = score([decode(list(p)) for p in prompts], responses, records)
    finish, starts, ends = jax.device_get(
        (rollout.finish_reason, rollout.prompt_lengths, rollout.lengths)
    )
    metrics = {
        "val/score": _mean(scores.scores, scores.scored),
        "val/unscored_fraction": float(np.mean(~scores.scored)),
        "val/truncated_fraction": float(np.mean(finish != FINISH_STOP)),
        "val/length_mean": float(np.mean(ends - starts)),
    }
    taken = {*metrics, "val/accuracy"}
    for name, part in scores.parts.items():
        metric = "val/accuracy" if name == "correct" else f"val/{name}"
        if name != "correct" and metric in taken:
            metric += "/mean"
        metrics[metric] = _mean(part, scores.scored)
    return Validation(metrics, responses, scores)


def _mean(values: np.ndarray, where: np.ndarray) -> float:
    return float(values[where].mean()) if where.any() else float("nan")
