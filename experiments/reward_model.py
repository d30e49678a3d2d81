"""A reward model from pairs of answers: Bradley-Terry on a decoder with a scalar head.

    python experiments/reward_model.py --config=configs/reward_model.py:tiny [--workdir=DIR]

``main`` is one update from top to bottom: a batch of pairs, update, logging, validation. What a run
leaves lies in its directory; ``export/best`` is what PPO takes as
``reward=jaxrlhf.rewards.reward_model.score``.
"""

import functools
from typing import Any

from experiments import cli, monitor, outputs, ppo_steps, reward_steps
from experiments.workdir import fingerprint
from jaxrlhf.checkpoint import Checkpointer
from jaxrlhf.data.prompts import PromptIterator
from jaxrlhf.figures import training_curves
from jaxrlhf.models.heads import init_critic
from jaxrlhf.progress import progress
from jaxrlhf.trainers.update import init_train_state, summarize


def main(argv: list[str]) -> None:
    """Reads the config, builds what it describes, trains."""
    config, workdir, _lock = cli.open_run(argv, reward_steps.check)
    stop, phases = monitor.StopRequest(), monitor.Phases()
    took = monitor.StepMetrics(phases, monitor.CompileCounter())

    # What the config describes.
    model = reward_steps.load_model(config, workdir, stop.exit_if_requested)
    train_set, val_set = reward_steps.load_pairs(config, workdir, model)
    pairs = train_set.as_prompts()
    data = PromptIterator(pairs, config.rm.train_batch_size, config.seed)
    score = reward_steps.make_scorer(config, model, stop.check)
    export = reward_steps.make_export(config, model, train_set, score)
    hyper, optimizer = (
        reward_steps.hyper_parameters(config),
        ppo_steps.optimizer_hyper(config.optimizer),
    )
    update = reward_steps.bind(config, model)
    total_steps = ppo_steps.total_steps(config, data.batches_per_epoch)
    writers = outputs.make_writers(
        config,
        workdir,
        total_steps,
        columns=reward_steps.COLUMNS,
        console_freq=config.logging.console_freq,
    )
    report = ppo_steps.Report(
        workdir,
        model,
        writers,
        phases,
        reward_steps.make_validation(val_set, score, workdir),
        ppo_steps.validations(config, total_steps),
        best_by="val/accuracy",
        export_if_best=functools.partial(reward_steps.export_if_best, export=export),
    )
    save_freq = config.save_freq
    checkpoints = Checkpointer(
        workdir / "checkpoints",
        keep=config.keep_checkpoints,
        fingerprint=fingerprint(model.directory, pairs, val_set.as_prompts()),
        report=print,
    )
    config.refuse_unread()

    # The state of a run. What is not in here follows from the config and the step's number.
    state = init_train_state(init_critic(model.params, model.config), optimizer, copy=False)
    model = model._replace(params=None)  # the start model's memory is free from here on
    done: dict[str, Any] = {"step": 0, "data": data.state(), "best": None, "line": {}}
    saved, whole = -1, True  # the newest checkpoint; False while an update is under way
    if restored := checkpoints.restore(state):
        saved, state, done = restored
        data.restore(done["data"])
        ppo_steps.tell_resumed(saved, total_steps)
    writers.resume_after(saved)

    def save() -> None:
        nonlocal saved
        if whole and done["step"] > max(saved, 0):
            checkpoints.save(done["step"], state, done)
            saved = done["step"]

    left = total_steps - done["step"]
    with ppo_steps.rescued(save, checkpoints), progress("training", left, "updates") as bar:
        done["best"] = report(done, state.params)
        for step in range(done["step"] + 1, total_steps + 1):
            checkpoints.poll()
            stop.check()
            with phases("data"):
                batch = reward_steps.make_batch(train_set, data.next().prompt_ids, model)
            with phases("update"):
                whole = False
                state, measured = update(state, batch, optimizer, hyper)
                metrics = summarize([measured])  # waits for the update
            metrics["data/tokens"] = float(batch.lengths.sum())
            metrics["data/epoch"] = step / data.batches_per_epoch
            metrics |= took.of_tokens(metrics["data/tokens"], total_steps - step)
            done |= {"step": step, "data": data.state(), "line": metrics}
            whole = True
            if step == total_steps or (save_freq and step % save_freq == 0):
                save()  # before the validation, which a stop or a kill may cut short
            done["best"] = report(done, state.params)
            reward_steps.check_updates(metrics)
            bar(1)
    writers.close()
    if done["step"]:
        curves, panels = workdir / "curves.png", reward_steps.PANELS
        training_curves(workdir / "metrics.jsonl", curves, title=workdir.name, panels=panels)
    stop.exit_if_requested(f"stopped after step {done['step']}; --workdir={workdir} resumes")
    reward_steps.finish(workdir, state.params, export)


if __name__ == "__main__":
    cli.run(main)
