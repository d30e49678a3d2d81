import contextlib
import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.gsm8k import get_config
from experiments import inputs, monitor, outputs, ppo_steps
from experiments.settings import Settings
from jaxrlhf.checkpoint import CheckpointError
from jaxrlhf.data.prompts import PromptIterator
from jaxrlhf.losses import adaptive_controller, fixed_controller, init_kl_state
from jaxrlhf.metrics import JsonlWriter, Writers
from jaxrlhf.models.heads import init_critic
from jaxrlhf.optimizers import OptimizerHyper
from jaxrlhf.rewards.scoring import Scores
from jaxrlhf.rollout.sampling import step_key
from jaxrlhf.trainers import ppo
from jaxrlhf.trainers.update import init_train_state, summarize


def test_every_number_reaches_its_place(config):
    distinct = {
        "ppo.clip_low": 0.11, "ppo.clip_high": 0.12, "ppo.dual_clip": 3.0, "ppo.value_clip": 0.13,
        "ppo.gamma": 0.99, "ppo.lam": 0.9, "ppo.entropy_coef": 0.02, "rollout.temperature": 0.7,
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
    off = {"ppo.value_clip", "ppo.dual_clip", "ppo.entropy_coef", "critic.max_grad_norm"}
    config.update_from_flattened_dict(dict.fromkeys(off, 0.0))
    hyper, actor, critic = ppo_steps.hyper_parameters(Settings(config))
    assert float(hyper.kl_loss_coef) == np.float32(0.05)
    assert (hyper.value_clip, hyper.dual_clip, hyper.entropy_coef) == (None, None, None)
    assert critic.max_grad_norm is None
    assert float(actor.max_grad_norm) == 1


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
    for steps, expected in ((0, 21), (20, 20), (60, 21)):
        config.total_steps = steps
        assert ppo_steps.total_steps(Settings(config), 7) == expected


def test_a_run_beyond_its_end_is_refused(capsys, refused):
    ppo_steps.tell_resumed(6, 6)
    assert capsys.readouterr().out == "resumed after step 6 of 6\n"
    sentence = refused(ppo_steps.tell_resumed, 6, 4)
    assert sentence.startswith("the run has done 6 steps, more than total_steps=4; raise")


def test_the_steps_that_are_validated(config):
    for freq, expected in ((0, {0, 6}), (2, {0, 2, 4, 6}), (4, {0, 4, 6}), (9, {0, 6})):
        config.test_freq = freq
        assert ppo_steps.validations(Settings(config), 6) == expected


@pytest.fixture
def report(tmp_path, monkeypatch):
    """A Report of steps 0 and 2 whose validations tell the accuracies in ``given``, and raise."""
    exported, given = [], []
    monkeypatch.setattr(outputs, "export", lambda directory, params, _: exported.append(params))

    def validate(params):
        value = given.pop(0)
        if isinstance(value, BaseException):
            raise value
        return {"val/score": 0.5, "val/accuracy": value}

    writers = Writers(JsonlWriter(tmp_path / "metrics.jsonl"))
    report = ppo_steps.Report(tmp_path, None, writers, monitor.Phases(), validate, {0, 2})
    yield report, given, exported
    writers.close()


def test_a_report_that_was_cut_short_is_made_up_for_once(report, tmp_path):
    """As after a resume from a checkpoint that was written before its step's validation."""
    report, given, exported = report

    def lines():
        return [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]

    given[:] = [0.25]
    done = {"step": 0, "best": None, "line": {}}
    assert report(done, "start") == 0.25
    assert report({"step": 1, "best": 0.25, "line": {"a": 1.0}}, "first") == 0.25
    done = {"step": 2, "best": 0.25, "line": {"a": 2.0, "b": float("nan")}}
    given[:] = [monitor.Interrupted(), 0.75]
    with pytest.raises(monitor.Interrupted):
        report(done, "second")
    assert [line["step"] for line in lines()] == [0, 1]
    assert report(done, "second") == 0.75
    written = lines()
    assert written[1] == {"step": 1, "a": 1.0}
    assert written[2].pop("time/validate") > 0
    assert written[2] == {"step": 2, "a": 2.0, "b": None, "val/score": 0.5, "val/accuracy": 0.75}
    assert report(done, "second") == 0.75  # the line is there: no validation, no second line
    assert lines()[:2] == written[:2]
    assert len(lines()) == 3
    assert exported == ["start", "second", "second"]
    assert done["line"].keys() == {"a", "b"}


class Recorder:
    """A Checkpointer's ``close`` and a run's ``save``, which fails where it is told to."""

    def __init__(self, failure=None):
        self.failure, self.calls = failure, []

    def save(self):
        self.calls.append("save")
        if self.failure:
            raise self.failure

    def close(self):
        self.calls.append("close")


@pytest.mark.parametrize(
    ("error", "failure", "raised", "calls"),
    [
        (None, None, None, ["close"]),
        (monitor.Interrupted(), None, None, ["save", "close"]),
        (KeyError("a scorer's"), None, KeyError, ["save", "close"]),
        (monitor.Interrupted(), CheckpointError("full"), CheckpointError, ["save"]),
        (KeyError("a scorer's"), CheckpointError("full"), KeyError, ["save"]),
        (SystemExit(130), None, SystemExit, []),  # "once more to stop without saving"
    ],
)
def test_a_run_that_ends_early_saves_its_state(error, failure, raised, calls, capsys):
    recorder = Recorder(failure)
    expected = contextlib.nullcontext() if raised is None else pytest.raises(raised)
    with expected, ppo_steps.rescued(recorder.save, recorder):
        if error is not None:
            raise error
    assert recorder.calls == calls
    told = capsys.readouterr().out
    assert told == ("error: full\n" if raised is KeyError and failure else "")


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


def test_three_updates_in_a_row_that_are_not_finite_stop_the_run(iteration, refused):
    """Wherever they stand in a step, and across steps: a good one after them is no excuse."""
    _, rollout, scores, _ = iteration.rollout(9, 1.0)
    _, good, _ = iteration.experience(rollout, scores)
    bad = dataclasses.replace(good, advantages=jnp.full_like(good.advantages, jnp.nan))
    before = jax.device_get(iteration.actor.params)
    history = [iteration.update(bad, 1)]  # two updates, of which the metrics are the second's
    ppo_steps.check_updates(summarize(history))
    assert jax.tree.all(
        jax.tree.map(np.array_equal, before, jax.device_get(iteration.actor.params))
    )
    history += [iteration.update(bad, 1), iteration.update(good, 1)]
    sentence = refused(ppo_steps.check_updates, summarize(history))
    assert sentence.startswith("4 updates in a row were not finite and were left out; lower the")
    history = [iteration.update(good, 1), iteration.update(bad, 1)]
    ppo_steps.check_updates(summarize(history))
    refused(ppo_steps.check_updates, {"value/skipped_in_a_row_max": 3.0})
    ppo_steps.check_updates({"value/skipped_in_a_row_max": 2.0})
    iteration.update(good, 1)


def test_rows_that_are_all_left_out_are_no_observation_of_the_kl(config, iteration):
    config.update_from_flattened_dict({"kl.target": 0.02, "kl.horizon": 100.0})
    control, state = ppo_steps.kl_controller(Settings(config)), init_kl_state(0.1)
    _, rollout, scores, _ = iteration.rollout(9, 1.0)
    for scored, moves in (([True] * 8, True), ([False] * 7 + [True], True), ([False] * 8, False)):
        told = Scores(scores.scores, {}, np.array(scored), ())
        _, experience, metrics = iteration.experience(rollout, told)
        observed = ppo_steps.observed_kl(metrics, experience)
        assert (control(state, observed, 8).coef != state.coef) == moves
        assert not moves or observed == metrics["kl/k1_token_mean"]


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


def test_a_stop_is_seen_during_validation(iteration):
    def check():
        raise monitor.Interrupted

    validate = inputs.make_validation(
        iteration.view, iteration.sampler, iteration.val, iteration.score, iteration.model, check
    )
    with pytest.raises(monitor.Interrupted):
        validate(iteration.actor.params)


def test_validation_is_greedy(iteration):
    first = iteration.validate(iteration.actor.params)
    assert first == iteration.validate(iteration.actor.params)
    assert {"val/accuracy", "val/score", "val/answer_found", "val/length_mean"} <= first.keys()
