"""A reward model as PPO's scorer: ``reward=jaxrlhf.rewards.reward_model.score``.

    --config.reward.kwargs.directory=runs/rm/export/best

The directory holds a decoder with a score head (``models.hf_classifier``) and its tokenizer. The
model is opened at the first call and stays in memory. Scores are plain numbers: no gradient of what
they are used for can reach it.

A response that knows the tokens that it was decoded from (``scoring.SampledText``) is scored by
these, as they were sampled, where the reward model's tokenizer and chat template are the policy's.
Any other text is put behind its record's prompt by the reward model's own template, its turn ended
as if the policy had ended it.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxrlhf.data.chat import encode_example
from jaxrlhf.data.tokenizer import load_tokenizer, tokenizer_digest
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.hf import resolve, stop_ids
from jaxrlhf.models.hf_classifier import load_classifier, load_statistics
from jaxrlhf.models.scores import score_rows
from jaxrlhf.rewards.scoring import SampledText, ScoringError


def score(
    prompts: Sequence[Any],
    responses: Sequence[str],
    records: Sequence[Mapping[str, Any]],
    *,
    directory: str,
    normalise: bool = False,
    batch_size: int = 32,
    compute_dtype: str = "float32",
) -> list[Any]:
    """What the reward model in a directory thinks of each response.

    Args:
      prompts: not read; a record's ``prompt`` is.
      responses: texts, or ``SampledText``.
      records: rows of a prompt table.
      directory: of the reward model, or a hub id.
      normalise: subtract the stored mean of its scores on its training data and divide by their
        standard deviation.
      batch_size: rows that are scored together.
      compute_dtype: of the matrix products.

    Returns:
      ``{"score", "raw"}`` a row (raw: before the normalisation), or an exception that says why a
      row cannot be scored.

    Raises:
      ScoringError: ``normalise`` without stored numbers, or with a standard deviation of 0.
      FileNotFoundError, ValueError: the directory is none of a reward model.
    """
    opened = load(directory)
    shift, scale = statistics(directory) if normalise else (0.0, 1.0)
    rows = [opened.encode(r, rec) for r, rec in zip(responses, records, strict=True)]
    fit = [i for i, row in enumerate(rows) if not isinstance(row, Exception)]
    raw = score_rows(
        opened.params,
        [rows[i] for i in fit],
        config=opened.config,
        compute_dtype=jnp.dtype(compute_dtype),
        batch_size=batch_size,
    )
    out: list[Any] = list(rows)
    for i, value in zip(fit, raw.tolist(), strict=True):
        out[i] = {"score": (value - shift) / scale, "raw": value}
    return out


class RewardModel(NamedTuple):
    """A reward model with what is needed to read texts."""

    params: Any
    config: ModelConfig
    tokenizer: Any
    stop_ids: tuple[int, ...]
    digest: str | None

    def encode(self, response: str, record: Mapping[str, Any]) -> Any:
        """Token ids of a row, or why there are none."""
        if (
            isinstance(response, SampledText)
            and self.digest is not None
            and response.tokenizer == self.digest
        ):
            ids = list(response.row)
        else:
            try:
                example = encode_example(
                    self.tokenizer, record["prompt"], str(response), stop_ids=self.stop_ids
                )
            except Exception as error:  # noqa: BLE001 - told as this row's problem
                said = " ".join(f"{type(error).__name__}: {error}".split())
                return ValueError(f"the reward model's template refuses the row ({said[:300]})")
            ids = example.tokens.tolist()
        if len(ids) > self.config.max_positions:
            return ValueError(
                f"its {len(ids)} tokens exceed the reward model's {self.config.max_positions}; "
                "shorten prompts or responses"
            )
        return ids


@functools.lru_cache(maxsize=4)
def load(directory: str) -> RewardModel:
    """Opens a reward model once; see ``models.hf_classifier.load_classifier``."""
    path = resolve(directory)
    params, config = load_classifier(path)
    tokenizer = load_tokenizer(path, require_chat_template=False)
    stops = stop_ids(path, tokenizer.eos_token_id)
    return RewardModel(params, config, tokenizer, stops, tokenizer_digest(tokenizer))


@functools.lru_cache(maxsize=4)
def statistics(directory: str) -> tuple[float, float]:
    """Mean and standard deviation of its scores on its training data, stored beside it.

    Raises:
      ScoringError: they are not there, or say that all its scores are the same.
    """
    try:
        stored = load_statistics(resolve(directory))
    except FileNotFoundError as error:
        raise ScoringError(f"normalise is on, but {error}") from error
    if "mean" not in stored or not np.float32(stored.get("std", 0)) > 0:
        raise ScoringError(
            f"{directory}: its stored statistics are {stored}; normalise needs a mean and a "
            "standard deviation above 0"
        )
    return stored["mean"], stored["std"]
