"""PPO with an actor, a critic and a frozen reference.

    python experiments/ppo.py --config=configs/gsm8k.py:tiny [--workdir=DIR] [--config.seed=1]

``main`` is one iteration from top to bottom: prompts, rollout, scores, log-probs and values,
experience, updates, logging. What a run leaves lies in its directory; the README says what is what.
"""

import dataclasses
import sys
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags, logging
from ml_collections import config_flags

from experiments import errors, monitor, pieces
from experiments.settings import Settings, check_ppo, open_workdir, recipe_name
from jaxrlhf.checkpoint import Checkpointer
from jaxrlhf.data.prompts import PromptIterator
from jaxrlhf.figures import training_curves
from jaxrlhf.losses import init_kl_state
from jaxrlhf.metrics import RolloutWriter
from jaxrlhf.models.heads import init_critic
from jaxrlhf.progress import progress
from jaxrlhf.rollout.sampling import step_key
from jaxrlhf.trainers import ppo
from jaxrlhf.trainers.update import init_train_state, summarize

CONFIG = config_flags.DEFINE_config_file("config", None, "The recipe, as file.py[:argument].")
WORKDIR = flags.DEFINE_string(
    "workdir", None, "Directory of the run, resumed where one lies there; default: a new one."
)
flags.mark_flag_as_required("config")


def main(argv: list[str]) -> None:
    """Reads the config, builds the pieces, trains."""
    logging.set_verbosity(logging.WARNING)  # orbax tells much at INFO
    check_ppo(Settings(CONFIG.value))  # a view of its own: what only checks read counts as unread
    config = Settings(CONFIG.value)
    workdir, _lock = open_workdir(CONFIG.value, WORKDIR.value, recipe_name(argv))
    stop, phases, compiles = monitor.StopRequest(), monitor.Phases(), monitor.CompileCounter()

    # The pieces that the config describes.
    c, kl, n = config.ppo, config.kl, config.rollout.n
    model = pieces.load_model(config, workdir)
    train_set, val_set = pieces.load_prompts(config, workdir, model.tokenizer)
    data = PromptIterator(train_set, c.train_batch_size, config.seed)
    score = pieces.make_scorer(config)
    sampler = pieces.make_sampler(config, model)
    validate = pieces.make_validation(config, sampler, val_set, score, model)
    hyper, actor_opt, critic_opt = pieces.hyper_parameters(config)
    batch_rows, mini = c.train_batch_size * n, c.ppo_mini_batch_size * n
    steps = pieces.steps(config, model, hyper)
    control = pieces.kl_controller(config)
    run_key = jax.random.key(config.seed, impl="threefry2x32")
    total_steps = pieces.total_steps(config, data.batches_per_epoch)
    writers = pieces.make_writers(config, workdir, total_steps)
    rollouts = RolloutWriter(workdir / "rollouts", rows=config.logging.rollouts_per_step)
    checkpoints = Checkpointer(workdir / "checkpoints", keep=config.keep_checkpoints, report=print)
    save_freq, test_freq, critic_warmup = config.save_freq, config.test_freq, c.critic_warmup
    ppo_epochs, kl_state = c.ppo_epochs, init_kl_state(kl.coef or 0.0)
    pieces.refuse_unread(config)

    # The state of a run. What is not in here follows from the config and the step's number.
    ref_params = model.params
    actor = init_train_state(ref_params, actor_opt)
    critic = init_train_state(init_critic(ref_params, model.config), critic_opt, copy=False)
    done: dict[str, Any] = {"step": 0, "data": data.state(), "best": -1.0}
    saved = -1
    if restored := checkpoints.restore({"actor": actor, "critic": critic, "kl": kl_state}):
        saved, state, done = restored
        actor, critic, kl_state = state["actor"], state["critic"], state["kl"]
        data.restore(done["data"])
        print(f"resumed after step {saved} of {total_steps}")
    writers.resume_after(saved)
    rollouts.truncate_after(saved)
    best = done["best"]
    if restored is None:
        metrics = validate(actor.params)
        best = done["best"] = pieces.export_if_best(workdir, actor.params, model, metrics, best)
        writers.write(0, metrics)

    try:
        for step in range(done["step"] + 1, total_steps + 1):
            stop.check()
            with phases("rollout"), progress("rollout", batch_rows, "rows") as bar:
                batch = data.next()
                rollout = sampler.generate(
                    actor.params,
                    batch.token_ids,
                    prompt_ids=batch.prompt_ids.tolist(),
                    key=step_key(config.seed, step),
                    samples_per_prompt=n,
                    temperature=config.rollout.temperature,
                    policy_version=step - 1,
                    on_progress=stop.checked(bar),
                )
                rollout = jax.device_put(ppo.trim(rollout, multiple=32))
            with phases("score"):
                scores, texts = pieces.score_rollout(rollout, batch, score, model)
                stop.check()
            with phases("evaluate"):
                evaluation = steps.evaluate(
                    actor.params, ref_params, critic.params, rollout, hyper.temperature
                )
                if step == 1:
                    pieces.check_start(config, model, actor, rollout, evaluation, hyper)
                experience, metrics = steps.make_experience(
                    rollout,
                    evaluation,
                    jnp.asarray(scores.scores),
                    jnp.asarray(scores.scored),
                    kl_coef=kl_state.coef if kl.where == "reward" else None,
                )
            with phases("update"), progress("update", ppo_epochs * batch_rows, "rows") as bar:
                if kl.where == "loss":
                    hyper = dataclasses.replace(hyper, kl_loss_coef=kl_state.coef)
                actor_history, critic_history = [], []
                learns = bool(scores.scored.any())  # else decay and momentum alone would act
                for epoch in range(ppo_epochs if learns else 0):
                    key = ppo.epoch_key(run_key, step, epoch)
                    for part in steps.minibatches(key, experience, mini):
                        critic, m = steps.update_critic(critic, part, critic_opt, hyper)
                        critic_history.append(m)
                        if step > critic_warmup:
                            actor, m = steps.update_actor(actor, part, actor_opt, hyper)
                            actor_history.append(m)
                        bar(mini)
                metrics["kl/coef"] = kl_state.coef
                if learns:
                    kl_state = control(kl_state, metrics["kl/k1_token_mean"], batch_rows)
                metrics |= summarize(critic_history) | summarize(actor_history)
            if step == total_steps or (test_freq and step % test_freq == 0):
                with phases("validate"):
                    metrics |= validate(actor.params)
                    best = pieces.export_if_best(workdir, actor.params, model, metrics, best)
            metrics |= monitor.step_metrics(phases, compiles, rollout, total_steps - step)
            rollouts.write(step, **texts, **pieces.row_columns(scores, rollout, experience))
            writers.write(step, metrics)
            pieces.check_updates(actor, critic)
            done = {"step": step, "data": data.state(), "best": best}
            if step == total_steps or (save_freq and step % save_freq == 0):
                checkpoints.save(step, {"actor": actor, "critic": critic, "kl": kl_state}, done)
                saved = step
    except monitor.Interrupted:
        if saved != done["step"]:
            state = {"actor": actor, "critic": critic, "kl": kl_state}
            checkpoints.save(done["step"], state, done)
    checkpoints.close()
    writers.close()
    training_curves(workdir / "metrics.jsonl", workdir / "curves.png", title=workdir.name)
    if stop.signum is not None:
        print(
            f"stopped after step {done['step']}; the same command with --workdir={workdir} resumes"
        )
        sys.exit(128 + stop.signum)
    pieces.export(workdir / "export" / "last", actor.params, model)
    print(f"done: {workdir} holds metrics.jsonl, curves.png, rollouts/, export/best, export/last")


if __name__ == "__main__":
    app.run(errors.one_sentence(main), flags_parser=errors.parse_flags)
