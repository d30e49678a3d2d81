"""Generated preference data with a planted preference: adjectives should suit their nouns.

A prompt names some warm and some cold things; an answer gives each an adjective, which may be a
warm or a cold one. The answer in which more of them suit their nouns is preferred, but for a known
share of labels that are flipped. No single word tells: warm and cold nouns and adjectives are
equally frequent in both answers; only which stands beside which differs. Nor does the length:
"very" and "rather" are strewn in by chance.
"""

import itertools
import re
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

NOUNS = (
    ("soup", "oven", "candle", "desert", "tea", "ember", "summer", "stove", "sauna", "volcano"),
    ("ice", "snow", "glacier", "freezer", "winter", "frost", "igloo", "hail", "sorbet", "tundra"),
)
ADJECTIVES = (
    ("warm", "hot", "glowing", "burning", "steaming", "sunny", "boiling", "toasty"),
    ("cold", "icy", "frozen", "chilly", "freezing", "frosty", "polar", "arctic"),
)
DEGREES = ("very", "rather")
SOURCE = "planted"

_KIND = {word: kind for kind in (0, 1) for word in (*NOUNS[kind], *ADJECTIVES[kind])}
_NAMES = {word for group in NOUNS for word in group}


def true_reward(response: str, prompt: str) -> float:
    """The planted reward: which share of the prompt's things got one adjective that suits.

    Args:
      response: the answer's text; a thing that it leaves out, or names twice, suits nothing.
      prompt: the user's text.
    """
    nouns = [word for word in _words(prompt) if word in _NAMES]
    given: dict[str, list[bool]] = {noun: [] for noun in nouns}
    for before, word in itertools.pairwise(["", *_words(response)]):
        if word in given:
            is_adjective = before in _KIND and before not in _NAMES
            given[word].append(is_adjective and _KIND[before] == _KIND[word])
    return sum(fits == [True] for fits in given.values()) / max(len(given), 1)


def generate(
    seed: int, n: int, *, split: str = "train", flip_probability: float = 0.05
) -> list[dict[str, Any]]:
    """Rows of a preference table; the splits share no prompt.

    Args:
      seed: of everything random; not negative.
      n: pairs.
      split: "train" or "val".
      flip_probability: chance that a label is wrong: no rule can be right more often than
        1 - flip_probability.

    Returns:
      Records with ``prompt``, ``chosen``, ``rejected``, ``source`` and ``extra_info``: ``flipped``,
      and the true rewards of both answers.
    """
    rng = np.random.default_rng([seed, zlib.crc32(split.encode())])
    records = []
    for nouns in itertools.islice(_noun_lists(rng, split), n):
        prompt = ask(nouns)
        while True:
            answers = [_answer(rng, nouns, suit_probability=0.5) for _ in range(2)]
            rewards = [true_reward(answer, prompt) for answer in answers]
            if rewards[0] != rewards[1]:
                break
        better = int(rewards[1] > rewards[0])
        flipped = bool(rng.random() < flip_probability)
        chosen = better ^ flipped
        records.append(
            {
                "prompt": [{"role": "user", "content": prompt}],
                "chosen": answers[chosen],
                "rejected": answers[1 - chosen],
                "source": SOURCE,
                "extra_info": {
                    "flipped": flipped,
                    "true_chosen": rewards[chosen],
                    "true_rejected": rewards[1 - chosen],
                },
            }
        )
    return records


def demonstrations(seed: int, n: int, *, suit_probability: float = 0.6) -> list[dict[str, Any]]:
    """Prompts of the training split with ``extra_info.demonstration``, for a supervised warm-up."""
    rng = np.random.default_rng([seed, zlib.crc32(b"demonstrations")])
    return [
        {
            "prompt": [{"role": "user", "content": ask(nouns)}],
            "extra_info": {"demonstration": _answer(rng, nouns, suit_probability)},
        }
        for nouns in itertools.islice(_noun_lists(rng, "train"), n)
    ]


def corpus() -> list[str]:
    """Texts that hold every word, for a tokenizer."""
    words = [word for group in (*NOUNS, *ADJECTIVES, DEGREES) for word in group]
    return [ask(["soup", "ice", "tea"]), "the ice, the tea and the soup.", " " + " ".join(words)]


def ask(nouns: list[str]) -> str:
    """The user's text."""
    return f"Describe {_listed([f'the {noun}' for noun in nouns])}."


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def _listed(parts: list[str]) -> str:
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def _noun_lists(rng: np.random.Generator, split: str) -> Iterator[list[str]]:
    """Two to four things, those of a fifth of all prompts kept for validation."""
    if split not in ("train", "val"):
        raise ValueError(f"split={split!r} is unknown; use train or val.")
    names = sorted(_NAMES)
    while True:
        nouns = [names[i] for i in rng.permutation(len(names))[: rng.integers(2, 5)]]
        if (zlib.crc32(" ".join(nouns).encode()) % 5 == 0) == (split == "val"):
            yield nouns


def _answer(rng: np.random.Generator, nouns: list[str], suit_probability: float) -> str:
    parts = []
    for noun in nouns:
        kind = _KIND[noun] if rng.random() < suit_probability else 1 - _KIND[noun]
        adjective = ADJECTIVES[kind][rng.integers(len(ADJECTIVES[kind]))]
        degree = [DEGREES[rng.integers(len(DEGREES))]] if rng.random() < 0.4 else []
        parts.append(" ".join(["the", *degree, adjective, noun]))
    return f"{_listed(parts)}."
