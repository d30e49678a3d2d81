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
from experiments.workdir import fingerprint, naming
from jaxrlhf.checkpoint import Checkpointer
from jaxrlhf.data.prompts import PromptIterator
from jaxrlhf.figures import training_curves
from jaxrlhf.losses import init_kl_state
from jaxrlhf.metrics import RolloutWriter, to_floats
from jaxrlhf.models.heads import init_critic
from jaxrlhf.progress import progress
from jaxrlhf.rollout.sampling import step_key
from jaxrlhf.trainers import ppo
from jaxrlhf.trainers.update import init_train_state, summarize


def main(argv: list[str]) -> None:
    """Reads the config, builds what it describes, trains."""
    config, workdir, _lock = cli.open_run(argv, ppo_steps.check)
    stop, phases = monitor.StopRequest(), monitor.Phases()
    took = monitor.StepMetrics(phases, monitor.CompileCounter())

    # What the config describes; first what can be refused soonest.
    c, kl, n = config.ppo, config.kl, config.rollout.n
    hyper, actor_opt, critic_opt = ppo_steps.hyper_parameters(config)
    score = inputs.make_scorer(config)
    model = inputs.load_model(config, workdir, stop.exit_if_requested)
    sampler = inputs.make_sampler(config, model)
    train_set, val_set = inputs.load_prompts(config, workdir, model.tokenizer)
    data = PromptIterator(train_set, c.train_batch_size, config.seed)
    validate = inputs.make_validation(config, sampler, val_set, score, model, stop.check)
    batch_rows, mini_rows = c.train_batch_size * n, c.ppo_mini_batch_size * n
    steps, control = ppo_steps.bind(config, model, hyper), ppo_steps.kl_controller(config)
    run_key = jax.random.key(config.seed, impl="threefry2x32")
    total_steps = ppo_steps.total_steps(config, data.batches_per_epoch)
    writers = outputs.make_writers(config, workdir, total_steps)
    rollouts = RolloutWriter(workdir / "rollouts", rows=config.logging.rollouts_per_step)
    tests = ppo_steps.validations(config, total_steps)
    report = ppo_steps.Report(workdir, model, writers, phases, validate, tests)
    save_freq, critic_warmup, ppo_epochs = config.save_freq, c.critic_warmup, c.ppo_epochs
    kl_state = init_kl_state(kl.coef)
    checkpoints = Checkpointer(
        workdir / "checkpoints",
        keep=config.keep_checkpoints,
        fingerprint=fingerprint(model.directory, train_set, val_set),
        report=print,
    )
    config.refuse_unread()

    # The state of a run. What is not in here follows from the config and the step's number.
    ref_params = model.params
    actor = init_train_state(ref_params, actor_opt)
    critic = init_train_state(init_critic(ref_params, model.config), critic_opt, copy=False)
    done: dict[str, Any] = {"step": 0, "data": data.state(), "best": None, "line": {}}
    saved, whole = -1, True  # the newest checkpoint; False while a step's updates are under way
    if restored := checkpoints.restore({"actor": actor, "critic": critic, "kl": kl_state}):
        saved, state, done = restored
        actor, critic, kl_state = state["actor"], state["critic"], state["kl"]
        data.restore(done["data"])
        ppo_steps.tell_resumed(saved, total_steps)
    writers.resume_after(saved)
    rollouts.truncate_after(saved)

    def save() -> None:
        nonlocal saved
        if whole and done["step"] > max(saved, 0):
            checkpoints.save(done["step"], {"actor": actor, "critic": critic, "kl": kl_state}, done)
            saved = done["step"]

    with ppo_steps.rescued(save, checkpoints):
        done["best"] = report(done, actor.params)
        for step in range(done["step"] + 1, total_steps + 1):
            checkpoints.poll()
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
                metrics |= outputs.part_metrics(scores)
                jax.block_until_ready(experience)  # so that its time is not the update's
            with naming(workdir / "rollouts"):
                rollouts.write(step, **texts, **outputs.row_columns(scores, rollout, experience))
            stop.check()
            with phases("update"), progress("update", ppo_epochs * batch_rows, "rows") as bar:
                if kl.where == "loss":
                    hyper = dataclasses.replace(hyper, kl_loss_coef=kl_state.coef)
                whole, actor_history, critic_history = False, [], []
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
                kl_state = control(kl_state, ppo_steps.observed_kl(metrics, experience), batch_rows)
                metrics |= summarize(critic_history) | summarize(actor_history)
            metrics |= took(rollout, total_steps - step)
            done |= {"step": step, "data": data.state(), "line": to_floats(metrics)}
            whole = True
            if step == total_steps or (save_freq and step % save_freq == 0):
                save()  # before the validation, which a stop or a kill may cut short
            done["best"] = report(done, actor.params)
            ppo_steps.check_updates(done["line"])
    writers.close()
    if done["step"]:
        training_curves(workdir / "metrics.jsonl", workdir / "curves.png", title=workdir.name)
    stop.exit_if_requested(f"stopped after step {done['step']}; --workdir={workdir} resumes")
    outputs.finish(workdir, actor.params, model)


if __name__ == "__main__":
    cli.run(main)
