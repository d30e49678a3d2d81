"""The planted preference: what it is, and what does not give it away."""

import collections
import re

import numpy as np
import pytest

from jaxrlhf.data import planted_preferences as planted
from jaxrlhf.data.preferences import check_pair
from jaxrlhf.data.tokenizer import build_word_tokenizer
from jaxrlhf.rewards.calibration import length_baseline


@pytest.fixture(scope="module")
def pairs():
    return planted.generate(0, 4000)


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("the very warm soup and the icy snow.", 1.0),
        ("the icy soup and the frozen snow.", 0.5),
        ("the warm very soup and the snow.", 0.0),
        ("the warm soup, the warm soup and the icy snow.", 0.5),
        ("the icy snow and the hot soup and the hot tea", 1.0),
        ("the snow soup", 0.0),
        ("", 0.0),
    ],
)
def test_the_true_reward(response, reward):
    assert planted.true_reward(response, "Describe the soup and the snow.") == reward


def test_labels_follow_the_true_reward_but_for_the_flips(pairs):
    for pair in pairs:
        info, prompt = pair["extra_info"], pair["prompt"][0]["content"]
        for key in ("chosen", "rejected"):
            assert info[f"true_{key}"] == planted.true_reward(pair[key], prompt)
        assert info["flipped"] == (info["true_chosen"] < info["true_rejected"])
        check_pair(pair, "here")
    assert 0.035 < np.mean([pair["extra_info"]["flipped"] for pair in pairs]) < 0.065
    clean = planted.generate(0, 50, flip_probability=0.0)
    assert not any(pair["extra_info"]["flipped"] for pair in clean)


def test_neither_a_word_nor_the_length_tells(pairs):
    counts = {key: collections.Counter() for key in ("chosen", "rejected")}
    lengths = []
    for pair in pairs:
        words = {key: re.findall(r"\w+", pair[key]) for key in counts}
        lengths.append(len(words["chosen"]) - len(words["rejected"]))
        for key, found in words.items():
            counts[key].update(set(found))
    for word in counts["chosen"]:
        a, b = counts["chosen"][word], counts["rejected"][word]
        assert abs(a - b) < 5 * np.sqrt(a + b), word
    assert np.std(lengths) > 0.5
    half = len(lengths) // 2
    assert abs(length_baseline(lengths[:half], lengths[half:]) - 0.5) < 0.03


def test_splits_share_no_prompt_and_the_seed_makes_all(pairs):
    validation = planted.generate(0, 300, split="val")
    prompts = [{pair["prompt"][0]["content"] for pair in part} for part in (pairs, validation)]
    assert not prompts[0] & prompts[1]
    assert planted.generate(0, 40) == pairs[:40]
    assert planted.generate(1, 40) != pairs[:40]
    with pytest.raises(ValueError, match="split='test' is unknown"):
        planted.generate(0, 1, split="test")


def test_demonstrations_suit_as_often_as_asked_and_all_words_are_known(pairs, tmp_path):
    shown = planted.demonstrations(0, 2000, suit_probability=0.7)
    rewards = [
        planted.true_reward(r["extra_info"]["demonstration"], r["prompt"][0]["content"])
        for r in shown
    ]
    assert abs(np.mean(rewards) - 0.7) < 0.03
    words = build_word_tokenizer(planted.corpus(), tmp_path)
    texts = [text for pair in pairs for text in (pair["prompt"][0]["content"], pair["chosen"])]
    assert words.unk_token_id not in {i for text in texts for i in words(text)["input_ids"]}
