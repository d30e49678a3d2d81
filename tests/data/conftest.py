import os
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from jaxrlhf.data import word_problems
from jaxrlhf.data.tokenizer import build_word_tokenizer


@pytest.fixture(scope="session")
def words_dir(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A word-level tokenizer over the generator's words."""
    directory = tmp_path_factory.mktemp("words")
    build_word_tokenizer(word_problems.corpus(), directory)
    return directory


@pytest.fixture
def words(words_dir: pathlib.Path) -> Any:
    """The tokenizer itself, opened anew: tests may change it."""
    from jaxrlhf.data.tokenizer import load_tokenizer

    return load_tokenizer(words_dir)


@pytest.fixture
def record() -> Callable[..., dict[str, Any]]:
    """Makes a right record; keyword arguments replace its keys."""

    def make(**changes: Any) -> dict[str, Any]:
        base = {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": "How many? ½ – \u2028 ok"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "72"},
            "extra_info": {"split": "train", "index": 0, "question": "q", "answer": "a"},
        }
        return base | changes

    return make


@pytest.fixture
def shared_gsm8k(repo_root: pathlib.Path) -> pathlib.Path:
    """GSM8K's jsonl files, where they are at hand."""
    shared = pathlib.Path(os.environ.get("JAXRLHF_SHARED", repo_root.parent / "shared"))
    directory = shared / "data" / "gsm8k"
    if not (directory / "train.jsonl").exists():
        pytest.skip("GSM8K is not at hand; set JAXRLHF_SHARED to a folder with data/gsm8k")
    return directory
