"""A reward model's pieces with the config's choices bound: pairs, update, validation, export."""

import functools
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from experiments import embedded, inputs, ppo_steps, settings
from experiments.inputs import Model
from experiments.settings import Settings
from experiments.workdir import write_json
from jaxrlhf.data import planted_preferences, preferences, tables, tokenizer
from jaxrlhf.data.preferences import PreferenceDataset
from jaxrlhf.figures import Panel, read_metrics
from jaxrlhf.losses import bradley_terry, mean_interval
from jaxrlhf.models.hf_classifier import save_classifier
from jaxrlhf.models.scores import score_rows
from jaxrlhf.progress import progress
from jaxrlhf.rewards.calibration import calibration, correlation, length_baseline
from jaxrlhf.trainers.reward_model import RewardHyper, reward_loss
from jaxrlhf.trainers.update import update
from jaxrlhf.types import PreferenceBatch

COLUMNS = {
    "rm/loss": "loss",
    "rm/accuracy": "accuracy",
    "rm/margin": "margin",
    "val/accuracy": "val accuracy",
    "val/loss": "val loss",
    "val/ece": "calibration error",
    "val/length_correlation": "corr. with length",
    "rm/grad_norm": "gradient norm",
    "rm/learning_rate": "learning rate",
    "data/epoch": "epochs",
    "throughput/tokens_per_second": "tokens/s",
    "time/step": "seconds",
    "time/left": "seconds left",
}
PANELS = (
    Panel("Loss", "nats per pair", (("rm/loss", "training"), ("val/loss", "validation"))),
    Panel("Accuracy", "fraction of pairs", (("rm/accuracy", "training"), ("val/accuracy", "val"))),
    Panel("Chosen − rejected", "reward", (("rm/margin", "training"), ("val/margin", "val"))),
    Panel("Calibration error", "of the preferred", (("val/ece", "held out"),), (0.0, None)),
    Panel("Score against length", "correlation", (("val/length_correlation", "held out"),)),
    Panel("Learning rate", "of each update", (("rm/learning_rate", "now"),), (0.0, None), False),
)


def check(config: Settings) -> None:
    """``settings.check_ppo`` for ``experiments/reward_model.py``."""
    at_least_0 = [
        "data.max_val_pairs", "data.max_statistics_pairs", "rm.margin_scale", "rm.centring",
        "rm.label_smoothing",
    ]  # fmt: skip
    settings.check_supervised(
        config, "rm", at_least_0=at_least_0, at_least_1=["rm.score_batch_size"]
    )
    if not (config.data.train_files and config.data.val_files):
        raise ValueError("data.train_files and data.val_files need a file each (train=…,val=…).")
    hyper_parameters(config)


def prepare(
    config: Settings, workdir: pathlib.Path, check: Callable[[], None] = lambda: None
) -> None:
    """Writes planted preference data and a start model into ``workdir``, once.

    The start model is warmed up on answers whose adjectives suit a little more often than not, as
    a policy's would.

    Args:
      config, workdir, check: as in ``embedded.prepare``.
    """
    c = config.embedded
    seed, target = config.seed, workdir / config.model.path
    sizes = {"train": c.train_pairs, "val": c.val_pairs}
    files = {"train": config.data.train_files, "val": config.data.val_files}
    flip, demonstrations = c.flip_probability, c.demonstrations
    shape = {
        "num_layers": c.num_layers,
        "hidden_size": c.hidden_size,
        "num_heads": c.num_heads,
        "steps": c.warmup_steps,
        "batch_size": c.warmup_batch_size,
        "learning_rate": c.warmup_learning_rate,
    }
    if target.exists():
        return
    for split, n in sizes.items():
        pairs = planted_preferences.generate(seed, n, split=split, flip_probability=flip)
        tables.write_rows(workdir / files[split], pairs)
    words = tokenizer.build_word_tokenizer(planted_preferences.corpus(), workdir / "tokenizer")
    shown = planted_preferences.demonstrations(seed, demonstrations)
    params, model = embedded.warm_up(words, shown, check, seed=seed, **shape)
    embedded.save_start_model(target, params, model, words)


def load_model(config: Settings, workdir: pathlib.Path, check: Callable[[], None]) -> Model:
    """``inputs.load_model``, in the embedded recipe made by ``prepare``."""
    return inputs.load_model(config, workdir, check, prepare=prepare)


def load_pairs(
    config: Settings, workdir: pathlib.Path, model: Model
) -> tuple[PreferenceDataset, PreferenceDataset]:
    """Training and validation pairs, checked and tokenised; tells what needs no model.

    Raises:
      ValueError: a row has more tokens than the model has positions.
    """
    base = workdir if "embedded" in config else pathlib.Path()
    c, options = config.data, inputs.template_options(config)
    out = []
    for file, limit in ((c.train_files, None), (c.val_files, c.max_val_pairs or None)):
        records = preferences.read_preferences(base / file)[:limit]
        with progress(f"tokenising {file}", total=len(records), unit="pairs") as advance:
            dataset = preferences.tokenize_preferences(
                records,
                model.tokenizer,
                max_length=c.max_length,
                overlong=c.overlong,
                source=file,
                stop_ids=model.stop_ids,
                template_options=options,
                on_progress=advance.update,
            )
        print(
            f"{file}: {len(dataset)} pairs; {dataset.filtered} over {c.max_length} tokens left "
            f"out, {dataset.truncated} cut, {dataset.identical} of two equal answers left out"
        )
        out.append(dataset)
    longest = max(len(row) for dataset in out for row in (*dataset.chosen, *dataset.rejected))
    if longest > model.config.max_positions:
        raise ValueError(
            f"a row has {longest} tokens and the model {model.config.max_positions} positions; "
            "lower data.max_length to those."
        )
    _tell_baselines(*out)
    return out[0], out[1]


def _tell_baselines(train: PreferenceDataset, val: PreferenceDataset) -> None:
    accuracy = length_baseline(*(length_gaps(dataset) for dataset in (train, val)))
    print(f"judging by length alone is right on {accuracy:.3f} of the validation pairs")
    flipped = [record.get("extra_info") or {} for record in val.records]
    if all("flipped" in info for info in flipped):
        ceiling = 1 - np.mean([info["flipped"] for info in flipped])
        print(f"no rule can be right on more than {ceiling:.3f} of them (labels were flipped)")


def length_gaps(dataset: PreferenceDataset) -> np.ndarray:
    """Tokens of the chosen minus tokens of the rejected answer, of each pair."""
    pairs = zip(dataset.chosen, dataset.rejected, strict=True)
    return np.asarray([len(a) - len(b) for a, b in pairs])


def hyper_parameters(config: Settings) -> RewardHyper:
    """The loss's numbers, on the device; 0 switches a term off."""
    c = config.rm
    return RewardHyper.create(
        margin_scale=c.margin_scale or None,
        centring=c.centring or None,
        label_smoothing=c.label_smoothing or None,
    )


def bind(config: Settings, model: Model) -> Callable[..., Any]:
    """``update`` with all that is static bound: one compilation per width of batch."""
    c = config.rm
    loss_fn = functools.partial(
        reward_loss,
        config=model.config,
        compute_dtype=model.compute_dtype,
        remat=config.model.remat,
    )
    micro_batches = c.train_batch_size // c.micro_batch_size
    return functools.partial(update, loss_fn=loss_fn, num_micro_batches=micro_batches, name="rm")


def make_batch(dataset: PreferenceDataset, pair_ids: np.ndarray, model: Model) -> PreferenceBatch:
    """The pairs with these ids, as the trainer takes them."""
    pad_id = model.tokenizer.pad_token_id
    arrays = preferences.pad_pairs(dataset, pair_ids.tolist(), pad_id=pad_id)
    return PreferenceBatch(*map(jnp.asarray, arrays))


def make_scorer(
    config: Settings, model: Model, check: Callable[[], None] = lambda: None
) -> Callable[..., np.ndarray]:
    """(params, dataset, description) -> f32[pairs, 2], the chosen one first.

    ``check`` is called after every block of rows; what it raises ends the scoring.
    """
    passes = {"config": model.config, "compute_dtype": model.compute_dtype}
    batch_size = config.rm.score_batch_size

    def score(params: Any, dataset: PreferenceDataset, description: str) -> np.ndarray:
        def on_progress(rows: int) -> None:
            advance(rows)
            check()

        rows = [*dataset.chosen, *dataset.rejected]
        with progress(description, total=len(rows), unit="rows") as advance:
            scores = score_rows(
                params, rows, batch_size=batch_size, on_progress=on_progress, **passes
            )
        return scores.reshape(2, -1).T

    return score


def validation_metrics(dataset: PreferenceDataset, scores: np.ndarray) -> dict[str, float]:
    """``val/…`` of scores f32[pairs, 2] on held-out pairs.

    Accuracy (ties are failures) with its 95 % interval, and by source where there are several;
    mean margin and Bradley-Terry loss; the calibration error; the correlation of an answer's score
    with its length, and of the gap in score with the gap in length; mean and deviation of scores.
    """
    chosen, rejected = scores[:, 0], scores[:, 1]
    gaps, correct = chosen - rejected, (chosen > rejected).astype(np.float32)
    interval = mean_interval(jnp.asarray(correct))
    lengths = [
        [len(row) - n for row in pair]
        for *pair, n in zip(dataset.chosen, dataset.rejected, dataset.prompt_lengths, strict=True)
    ]
    metrics = {
        "val/accuracy": float(interval.mean),
        "val/accuracy_low": float(interval.low),
        "val/accuracy_high": float(interval.high),
        "val/margin": float(gaps.mean()),
        "val/loss": float(bradley_terry(jnp.asarray(chosen), jnp.asarray(rejected)).mean()),
        "val/ece": calibration(gaps).error,
        "val/length_correlation": correlation(scores.reshape(-1), np.reshape(lengths, -1)),
        "val/length_gap_correlation": correlation(gaps, length_gaps(dataset)),
        "val/score_mean": float(scores.mean()),
        "val/score_std": float(scores.std()),
    }
    sources = np.asarray([record["source"] for record in dataset.records])
    if len(names := sorted(set(sources.tolist()))) > 1:
        metrics |= {
            f"val/accuracy/{name}": float(correct[sources == name].mean()) for name in names
        }
    return metrics


def make_validation(
    dataset: PreferenceDataset, score: Callable[..., np.ndarray], workdir: pathlib.Path
) -> Callable[[Any], dict[str, float]]:
    """params -> ``validation_metrics``; the bins of the calibration go to ``calibration.json``."""

    def run(params: Any) -> dict[str, float]:
        scores = score(params, dataset, "validation")
        found = calibration(scores[:, 0] - scores[:, 1])
        columns = zip(found.predicted, found.accuracy, found.counts, strict=True)
        bins = [
            {"predicted": float(p), "accuracy": float(a), "pairs": int(n)}
            for p, a, n in columns
            if n
        ]
        write_json(workdir / "calibration.json", {"bins": bins, "error": found.error})
        return validation_metrics(dataset, scores)

    return run


check_updates = functools.partial(ppo_steps.check_updates, look_at="what the last batches hold")


def pad_token(model: Model, dataset: PreferenceDataset) -> tuple[int, str | None]:
    """A pad id that no row ends with, and its text where it is not the tokenizer's own.

    transformers finds a row's last token by looking for another than the pad id. Of several special
    tokens one is taken that the rows do not hold at all, where there is one.
    """
    own = model.tokenizer.pad_token_id
    if own not in model.stop_ids:
        return own, None
    others = [i for i in model.tokenizer.all_special_ids if i not in model.stop_ids]
    if not others:
        print(
            "the tokenizer has no special token that ends no row: transformers will read the score "
            "of a row that ends with the pad token one token earlier than we do"
        )
        return own, None
    used = set().union(*dataset.chosen, *dataset.rejected)
    best = min(others, key=lambda i: i in used)
    return best, model.tokenizer.convert_ids_to_tokens(best)


def make_export(
    config: Settings, model: Model, train: PreferenceDataset, score: Callable[..., np.ndarray]
) -> Callable[[pathlib.Path, Any], None]:
    """(directory, params) -> writes a ``…ForSequenceClassification`` directory in float32.

    With it go the mean and the standard deviation of its scores on the training pairs, of which
    ``data.max_statistics_pairs`` are taken, evenly spread.
    """
    limit = config.data.max_statistics_pairs or len(train)
    ids = np.unique(np.linspace(0, len(train) - 1, min(limit, len(train))).astype(int))
    sample = train.take(ids.tolist())
    pad_id, pad_text = pad_token(model, train)

    def export(directory: pathlib.Path, params: Any) -> None:
        scores = score(params, sample, "scores of the training data").astype(np.float64)
        save_classifier(
            directory,
            params,
            model.config,
            dtype=jnp.float32,
            pad_token_id=pad_id,
            pad_token=pad_text,
            source_dir=model.directory,
            statistics={"mean": scores.mean(), "std": scores.std(), "rows": scores.size},
        )

    return export


def export_if_best(
    workdir: pathlib.Path,
    params: Any,
    model: Model,
    metrics: Mapping[str, float],
    best: Any,
    *,
    export: Callable[[pathlib.Path, Any], None],
) -> float:
    """Exports the model to ``export/best`` if its validation accuracy is the best yet.

    Before training the head says 0 of everything, is right on no pair, and is not exported.

    Args:
      workdir: the run's directory.
      params: the reward model's.
      model: what it started from.
      metrics: of a validation.
      best: the best accuracy before it; None for the first validation of a run.
      export: from ``make_export``.

    Returns:
      The best so far.
    """
    value = metrics["val/accuracy"]
    if value > (best or 0):
        export(workdir / "export" / "best", params)
        return value
    return value if best is None else best


def finish(workdir: pathlib.Path, params: Any, export: Callable[[pathlib.Path, Any], None]) -> None:
    """Exports the last model and says what the run reached and left."""
    export(workdir / "export" / "last", params)
    columns = read_metrics(workdir / "metrics.jsonl")
    last = {name: values[-1] for name, (_, values) in columns.items() if name.startswith("val/")}
    print(
        f"done: validation accuracy {last['val/accuracy']:.3f} "
        f"[{last['val/accuracy_low']:.3f}, {last['val/accuracy_high']:.3f}], "
        f"{np.max(columns['val/accuracy'][1]):.3f} at best; margin {last['val/margin']:.2f}, "
        f"calibration error {last['val/ece']:.3f}, correlation with length "
        f"{last['val/length_correlation']:.2f}"
    )
    print(
        f"{workdir} holds metrics.jsonl, curves.png, calibration.json, export/best, export/last "
        "(each with reward_statistics.json)"
    )
