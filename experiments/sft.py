"""Supervised fine-tuning on conversations, with the loss on the assistant's turns alone.

    python experiments/sft.py --config=configs/sft.py:tiny [--workdir=DIR] [--config.seed=1]

``main`` is one update from top to bottom: packed rows, update, logging, validation. What a run
leaves lies in its directory; the README says what is what.
"""

from typing import Any

from experiments import cli, monitor, outputs, ppo_steps, sft_steps
from experiments.settings import check_sft
from experiments.workdir import fingerprint
from jaxrlhf.checkpoint import Checkpointer
from jaxrlhf.figures import training_curves
from jaxrlhf.progress import progress
from jaxrlhf.trainers.update import init_train_state, summarize


def main(argv: list[str]) -> None:
    """Reads the config, builds what it describes, trains."""
    config, workdir, _lock = cli.open_run(argv, check_sft)
    stop, phases = monitor.StopRequest(), monitor.Phases()
    took = monitor.StepMetrics(phases, monitor.CompileCounter())

    # What the config describes.
    model = sft_steps.load_model(config, workdir, stop.exit_if_requested)
    train_set, val_set = sft_steps.load_conversations(config, workdir, model)
    length = sft_steps.row_length(config, train_set, val_set)
    data = sft_steps.make_iterator(config, train_set, model, length)
    validate = sft_steps.make_validation(config, val_set, model, length, stop.check)
    hyper = ppo_steps.optimizer_hyper(config.optimizer)
    update = sft_steps.bind(config, model)
    total_steps = ppo_steps.total_steps(config, data.batches_per_epoch)
    writers = outputs.make_writers(
        config,
        workdir,
        total_steps,
        columns=sft_steps.COLUMNS,
        console_freq=config.logging.console_freq,
    )
    report = ppo_steps.Report(
        workdir,
        model,
        writers,
        phases,
        validate,
        ppo_steps.validations(config, total_steps),
        best_by="val/loss",
        export_if_best=sft_steps.export_if_best,
    )
    save_freq = config.save_freq
    checkpoints = Checkpointer(
        workdir / "checkpoints",
        keep=config.keep_checkpoints,
        fingerprint=fingerprint(model.directory, train_set.as_prompts(), val_set.as_prompts()),
        report=print,
    )
    config.refuse_unread()

    # The state of a run. What is not in here follows from the config and the step's number.
    state = init_train_state(model.params, hyper, copy=False)
    model = model._replace(params=None)  # the first update takes their memory
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
                batch = data.next()
                arrays, metrics = sft_steps.on_device(batch), sft_steps.batch_metrics(batch)
            with phases("update"):
                whole = False
                state, measured = update(state, arrays, hyper, None)
                metrics |= summarize([measured])  # waits for the update
            metrics["data/epoch"] = step / data.batches_per_epoch
            metrics |= took.of_tokens(metrics["data/tokens"], total_steps - step)
            done |= {"step": step, "data": data.state(), "line": metrics}
            whole = True
            if step == total_steps or (save_freq and step % save_freq == 0):
                save()  # before the validation, which a stop or a kill may cut short
            done["best"] = report(done, state.params)
            sft_steps.check_updates(metrics)
            bar(1)
    writers.close()
    if done["step"]:
        panels = sft_steps.PANELS
        training_curves(
            workdir / "metrics.jsonl", workdir / "curves.png", title=workdir.name, panels=panels
        )
    stop.exit_if_requested(f"stopped after step {done['step']}; --workdir={workdir} resumes")
    sft_steps.finish(workdir, state.params, model)


if __name__ == "__main__":
    cli.run(main)
