import dataclasses
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from configs.gsm8k import get_config
from experiments import inputs, monitor, outputs, ppo_steps
from experiments.cli import is_refusal
from experiments.settings import Settings
from jaxrlhf.data.prompts import PromptIterator
from jaxrlhf.losses import adaptive_controller, fixed_controller, init_kl_state
from jaxrlhf.models import hf
from jaxrlhf.models.heads import init_critic
from jaxrlhf.optimizers import OptimizerHyper
from jaxrlhf.rewards.scoring import Scores
from jaxrlhf.rollout.sampling import step_key
from jaxrlhf.trainers import ppo
from jaxrlhf.trainers.update import init_train_state


@pytest.fixture
def config():
    config = get_config("tiny")
    values = {
        "ppo.train_batch_size": 4, "ppo.ppo_mini_batch_size": 2, "ppo.ppo_micro_batch_size": 2,
        "rollout.n": 2, "rollout.batch_size": 8, "rollout.max_response_length": 8,
        "reward.kwargs.format_score": 0.3,
    }  # fmt: skip
    config.update_from_flattened_dict(values)
    return config


@pytest.fixture
def view(config):
    return Settings(config)


@pytest.fixture(scope="module")
def model(workdir):
    return inputs.load_model(Settings(get_config("tiny")), workdir)


def refused(call, *args):
    """The one sentence with which ``call`` refuses its arguments."""
    with pytest.raises(Exception) as error:  # which kind is not the point
        call(*args)
    assert is_refusal(error.value), repr(error.value)
    assert "\n" not in str(error.value)
    return str(error.value)


# Model and data


def test_a_model_comes_with_what_belongs_to_it(workdir, capsys):
    model = inputs.load_model(Settings(get_config("tiny")), workdir)
    out = capsys.readouterr().out
    assert "these settings are not used: {'temperature': 0.6}" in out
    assert "rows end at ['<|pad|>', '<|end|>'] (ids [0, 1])" in out
    assert (model.stop_ids, model.compute_dtype) == ((0, 1), jnp.float32)
    assert model.config.num_layers == 1
    assert model.params["embed"].dtype == jnp.float32
    assert model.directory == workdir / "start_model"


def test_a_model_from_elsewhere(config, workdir, tmp_path, monkeypatch):
    del config.embedded
    config.model.path = str(tmp_path / "none")
    sentence = refused(inputs.load_model, Settings(config), tmp_path)
    assert f"{tmp_path}/none is no directory" in sentence
    # A relative path is the caller's, not the run directory's.
    config.model.path = "start_model"
    monkeypatch.chdir(workdir)
    assert inputs.load_model(Settings(config), tmp_path).config.num_layers == 1


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "chat_template.jinja"])
def test_a_model_with_a_file_missing_is_named(config, workdir, tmp_path, file):
    directory = tmp_path / "model"
    shutil.copytree(workdir / "start_model", directory)
    (directory / file).unlink()
    del config.embedded
    config.model.path = str(directory)
    assert str(directory) in refused(inputs.load_model, Settings(config), tmp_path)


def test_prompts(config, workdir, model, capsys):
    config.data.max_val_prompts = 5
    train, val = inputs.load_prompts(Settings(config), workdir, model.tokenizer)
    assert (len(train), len(val)) == (12, 5)
    assert "data/train.parquet: 12 prompts; 0 over 24 tokens left out" in capsys.readouterr().out
    longest = max(map(len, train.token_ids))
    config.data.max_prompt_length = longest - 1
    cut = inputs.load_prompts(Settings(config), workdir, model.tokenizer)[0]
    assert 0 < cut.filtered == sum(len(ids) == longest for ids in train.token_ids)
    config.data.overlong_prompts = "truncate"
    cut = inputs.load_prompts(Settings(config), workdir, model.tokenizer)[0]
    assert (len(cut), max(map(len, cut.token_ids))) == (12, longest - 1)
    config.data.overlong_prompts = "error"
    sentence = refused(inputs.load_prompts, Settings(config), workdir, model.tokenizer)
    assert "data/train.parquet: row " in sentence


def test_prompts_that_cannot_be_used(config, workdir, model, tmp_path):
    def sentence():
        return refused(inputs.load_prompts, Settings(config), workdir, model.tokenizer)

    config.data.max_prompt_length = 1
    assert "no prompt of 12 fits max_prompt_length 1; raise it." in sentence()
    config.data.train_files = str(tmp_path / "none.parquet")
    assert "none.parquet" in sentence()
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "none.parquet")
    assert "column data_source is missing (it has text)" in sentence()
    config.data.train_files = str(tmp_path / "train.csv")
    assert "only .parquet and .jsonl" in sentence()


# Scoring


def scorer(entries):
    def score(prompts, responses, records):
        return entries

    return score


@pytest.mark.parametrize(
    ("entries", "part"),
    [
        ([1.0, None], "row 1 (prompt index 7): its score is None, not a number"),
        ([1.0, float("nan")], "row 1 (prompt index 7): its score is nan, not a finite"),
        ([1.0], "it returned 1 entries for 2 rows"),
        (None, "it returned a NoneType"),
    ],
)
def test_a_scorer_that_gives_no_reward(view, config, entries, part, monkeypatch):
    monkeypatch.setattr(inputs, "load_scorer", lambda path, keywords: scorer(entries))
    record = {"extra_info": {"index": 7}}
    arguments = (["p", "p"], ["a", "b"], [record, record])
    assert part in refused(inputs.make_scorer(view), *arguments)
    config.reward.on_error = "skip"
    scores = inputs.make_scorer(Settings(config))(*arguments)
    assert len(scores.problems) == 1
    assert part in scores.problems[0]
    good = [True, False] if isinstance(entries, list) and len(entries) == 2 else [False, False]
    assert scores.scored.tolist() == good


def test_a_scorer_that_raises(view, monkeypatch):
    def score(prompts, responses, records):
        return [1 / 0]

    monkeypatch.setattr(inputs, "load_scorer", lambda path, keywords: score)
    sentence = refused(inputs.make_scorer(view), ["p"], ["a"], [{}])
    assert "score failed: ZeroDivisionError: division by zero" in sentence


def test_the_configs_scorer_gets_its_keywords(view, capsys):
    score = inputs.make_scorer(view)
    assert "scorer: jaxrlhf.rewards.gsm8k.score(format_score=0.3" in capsys.readouterr().out
    record = {"reward_model": {"ground_truth": "4"}}
    scores = score(["?"] * 3, ["#### 4", "#### 5", "four"], [record] * 3).scores
    np.testing.assert_array_equal(scores, np.array([1, 0.3, 0], np.float32))


def test_a_scorer_that_is_not_there(config):
    config.reward.function = "jaxrlhf.rewards.gsm8k.nothing"
    assert "has no 'nothing'" in refused(inputs.make_scorer, Settings(config))
    config.reward.function = "jaxrlhf.rewards.gsm8k.score"
    with config.unlocked():
        config.reward.kwargs.strictness = 1
    assert "strictness" in refused(inputs.make_scorer, Settings(config))


# Numbers


def test_every_number_reaches_its_place(config):
    distinct = {
        "ppo.clip_low": 0.11, "ppo.clip_high": 0.12, "ppo.dual_clip": 3.0, "ppo.value_clip": 0.13,
        "ppo.gamma": 0.99, "ppo.lam": 0.9, "ppo.entropy_coef": 0.0, "rollout.temperature": 0.7,
        "kl.coef": 0.05, "actor.learning_rate": 0.0, "critic.weight_decay": 0.3,
        "actor.schedule": "cosine", "actor.decay_steps": 9, "actor.min_ratio": 0.1,
    }  # fmt: skip
    config.update_from_flattened_dict(distinct)
    hyper, actor, critic = ppo_steps.hyper_parameters(Settings(config))
    expected = {key.partition(".")[2]: value for key, value in distinct.items() if "ppo" in key}
    for name, value in {**expected, "temperature": 0.7}.items():
        assert getattr(hyper, name).dtype == jnp.float32
        assert float(getattr(hyper, name)) == np.float32(value), name
    assert hyper.kl_loss_coef is None
    assert float(actor.learning_rate) == 0
    assert (actor.schedule, float(actor.decay_steps), critic.schedule) == ("cosine", 9, "constant")
    assert float(critic.weight_decay) == np.float32(0.3)
    assert float(actor.weight_decay) == np.float32(0.01)
    config.kl.where = "loss"
    config.ppo.value_clip = None
    hyper, _, _ = ppo_steps.hyper_parameters(Settings(config))
    assert float(hyper.kl_loss_coef) == np.float32(0.05)
    assert hyper.value_clip is None


@pytest.mark.parametrize(
    ("where", "estimator", "kl_in", "in_loss"),
    [("reward", "k3", "reward", None), ("loss", "k2", "loss", "k2"), ("none", "k1", None, None)],
)
def test_the_kl_settings_reach_the_steps(config, model, where, estimator, kl_in, in_loss):
    config.update_from_flattened_dict({"kl.where": where, "kl.estimator": estimator})
    view = Settings(config)
    steps = ppo_steps.bind(view, model, ppo_steps.hyper_parameters(view)[0])
    assert steps.make_experience.keywords["kl_in"] == kl_in
    assert steps.make_experience.keywords["kl_kind"] == estimator
    assert steps.update_actor.keywords["loss_fn"].keywords.get("kl_kind") == in_loss
    assert steps.update_actor.keywords["num_micro_batches"] == 2


def test_the_controller(config):
    assert ppo_steps.kl_controller(Settings(config)) is fixed_controller
    config.update_from_flattened_dict({"kl.target": 0.02, "kl.horizon": 100.0})
    control = ppo_steps.kl_controller(Settings(config))
    state, observed = init_kl_state(0.1), jnp.float32(0.5)
    expected = adaptive_controller(state, observed, 8, target=0.02, horizon=100.0)
    assert control(state, observed, 8).coef == expected.coef > state.coef


def test_total_steps(config):
    config.total_epochs = 3
    config.total_steps = None
    assert ppo_steps.total_steps(Settings(config), 7) == 21
    config.total_steps = 0
    assert ppo_steps.total_steps(Settings(config), 7) == 0


def test_unread_keys_are_refused(config):
    view = Settings(config)
    view.as_dict()
    view.refuse_unread()
    with config.unlocked():
        config.ppo.clip = 0.3
    view = Settings(config)
    view.actor.as_dict()
    sentence = refused(view.refuse_unread)
    assert sentence.startswith("config keys that nothing reads: critic.beta1, critic.beta2, ")
    assert "ppo.clip," in sentence
    assert "actor" not in sentence


def test_writers(config, tmp_path, capsys):
    config.logging.writers = ("console", "jsonl")
    writers = outputs.make_writers(Settings(config), tmp_path, 3)
    writers.write(1, {"reward/mean": jnp.float32(0.25), "other": 2.0})
    writers.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {
        "step": 1, "reward/mean": 0.25, "other": 2.0,
    }  # fmt: skip
    assert "step 1/3" in capsys.readouterr().out
    config.logging.writers = ("print", "jsonl")
    sentence = refused(outputs.make_writers, Settings(config), tmp_path, 3)
    assert sentence.startswith("logging.writers names ['print']; choose from console, tensorboard")


def test_the_best_policy_is_exported(model, tmp_path):
    def best_after(accuracy, best):
        return outputs.export_if_best(
            tmp_path, model.params, model, {"val/accuracy": accuracy}, best
        )

    target = tmp_path / "export" / "best" / "model.safetensors"
    assert best_after(0.5, 0.5) == 0.5
    assert not target.exists()
    assert best_after(0.0, -1.0) == 0.0
    first = target.stat().st_ino
    assert best_after(0.0, 0.0) == 0.0
    assert target.stat().st_ino == first
    assert best_after(0.25, 0.0) == 0.25
    assert target.stat().st_ino != first
    assert hf.load(tmp_path / "export" / "best")[1] == model.config


# One iteration, in this process


class Iteration:
    """The experiment's loop body on its own pieces."""

    def __init__(self, config, workdir, model):
        view = Settings(config)
        self.model, self.n = model, view.rollout.n
        self.train, self.val = inputs.load_prompts(view, workdir, model.tokenizer)
        self.data = PromptIterator(self.train, view.ppo.train_batch_size, view.seed)
        self.score = inputs.make_scorer(view)
        self.sampler = inputs.make_sampler(view, model)
        self.validate = inputs.make_validation(view, self.sampler, self.val, self.score, model)
        self.hyper, self.actor_opt, self.critic_opt = ppo_steps.hyper_parameters(view)
        self.steps = ppo_steps.bind(view, model, self.hyper)
        self.actor = init_train_state(model.params, self.actor_opt)
        critic = init_critic(model.params, model.config)
        self.critic = init_train_state(critic, self.critic_opt, copy=False)
        self.kl = init_kl_state(view.kl.coef)
        self.view = view

    def rollout(self, step, temperature):
        batch = self.data.next()
        rollout = self.sampler.generate(
            self.actor.params, batch.token_ids, prompt_ids=batch.prompt_ids.tolist(),
            key=step_key(0, step), samples_per_prompt=self.n, temperature=temperature,
        )  # fmt: skip
        scores, texts = inputs.score_rollout(rollout, batch, self.score, self.model)
        return batch, jax.device_put(rollout), scores, texts

    def experience(self, rollout, scores):
        evaluation = self.steps.evaluate(
            self.actor.params, self.model.params, self.critic.params, rollout,
            temperature=self.hyper.temperature,
        )  # fmt: skip
        experience, metrics = self.steps.make_experience(
            rollout, evaluation, jnp.asarray(scores.scores), jnp.asarray(scores.scored),
            kl_coef=self.kl.coef,
        )  # fmt: skip
        return evaluation, experience, metrics

    def update(self, experience, step):
        key = ppo.epoch_key(jax.random.key(0), step, 0)
        for part in ppo.minibatches(key, experience, 4, aggregation="token_mean"):
            self.critic, m = self.steps.update_critic(
                self.critic, part, self.critic_opt, self.hyper
            )
            self.actor, m = self.steps.update_actor(self.actor, part, self.actor_opt, self.hyper)
        return m


@pytest.fixture(scope="module")
def iteration(workdir, model):
    config = get_config("tiny")
    values = {
        "ppo.train_batch_size": 4, "ppo.ppo_mini_batch_size": 2, "ppo.ppo_micro_batch_size": 2,
        "rollout.n": 2, "rollout.batch_size": 8, "rollout.max_response_length": 8,
        "reward.kwargs.format_score": 0.3, "actor.learning_rate": 1e-2,
    }  # fmt: skip
    config.update_from_flattened_dict(values)
    return Iteration(config, workdir, model)


@pytest.fixture
def compiles():
    counter = monitor.CompileCounter()
    yield counter
    jax.monitoring.unregister_event_duration_listener(counter._listen)


def test_changed_numbers_compile_nothing(iteration, compiles):
    """Must-show 10: learning rate, clip, KL coefficient, temperature and their like."""

    def step(number, temperature):
        _, rollout, scores, _ = iteration.rollout(number, temperature)
        _, experience, _ = iteration.experience(rollout, scores)
        return jax.device_get(iteration.update(experience, number))

    iteration.validate(iteration.actor.params)
    for number in (1, 2):
        step(number, 1.0)
    warm = compiles.count
    assert warm > 5
    old = iteration.hyper, iteration.actor_opt, iteration.critic_opt, iteration.kl
    new = {
        "clip_low": 0.1, "clip_high": 0.4, "value_clip": 0.5, "gamma": 0.9, "lam": 0.5,
        "temperature": 0.7,
    }  # fmt: skip
    iteration.hyper = dataclasses.replace(
        iteration.hyper, **{name: jnp.asarray(value, jnp.float32) for name, value in new.items()}
    )
    iteration.actor_opt = OptimizerHyper.create(
        learning_rate=3e-4, beta1=0.8, weight_decay=0.1, max_grad_norm=0.5, warmup_steps=10
    )
    iteration.critic_opt = OptimizerHyper.create(learning_rate=0.0)
    iteration.kl = init_kl_state(0.5)
    metrics = step(3, 0.7)
    iteration.validate(iteration.actor.params)
    iteration.hyper, iteration.actor_opt, iteration.critic_opt, iteration.kl = old
    step(4, 1.0)
    print(f"\nmust-show 10: {warm} programs in two steps, {compiles.count - warm} in the next two")
    assert compiles.count == warm
    applied = int(iteration.actor.step)
    assert metrics["policy/learning_rate"] < 3e-4 * applied / 10


def test_scores_texts_and_rows_belong_together(iteration):
    batch, rollout, scores, texts = iteration.rollout(9, 1.0)
    assert len(texts["prompts"]) == len(texts["responses"]) == 8
    for row, (prompt, response) in enumerate(zip(*texts.values(), strict=True)):
        record = batch.records[row // 2]
        assert record["prompt"][0]["content"] in prompt
        start, end = int(rollout.prompt_lengths[row]), int(rollout.lengths[row])
        ids = np.asarray(rollout.tokens[row, start:end]).tolist()
        assert response == iteration.model.tokenizer.decode(ids, skip_special_tokens=True)
        assert scores.scores[row] == iteration.score([prompt], [response], [record]).scores[0]
    _, experience, _ = iteration.experience(rollout, scores)
    columns = outputs.row_columns(scores, rollout, experience)
    mask = np.asarray(experience.response_mask)
    for row in range(8):
        mean = np.asarray(experience.advantages)[row][mask[row]].mean()
        np.testing.assert_allclose(columns["advantages"][row], mean, rtol=1e-5, atol=1e-6)


def test_the_run_starts_only_where_ratio_is_1_and_kl_is_0(iteration, capsys):
    _, rollout, _, _ = iteration.rollout(9, 1.0)
    view, model, actor, hyper = iteration.view, iteration.model, iteration.actor, iteration.hyper
    fresh = dataclasses.replace(actor, params=model.params)
    evaluation = iteration.steps.evaluate(
        model.params, model.params, iteration.critic.params, rollout
    )
    rollout = dataclasses.replace(rollout, log_probs=evaluation.log_probs)
    ppo_steps.check_start(view, model, fresh, rollout, evaluation, hyper)
    told = dict(re.findall(r"(start/\w+) ([\d.e-]+)", capsys.readouterr().out))
    assert float(told["start/ratio_error_max"]) < 1e-6
    assert float(told["start/ref_kl_k3"]) < 1e-12
    moved = dataclasses.replace(actor, params=jax.tree.map(lambda x: 1.01 * x, model.params))
    with pytest.raises(RuntimeError, match="the ratio before the first update is off from 1"):
        ppo_steps.check_start(view, model, moved, rollout, evaluation, hyper)
    off = dataclasses.replace(rollout, log_probs=rollout.log_probs * 1.01)
    with pytest.raises(RuntimeError, match="sampler and trainer disagree"):
        ppo_steps.check_start(view, model, fresh, off, evaluation, hyper)
    wrong = dataclasses.replace(evaluation, ref_log_probs=evaluation.ref_log_probs * 1.01)
    with pytest.raises(RuntimeError, match="policy and reference differ"):
        ppo_steps.check_start(view, model, fresh, rollout, wrong, hyper)
    hot = dataclasses.replace(hyper, temperature=jnp.float32(0.8))
    with pytest.raises(RuntimeError, match="same temperature"):
        ppo_steps.check_start(view, model, fresh, rollout, evaluation, hot)


def test_three_updates_that_are_not_finite_stop_the_run(iteration):
    _, rollout, scores, _ = iteration.rollout(9, 1.0)
    _, good, _ = iteration.experience(rollout, scores)
    bad = dataclasses.replace(good, advantages=jnp.full_like(good.advantages, jnp.nan))
    before = jax.device_get(iteration.actor.params)
    iteration.update(bad, 1)  # two updates
    ppo_steps.check_updates(iteration.actor, iteration.critic)
    assert jax.tree.all(
        jax.tree.map(np.array_equal, before, jax.device_get(iteration.actor.params))
    )
    iteration.update(good, 1)
    assert int(iteration.actor.skipped_in_a_row) == 0
    for _ in range(2):
        iteration.update(bad, 1)
    assert int(iteration.actor.skipped) == 6
    sentence = refused(ppo_steps.check_updates, iteration.actor, iteration.critic)
    assert sentence.startswith("4 updates in a row were not finite and were left out; lower the")
    iteration.update(good, 1)
    ppo_steps.check_updates(iteration.actor, iteration.critic)


def test_unscored_rows_are_told_and_train_nothing(iteration, capsys):
    batch, rollout, scores, _ = iteration.rollout(9, 1.0)
    scored = np.array([True, False] * 4)
    problems = ("row 1 is odd",)
    given = Scores(scores.scores, {}, scored, problems)
    told, _ = inputs.score_rollout(rollout, batch, lambda *_: given, iteration.model)
    assert "unscored: row 1 is odd" in capsys.readouterr().out
    _, experience, metrics = iteration.experience(rollout, told)
    assert float(metrics["reward/unscored_fraction"]) == 0.5
    assert not np.asarray(experience.response_mask)[1::2].any()
    assert np.asarray(experience.loss_weights)[1::2].sum() == 0


def test_validation_is_greedy(iteration):
    first = iteration.validate(iteration.actor.params)
    assert first == iteration.validate(iteration.actor.params)
    assert {"val/accuracy", "val/score", "val/answer_found", "val/length_mean"} <= first.keys()
