"""From messages to token ids, by the tokenizer's own chat template.

Which tokens are the answer is known from how the ids were made, never from looking for text. A
prompt that is a string is plain text: the tokenizer encodes it as it is, with its own BOS, and the
template is not used.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

Messages = str | Sequence[Mapping[str, Any]]


TURNS = ("all", "last")


class Example(NamedTuple):
    """One supervised row.

    Attributes:
      tokens: i32[T], prompt and answer, or a conversation of several turns.
      answer_mask: bool[T], True on the answers' tokens, the stop token that ends each included.
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
            f"the chat template of {tokenizer.name_or_path} ends the answer with "
            f"{tokenizer.decode(whole[-2:])!r}, which holds none of the stop ids {sorted(stops)}; "
            "pass the token that ends a turn in stop_ids."
        )
    return _example(prompt, whole[len(prompt) : ends[-1] + 1])


def encode_conversation(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    turns: str = "all",
    context: int = 0,
    stop_ids: Collection[int] | None = None,
    template_options: Mapping[str, Any] | None = None,
) -> Example:
    """Token ids of a conversation, and which of them are the assistant's turns to train on.

    Each such turn is rendered as the answer to what came before it, as ``encode_example`` does, and
    each of these renderings must begin with the tokens of the one before. What follows the last
    such turn is left off: no loss depends on it.

    Args:
      tokenizer: from ``load_tokenizer``.
      messages: the whole conversation.
      turns: "all" for every turn of the assistant, "last" for the last one alone.
      context: so many messages at the beginning are read and not trained on.
      stop_ids, template_options: as in ``encode_example``.

    Raises:
      ValueError: no turn is left to train on, ``turns`` is unknown, the template renders a turn
        differently once more messages follow (Qwen3's drops earlier thoughts, for one), or it is
        one that ``encode_example`` refuses.
    """
    if turns not in TURNS:
        raise ValueError(f"turns={turns!r} is unknown; use one of {', '.join(TURNS)}.")
    said = [i for i in range(context, len(messages)) if messages[i]["role"] == "assistant"]
    if not said:
        raise ValueError("the assistant says nothing to train on; remove the conversation.")
    tokens: list[int] = []
    mask: list[bool] = []
    for i in said if turns == "all" else said[-1:]:
        example = encode_example(
            tokenizer,
            messages[:i],
            messages[i : i + 1],
            stop_ids=stop_ids,
            template_options=template_options,
        )
        now = example.tokens.tolist()
        if now[: len(tokens)] != tokens or example.answer_mask[: len(tokens)].any():
            raise ValueError(_turn_differs(tokenizer, i, tokens, now))
        mask += example.answer_mask[len(tokens) :].tolist()
        tokens = now
    return Example(np.asarray(tokens, np.int32), np.asarray(mask))


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
    return (
        f"the chat template of {tokenizer.name_or_path} renders the prompt differently once an "
        f"answer follows: {_first_difference(tokenizer, prompt, whole)}; strip white space before "
        "the answer, or set template_options or the template so that both agree."
    )


def _turn_differs(tokenizer: Any, message: int, before: list[int], now: list[int]) -> str:
    return (
        f"the chat template of {tokenizer.name_or_path} renders the turns before message {message} "
        "differently from when they were the last ones: "
        f"{_first_difference(tokenizer, before, now)}; train on the last turn alone (turns=last), "
        "or set template_options or the template so that both agree."
    )


def _first_difference(tokenizer: Any, before: list[int], now: list[int]) -> str:
    pairs = zip(before, now, strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(before), len(now)))
    old, new = (tokenizer.decode(ids[first : first + 8]) for ids in (before, now))
    return f"from token {first} on {old!r} becomes {new!r}"
