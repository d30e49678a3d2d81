"""Rewards for control runs: what must not teach anything.

A policy that improves under a control's reward improves for another reason than the reward.
"""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrlhf.rewards import gsm8k

check_records = gsm8k.check_records  # what cannot be scored there cannot be scored here


def shuffled_gsm8k(
    prompts: Sequence[Any],
    responses: Sequence[str],
    records: Sequence[Mapping[str, Any]],
    *,
    format_score: float = 0.0,
    lenient: bool = False,
) -> list[dict[str, float] | ValueError]:
    """GSM8K's scores, dealt out to the batch's scored rows at random.

    The scores that rows get are the same set, so reward statistics look as usual, but a row's own
    does not depend on what it says. The parts (``correct``, ``answer_found``) stay with their
    rows: validation accuracy still tells the truth.

    Args:
      prompts, responses, records, format_score, lenient: as ``gsm8k.score``.

    Returns:
      As ``gsm8k.score``. The permutation is a function of the responses, so runs can be repeated.
    """
    rows = gsm8k.score(prompts, responses, records, format_score=format_score, lenient=lenient)
    seed = zlib.crc32("\0".join(responses).encode("utf-8", "surrogatepass"))
    scored = [row for row in rows if isinstance(row, dict)]
    dealt = iter(np.random.default_rng(seed).permutation(len(scored)))
    return [
        {**row, "score": scored[next(dealt)]["score"]} if isinstance(row, dict) else row
        for row in rows
    ]
