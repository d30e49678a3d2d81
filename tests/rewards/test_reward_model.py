"""A reward model's directory as a scorer: by tokens, by texts, normalised, and what is refused."""

import json
import pickle
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.data.chat import encode_example
from jaxrlhf.data.tokenizer import build_word_tokenizer, load_tokenizer, tokenizer_digest
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.heads import init_critic
from jaxrlhf.models.hf_classifier import save_classifier
from jaxrlhf.models.scores import score_rows as model_scores
from jaxrlhf.models.specs import init_params
from jaxrlhf.rewards import reward_model
from jaxrlhf.rewards.scoring import SampledText, ScoringError, load_scorer, score_rows

WORDS = ["red hats are warm", "cold hats are red", "warm"]
RECORDS = [{"prompt": [{"role": "user", "content": text}]} for text in WORDS]
RECORDS.append({"prompt": "red hats"})
ANSWERS = ["warm hats", "cold", "", " are warm"]


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    """These programs run for microseconds and compile for seconds: leave optimisation out."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The directory, its parameters, its config, its tokenizer."""
    root = tmp_path_factory.mktemp("reward_model")
    words = build_word_tokenizer(WORDS, root / "tokenizer")
    config = ModelConfig(
        family="llama", vocab_size=len(words), hidden_size=16, intermediate_size=16, num_layers=1,
        num_heads=1, num_kv_heads=1, head_dim=16, rope_theta=1e4, norm_eps=1e-5,
        tie_embeddings=True, max_positions=64, init_std=0.5,
    )  # fmt: skip
    params = init_critic(init_params(jax.random.key(0), config), config)
    params["head"]["kernel"] = jax.random.normal(jax.random.key(1), (16,))
    save_classifier(
        root / "model", params, config, dtype="float32", pad_token_id=words.pad_token_id,
        source_dir=root / "tokenizer", statistics={"mean": 1.5, "std": 2.0},
    )  # fmt: skip
    return root / "model", params, config, words


def expected(made, rows):
    _, params, config, _ = made
    return model_scores(params, rows, config=config)


def test_texts_are_put_behind_their_prompts(made):
    directory, _, _, words = made
    scorer = load_scorer("jaxrlhf.rewards.reward_model.score", {"directory": str(directory)})
    scores = score_rows(scorer, [""] * 4, ANSWERS, RECORDS)
    rows = [
        encode_example(words, r["prompt"], a).tokens.tolist()
        for r, a in zip(RECORDS, ANSWERS, strict=True)
    ]
    np.testing.assert_allclose(scores.scores, expected(made, rows), atol=1e-5)
    assert np.std(scores.scores) > 0.1
    assert type(scores.scores) is np.ndarray
    assert not isinstance(scores.scores, jax.Array)
    normalised = score_rows(
        load_scorer(
            "jaxrlhf.rewards.reward_model.score",
            {"directory": str(directory), "normalise": True, "batch_size": 2},
        ),
        [""] * 4, ANSWERS, RECORDS,
    )  # fmt: skip
    np.testing.assert_allclose(normalised.scores, (scores.scores - 1.5) / 2, atol=1e-5)
    np.testing.assert_allclose(normalised.parts["raw"], scores.scores, atol=1e-5)


def test_sampled_tokens_are_read_where_the_tokenizers_agree(made):
    """A cut answer stays cut; by another tokenizer's ids it would be nonsense."""
    directory, _, _, words = made
    prompt = words("red hats")["input_ids"]
    cut = [*prompt, *words(" are", add_special_tokens=False)["input_ids"]]
    for digest, row in ((tokenizer_digest(words), cut), ("another", [*cut, words.eos_token_id])):
        response = SampledText(" are", cut, digest)
        (got,) = reward_model.score(
            [""], [response], [{"prompt": "red hats"}], directory=str(directory)
        )
        np.testing.assert_allclose(got["score"], expected(made, [row])[0], atol=1e-5)


def test_sampled_text_is_text(made):
    text = SampledText("a b", [1, 2], "x")
    assert text == "a b"
    assert json.dumps([text]) == '["a b"]'
    again = pickle.loads(pickle.dumps(text))  # noqa: S301 - our own bytes
    assert (again, again.row, again.tokenizer) == ("a b", (1, 2), "x")


def test_digests_tell_what_makes_other_ids(made, tmp_path):
    _, _, _, words = made
    digest = tokenizer_digest(words)
    padded = load_tokenizer(made[0])
    padded(["warm", "red hats"], padding=True, truncation=True, max_length=2)
    padded.pad_token = padded.eos_token
    assert tokenizer_digest(padded) == digest
    assert tokenizer_digest(build_word_tokenizer([*WORDS, "new"], tmp_path)) != digest
    padded.chat_template += " "
    assert tokenizer_digest(padded) != digest
    assert tokenizer_digest(object()) is None


def test_no_gradient_reaches_it(made):
    """Its scores come as numbers of Python, whatever a loss does with them."""
    directory, _, _, _ = made
    (entry, *_) = reward_model.score([""], ANSWERS[:1], RECORDS[:1], directory=str(directory))
    assert {type(value) for value in entry.values()} == {float}

    def loss(params):
        # Even asked for the gradient with respect to its own parameters, they are constants.
        opened = reward_model.load(str(directory))._replace(params=params)
        rows = [opened.encode(ANSWERS[0], RECORDS[0])]
        return jnp.sum(jnp.asarray(model_scores(params, rows, config=opened.config)))

    with pytest.raises(jax.errors.TracerArrayConversionError):
        jax.eval_shape(jax.grad(loss), reward_model.load(str(directory)).params)


def test_rows_that_cannot_be_scored_are_told(made):
    directory, _, _, _ = made
    records = [RECORDS[0], {"prompt": [{"role": "judge", "content": "x"}]}, RECORDS[0]]
    answers = ["warm", "warm", "warm " * 70]
    keywords = {"directory": str(directory)}
    scorer = load_scorer("jaxrlhf.rewards.reward_model.score", keywords)
    scores = score_rows(scorer, [""] * 3, answers, records, on_error="skip")
    assert scores.scored.tolist() == [True, False, False]
    assert "the reward model's template refuses the row" in scores.problems[0]
    assert "unknown role judge" in scores.problems[0]
    assert "tokens exceed the reward model's 64" in scores.problems[1]


def test_normalisation_without_stored_numbers_is_an_error(made, tmp_path):
    directory, _, _, _ = made
    bare, constant = tmp_path / "bare", tmp_path / "constant"
    for copy in (bare, constant):
        shutil.copytree(directory, copy)
    (bare / "reward_statistics.json").unlink()
    (constant / "reward_statistics.json").write_text('{"mean": 1, "std": 0}')
    for path, problem in (
        (bare, "normalise is on, but .*reward_statistics.json is missing"),
        (constant, "a standard deviation above 0"),
    ):
        with pytest.raises(ScoringError, match=problem):
            reward_model.score([], [], [], directory=str(path), normalise=True)
    assert reward_model.score([], [], [], directory=str(bare)) == []


def test_another_models_directory_is_refused(made, tmp_path):
    directory, _, _, _ = made
    with pytest.raises(FileNotFoundError):
        reward_model.score([], [], [], directory=str(tmp_path / "none"))
    copy = tmp_path / "language"
    shutil.copytree(directory, copy)
    fields = json.loads((copy / "config.json").read_text())
    fields["architectures"] = ["LlamaForCausalLM"]
    (copy / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="give a reward model of LlamaForSequenceClassification"):
        reward_model.score([], [], [], directory=str(copy))
