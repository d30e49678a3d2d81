import os

import numpy as np
import pytest

from jaxrlhf.data.chat import encode_conversation, encode_example, encode_prompt
from jaxrlhf.data.tokenizer import load_tokenizer

USER = [{"role": "user", "content": "Tom has 3 apples and buys 4 more."}]
TURNS = [
    {"role": "user", "content": "There are 3 pens."},
    {"role": "assistant", "content": "3 + 4 = 7"},
    {"role": "user", "content": "There are 4 pens."},
]
GENERATION = "{% if add_generation_prompt %}<|assistant|>{% endif %}"


@pytest.mark.parametrize("messages", [USER, TURNS])
def test_the_prompt_is_the_rendered_template(words, messages):
    ids = encode_prompt(words, messages)
    text = "".join(f"<|{m['role']}|>{m['content']}<|end|>" for m in messages) + "<|assistant|>"
    assert words.decode(ids) == text
    assert all(type(token) is int for token in ids)


@pytest.mark.parametrize("messages", [USER, TURNS])
@pytest.mark.parametrize("answer", ["3 + 4 = 7\n#### 7", "7", "", "3 + 4 = 7"])
def test_the_mask_is_the_answer_and_its_end(words, messages, answer):
    """Also where the same words, and the same stop token, occur in the prompt."""
    tokens, mask = encode_example(words, messages, answer)
    prompt = encode_prompt(words, messages)
    assert tokens[: len(prompt)].tolist() == prompt
    np.testing.assert_array_equal(mask, np.arange(len(tokens)) >= len(prompt))
    assert words.decode(tokens[mask].tolist()) == answer + words.eos_token
    assert tokens.dtype == np.int32
    assert mask.dtype == bool


def test_a_stop_token_inside_the_answer_does_not_end_it(words):
    tokens, mask = encode_example(words, USER, "3<|end|> + 4")
    assert words.decode(tokens[mask].tolist()) == "3<|end|> + 4<|end|>"


def test_what_follows_the_stop_token_is_left_off(words):
    words.chat_template = "{% for m in messages %}" + "{{ m.content }}<|end|>\n{% endfor %}"
    tokens, mask = encode_example(words, USER, "7")
    assert words.decode(tokens[mask].tolist()) == "7<|end|>"


def test_a_plain_text_prompt_has_no_template(words):
    assert encode_prompt(words, "3 + 4 =") == words.encode("3 + 4 =")
    tokens, mask = encode_example(words, "3 + 4 =", " 7")
    assert words.decode(tokens.tolist()) == "3 + 4 = 7<|end|>"
    assert mask.tolist() == [False] * 4 + [True] * 2


@pytest.mark.parametrize(
    "template",
    [
        # A thinking prefix that the rendering of a finished turn leaves out.
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>3{% endif %}",
        # The last turn alone is kept.
        "<|user|>{{ messages[-1].content }}<|end|>" + GENERATION,
    ],
)
def test_a_template_that_changes_the_prompt_is_refused(words, template):
    words.chat_template = template
    with pytest.raises(ValueError, match=r"differently once an answer follows: from token \d+"):
        encode_example(words, USER, "7")


def test_a_template_that_does_not_end_the_answer(words):
    words.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}" + GENERATION
    )
    with pytest.raises(ValueError, match=r"none of the stop ids .*pass the token that ends"):
        encode_example(words, USER, "7")
    newline = words.encode("\n")
    tokens, mask = encode_example(words, USER, "7", stop_ids=newline)
    assert words.decode(tokens[mask].tolist()) == "7\n"


def test_options_reach_the_template(words):
    words.chat_template = "{{ messages[0].content }}{% if short %}<|end|>{% endif %}"
    ids = encode_prompt(words, USER, template_options={"short": True})
    assert ids == [*encode_prompt(words, USER), words.eos_token_id]


# Conversations of several turns

CHAT = [
    {"role": "system", "content": "3"},
    *TURNS,
    {"role": "assistant", "content": "4 + 3 = 7"},
    {"role": "user", "content": "3 + 4 = 7"},  # the assistant's words, and not trained on
    {"role": "assistant", "content": "7"},
    {"role": "user", "content": "There are 5 pens."},
]
END = "<|end|>"


def _spans(tokenizer, example):
    """The texts of the runs of trained tokens."""
    edges = np.flatnonzero(np.diff(np.pad(example.answer_mask.astype(int), 1)))
    return [
        tokenizer.decode(example.tokens[a:b].tolist()) for a, b in edges.reshape(-1, 2).tolist()
    ]


@pytest.mark.parametrize(
    ("options", "spans"),
    [
        ({}, ["3 + 4 = 7<|end|>", "4 + 3 = 7<|end|>", "7<|end|>"]),
        ({"turns": "last"}, ["7<|end|>"]),
        ({"context": 3}, ["4 + 3 = 7<|end|>", "7<|end|>"]),
        ({"context": 3, "turns": "last"}, ["7<|end|>"]),
    ],
)
def test_which_turns_are_trained(words, options, spans):
    example = encode_conversation(words, CHAT, **options)
    rendered = "".join(f"<|{m['role']}|>{m['content']}{END}" for m in CHAT[:-1])
    assert words.decode(example.tokens.tolist()) == rendered  # nothing after the last turn
    assert _spans(words, example) == spans
    assert (example.tokens.dtype, example.answer_mask.dtype) == (np.int32, bool)


def test_what_a_hand_made_template_puts_around_the_turns(words):
    """Its words before an answer are the prompt's, and what follows the stop token is no turn's."""
    words.chat_template = (
        "7{% for m in messages %}{% if m.role == 'assistant' %}4 + {{ m.content }}<|end|>\n"
        "{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}4 +{% endif %}"
    )
    chat = [CHAT[0], {"role": "assistant", "content": "3"}] * 2
    example = encode_conversation(words, chat)
    shown = [words.decode([token]) for token in example.tokens]
    assert shown == ["7", "3", "\n", "4", " +", " 3", END, "\n", "3", "\n", "4", " +", " 3", END]
    assert np.flatnonzero(example.answer_mask).tolist() == [5, 6, 12, 13]


def test_a_template_that_changes_earlier_turns_is_refused(words):
    words.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'user' or loop.last %}"
        "{{ m.content }}{% endif %}<|end|>{% endfor %}" + GENERATION
    )
    sentence = (
        rf"the chat template of {words.name_or_path} renders the turns before message 4 "
        r"differently from when they were the last ones: from token \d+ on '3 \+ 4 = 7<.end.>' "
        r"becomes '<.end.><.user.>.*'; train on the last turn alone \(turns=last\)"
    )
    with pytest.raises(ValueError, match=sentence):
        encode_conversation(words, CHAT)
    assert _spans(words, encode_conversation(words, CHAT, turns="last")) == ["7<|end|>"]


def test_conversations_without_a_turn_to_train(words):
    with pytest.raises(ValueError, match="the assistant says nothing to train on"):
        encode_conversation(words, CHAT, context=7)
    with pytest.raises(ValueError, match="turns='first' is unknown; use one of all, last"):
        encode_conversation(words, CHAT, turns="first")


def test_smollm2_masks():
    """Its pad token is its eos token, and its template adds a system message."""
    if not (directory := os.environ.get("JAXRLHF_SMOLLM2")):
        pytest.skip("set JAXRLHF_SMOLLM2 to a directory with the model")
    tokenizer = load_tokenizer(directory)
    chat = [
        {"role": "user", "content": "Say <|im_end|> twice"},
        {"role": "assistant", "content": " a\n\nassistant"},
        {"role": "user", "content": " a\n\nassistant"},
        {"role": "assistant", "content": "b"},
    ]
    example = encode_conversation(tokenizer, chat)
    assert _spans(tokenizer, example) == [" a\n\nassistant<|im_end|>", "b<|im_end|>"]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    assert tokenizer.decode(example.tokens.tolist()) + "\n" == text
    assert example.tokens.tolist() == tokenizer(text)["input_ids"][:-1]
    last = encode_conversation(tokenizer, chat, turns="last")
    assert last.tokens.tolist() == example.tokens.tolist()
    assert _spans(tokenizer, last) == ["b<|im_end|>"]
