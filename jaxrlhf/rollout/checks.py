"""What a sampler refuses before it compiles anything: one sentence that says what to change."""

import math
from collections.abc import Sequence

import numpy as np

from jaxrlhf.models.config import ModelConfig


def check_sizes(**sizes: int) -> None:
    """Raises ValueError for a size under 1."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} is {size}: give at least 1")


def check_context(config: ModelConfig, prompt: int, response: int) -> None:
    """Raises ValueError where prompt and response do not fit the model's positions."""
    if prompt + response > config.max_positions:
        raise ValueError(
            f"max_prompt_length {prompt} + max_response_length {response} exceeds the model's "
            f"{config.max_positions} positions: lower one of them"
        )


def check_special_ids(config: ModelConfig, stop_ids: Sequence[int], pad_id: int) -> None:
    """Raises ValueError where nothing would end a row, or for an id that the model lacks."""
    if not len(stop_ids):
        raise ValueError("no stop ids, so every row would be cut: give the tokenizer's eos id")
    for name, special in [("stop id", i) for i in stop_ids] + [("pad_id", pad_id)]:
        if not 0 <= special < config.vocab_size:
            raise ValueError(
                f"{name} {special} is outside the model's vocabulary of {config.vocab_size}: "
                "use an id of the model's own tokenizer"
            )


def check_cuts(config: ModelConfig, top_k: int | None, top_p: float | None) -> None:
    """Raises ValueError for a top_k or top_p that keeps nothing or has no meaning."""
    if top_k is not None and not 1 <= top_k <= config.vocab_size:
        raise ValueError(
            f"top_k is {top_k}: give 1 to {config.vocab_size} (the vocabulary), or None for off"
        )
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}: give a number in (0, 1], or None for off")


def check_prompts(
    prompts: Sequence[Sequence[int]], max_length: int, vocab_size: int
) -> list[np.ndarray]:
    """The prompts as arrays; ValueError names the first that cannot be sampled from."""
    if not len(prompts):
        raise ValueError("there are no prompts: give at least one")
    arrays = [np.asarray(prompt) for prompt in prompts]
    for index, prompt in enumerate(arrays):
        _check_prompt(prompt, index, max_length, vocab_size)
    return arrays


def _check_prompt(prompt: np.ndarray, index: int, max_length: int, vocab_size: int) -> None:
    if prompt.size == 0:
        raise ValueError(f"prompt {index} is empty: give at least one token, such as the bos id")
    if prompt.ndim != 1 or prompt.dtype.kind not in "iu":
        raise ValueError(f"prompt {index} is not a sequence of ints: pass token ids")
    if len(prompt) > max_length:
        raise ValueError(
            f"prompt {index} has {len(prompt)} tokens, more than max_prompt_length {max_length}: "
            "raise that, or filter or truncate the prompts"
        )
    outside = (prompt < 0) | (prompt >= vocab_size)
    if outside.any():
        raise ValueError(
            f"prompt {index} holds the id {prompt[outside][0]}, outside the model's vocabulary of "
            f"{vocab_size}: encode it with the model's own tokenizer"
        )


def check_prompt_ids(prompt_ids: Sequence[int], count: int) -> None:
    """Raises ValueError unless there is one id for each of `count` prompts, in [0, 2³¹)."""
    if len(prompt_ids) != count:
        raise ValueError(f"{count} prompts have {len(prompt_ids)} prompt_ids: give one for each")
    for index, prompt_id in enumerate(prompt_ids):
        if not 0 <= prompt_id < 2**31:
            raise ValueError(
                f"prompt {index} has the prompt id {prompt_id}: give its index in the data set, "
                "from 0 and below 2**31"
            )


def check_call(
    samples_per_prompt: int, batch_size: int | None, temperature: float, policy_version: int
) -> None:
    """Raises ValueError for numbers of one call that cannot be honoured."""
    check_sizes(samples_per_prompt=samples_per_prompt)
    if batch_size is not None and samples_per_prompt > batch_size:
        raise ValueError(
            f"samples_per_prompt {samples_per_prompt} is above the sampler's batch_size "
            f"{batch_size}: raise batch_size to a multiple of it"
        )
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature is {temperature}: give a finite number of at least 0")
    if policy_version < 0:
        raise ValueError(f"policy_version is {policy_version}: count from 0 (-1 marks no token)")
