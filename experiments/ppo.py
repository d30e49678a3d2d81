"""PPO with an actor, a critic and a frozen reference.

    python experiments/ppo.py --config=configs/gsm8k.py:tiny [--workdir=DIR] [--config.seed=1]

``main`` is one iteration from top to bottom: prompts, rollout, scores, log-probs and values,
experience, updates, logging. What a run leaves lies in its directory; the README says what is what.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from experiments import cli, inputs, monitor, outputs, ppo_steps
from experiments.settings import check_ppo
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


def main(argv: list[str]) -> None:
    """Reads the config, builds what it describes, trains."""
    config, workdir, _lock = cli.open_run(argv, check_ppo)
    stop, phases, compiles = monitor.StopRequest(), monitor.Phases(), monitor.CompileCounter()

    # What the config describes.
    c, kl, n = config.ppo, config.kl, config.rollout.n
    model = inputs.load_model(config, workdir)
    train_set, val_set = inputs.load_prompts(config, workdir, model.tokenizer)
    data = PromptIterator(train_set, c.train_batch_size, config.seed)
    score = inputs.make_scorer(config)
    sampler = inputs.make_sampler(config, model)
    validate = inputs.make_validation(config, sampler, val_set, score, model)
    hyper, actor_opt, critic_opt = ppo_steps.hyper_parameters(config)
    batch_rows, mini_rows = c.train_batch_size * n, c.ppo_mini_batch_size * n
    steps = ppo_steps.bind(config, model, hyper)
    control = ppo_steps.kl_controller(config)
    run_key = jax.random.key(config.seed, impl="threefry2x32")
    total_steps = ppo_steps.total_steps(config, data.batches_per_epoch)
    writers = outputs.make_writers(config, workdir, total_steps)
    rollouts = RolloutWriter(workdir / "rollouts", rows=config.logging.rollouts_per_step)
    checkpoints = Checkpointer(workdir / "checkpoints", keep=config.keep_checkpoints, report=print)
    save_freq, test_freq, critic_warmup = config.save_freq, config.test_freq, c.critic_warmup
    ppo_epochs, kl_state = c.ppo_epochs, init_kl_state(kl.coef or 0.0)
    config.refuse_unread()

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
        best = done["best"] = outputs.export_if_best(workdir, actor.params, model, metrics, best)
        writers.write(0, metrics)

    def save() -> int:
        state = {"actor": actor, "critic": critic, "kl": kl_state}
        checkpoints.save(done["step"], state, done)
        return done["step"]

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
                scores, texts = inputs.score_rollout(rollout, batch, score, model)
                stop.check()
            with phases("evaluate"):
                evaluation = steps.evaluate(actor.params, ref_params, critic.params, rollout)
                if step == 1:
                    ppo_steps.check_start(config, model, actor, rollout, evaluation, hyper)
                experience, metrics = steps.make_experience(
                    rollout,
                    evaluation,
                    jnp.asarray(scores.scores),
                    jnp.asarray(scores.scored),
                    kl_coef=kl_state.coef if kl.where == "reward" else None,
                )
                jax.block_until_ready(experience)  # so that its time is not the update's
            with phases("update"), progress("update", ppo_epochs * batch_rows, "rows") as bar:
                if kl.where == "loss":
                    hyper = dataclasses.replace(hyper, kl_loss_coef=kl_state.coef)
                actor_history, critic_history = [], []
                for epoch in range(ppo_epochs):
                    key = ppo.epoch_key(run_key, step, epoch)
                    for part in steps.minibatches(key, experience, mini_rows):
                        critic, m = steps.update_critic(critic, part, critic_opt, hyper)
                        critic_history.append(m)
                        if step > critic_warmup:
                            actor, m = steps.update_actor(actor, part, actor_opt, hyper)
                            actor_history.append(m)
                        bar(mini_rows)
                metrics["kl/coef"] = kl_state.coef
                observed_kl = ppo_steps.observed_kl(metrics, experience)
                kl_state = control(kl_state, observed_kl, batch_rows)
                metrics |= summarize(critic_history) | summarize(actor_history)
            if step == total_steps or (test_freq and step % test_freq == 0):
                with phases("validate"):
                    metrics |= validate(actor.params)
                    best = outputs.export_if_best(workdir, actor.params, model, metrics, best)
            metrics |= monitor.step_metrics(phases, compiles, rollout, total_steps - step)
            rollouts.write(step, **texts, **outputs.row_columns(scores, rollout, experience))
            writers.write(step, metrics)
            ppo_steps.check_updates(metrics)
            done = {"step": step, "data": data.state(), "best": best}
            if step == total_steps or (save_freq and step % save_freq == 0):
                saved = save()
    except monitor.Interrupted:
        if saved != done["step"]:
            save()
    checkpoints.close()
    writers.close()
    training_curves(workdir / "metrics.jsonl", workdir / "curves.png", title=workdir.name)
    stop.exit_if_requested(f"stopped after step {done['step']}; --workdir={workdir} resumes")
    outputs.finish(workdir, actor.params, model)


if __name__ == "__main__":
    cli.run(main)
