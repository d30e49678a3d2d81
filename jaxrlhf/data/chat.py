"""From messages to token ids, by the tokenizer's own chat template.

Which tokens are the answer is known from how the ids were made, never from looking for text. A
prompt that is a string is plain text: the tokenizer encodes it as it is, with its own BOS, and the
template is not used.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

Messages = str | Sequence[Mapping[str, Any]]


class Example(NamedTuple):
    """One supervised row.

    Attributes:
      tokens: i32[T], prompt and answer.
      answer_mask: bool[T], True on the answer's tokens, the stop token that ends it included.
    """

    tokens: np.ndarray
    answer_mask: np.ndarray


def encode_prompt(
    tokenizer: Any, messages: Messages, *, template_options: Mapping[str, Any] | None = None
) -> list[int]:
    """Token ids of a prompt, up to where the assistant starts to speak.

    Args:
      tokenizer: from ``load_tokenizer``.
      messages: ``{"role", "content"}`` each, or a plain text.
      template_options: what the template itself understands, such as
        ``{"enable_thinking": False}`` of Qwen3.
    """
    if isinstance(messages, str):
        return list(tokenizer(messages)["input_ids"])
    return _render(tokenizer, messages, template_options, add_generation_prompt=True)


def encode_example(
    tokenizer: Any,
    messages: Messages,
    answer: Messages,
    *,
    stop_ids: Collection[int] | None = None,
    template_options: Mapping[str, Any] | None = None,
) -> Example:
    """Token ids of a prompt with its answer, and which of them are the answer.

    The conversation with the answer as last turn is rendered by the template; the prompt's own ids
    (those that the sampler would see) must be its beginning, and the rest, up to its last stop
    token, is the answer: words that the template puts before it (Qwen3's empty thought) included,
    for the model has to say them. What the template writes after that token is left off, as a
    sampled row ends there too.

    Args:
      tokenizer: from ``load_tokenizer``.
      messages: the prompt; for a plain text the answer's ids and the eos token follow it.
      answer: the assistant's words; or, after a prompt of messages, several messages of which the
        last is the assistant's, and everything after the prompt then counts as the answer.
      stop_ids: the tokens that end a turn; None for the tokenizer's eos token alone.
      template_options: as in ``encode_prompt``.

    Raises:
      ValueError: the template renders the prompt differently once an answer follows, or does not
        end the answer with a stop token.
    """
    prompt = encode_prompt(tokenizer, messages, template_options=template_options)
    if isinstance(messages, str):
        ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
        return _example(prompt, [*ids, tokenizer.eos_token_id])
    said = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    turns = [*messages, *said]
    whole = _render(tokenizer, turns, template_options, add_generation_prompt=False)
    if whole[: len(prompt)] != prompt:
        raise ValueError(_differs(tokenizer, prompt, whole))
    stops = {tokenizer.eos_token_id} if stop_ids is None else set(stop_ids)
    ends = [t for t in range(len(prompt), len(whole)) if whole[t] in stops]
    if not ends:
        raise ValueError(
            f"the chat template ends the answer with {tokenizer.decode(whole[-2:])!r}, which holds "
            f"none of the stop ids {sorted(stops)}; pass the token that ends a turn in stop_ids."
        )
    return _example(prompt, whole[len(prompt) : ends[-1] + 1])


def _example(prompt: list[int], answer: list[int]) -> Example:
    tokens = np.asarray([*prompt, *answer], np.int32)
    return Example(tokens, np.arange(len(tokens)) >= len(prompt))


def _render(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any] | None,
    *,
    add_generation_prompt: bool,
) -> list[int]:
    # return_dict is named because its default differs between transformers 4 and 5.
    ids = tokenizer.apply_chat_template(
        [dict(message) for message in messages],
        add_generation_prompt=add_generation_prompt,
        tokenize=True,
        return_dict=False,
        **(options or {}),
    )
    return [int(token) for token in ids]


def _differs(tokenizer: Any, prompt: list[int], whole: list[int]) -> str:
    pairs = zip(prompt, whole, strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(prompt), len(whole)))
    return (
        f"the chat template renders the prompt differently once an answer follows: from token "
        f"{first} on {tokenizer.decode(prompt[first : first + 8])!r} becomes "
        f"{tokenizer.decode(whole[first : first + 8])!r}; strip white space before the answer, or "
        "set template_options or the template so that both agree."
    )
