"""Supervised fine-tuning's pieces with the config's choices bound: data, update, validation."""

import functools
import json
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import embedded, inputs, outputs, ppo_steps
from experiments.inputs import Model
from experiments.settings import Settings
from jaxrlhf.data import conversations
from jaxrlhf.data.batching import bucket_length
from jaxrlhf.data.conversations import ConversationDataset
from jaxrlhf.data.packing import PackedBatch, PackedIterator, packed_rows, pass_over
from jaxrlhf.figures import Panel, read_metrics
from jaxrlhf.models import hf
from jaxrlhf.progress import progress
from jaxrlhf.trainers.sft import sft_loss
from jaxrlhf.trainers.update import update
from jaxrlhf.types import TokenBatch

COLUMNS = {
    "sft/loss": "loss",
    "val/loss": "val loss",
    "val/perplexity": "val perplexity",
    "sft/entropy": "entropy",
    "sft/grad_norm": "gradient norm",
    "sft/learning_rate": "learning rate",
    "data/epoch": "epochs",
    "data/filled_fraction": "rows filled",
    "throughput/tokens_per_second": "tokens/s",
    "time/step": "seconds",
    "time/left": "seconds left",
}
PANELS = (
    Panel("Loss", "nats per token", (("sft/loss", "training"), ("val/loss", "validation"))),
    Panel("Entropy", "nats per token", (("sft/entropy", "in updates"),), (0.0, None)),
    Panel("Gradient norm", "before clipping", (("sft/grad_norm", "mean"),), (0.0, None)),
    Panel("Learning rate", "of each update", (("sft/learning_rate", "now"),), (0.0, None)),
)


def load_model(config: Settings, workdir: pathlib.Path, check: Callable[[], None]) -> Model:
    """``inputs.load_model``; ``data.end_token`` becomes one of the tokens that end a turn.

    Raises:
      ValueError: that text is not one token.
    """
    model = inputs.load_model(config, workdir, check, prepare=embedded.prepare_sft)
    if not (text := config.data.end_token):
        return model
    ids = model.tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        raise ValueError(
            f"data.end_token={text!r} is {len(ids)} tokens; give the one that ends a turn."
        )
    return model._replace(stop_ids=tuple(sorted({*model.stop_ids, *ids})))


def load_conversations(
    config: Settings, workdir: pathlib.Path, model: Model
) -> tuple[ConversationDataset, ConversationDataset]:
    """Training and validation conversations, checked and tokenised.

    Raises:
      ValueError: a conversation has more tokens than the model has positions.
    """
    base = workdir if "embedded" in config else pathlib.Path()
    c = config.data
    options = inputs.template_options(config)
    out = []
    for file, limit in ((c.train_files, None), (c.val_files, c.max_val_conversations or None)):
        records = conversations.read_conversations(base / file)[:limit]
        with progress(f"tokenising {file}", total=len(records), unit="conversations") as advance:
            dataset = conversations.tokenize_conversations(
                records,
                model.tokenizer,
                max_length=c.max_length,
                overlong=c.overlong,
                turns=c.turns,
                source=file,
                stop_ids=model.stop_ids,
                template_options=options,
                on_progress=advance.update,
            )
        tokens = sum(len(example.tokens) for example in dataset.examples)
        trained = sum(int(example.answer_mask.sum()) for example in dataset.examples)
        print(
            f"{file}: {len(dataset)} conversations of {tokens} tokens, {trained} of them trained "
            f"on; {dataset.filtered} over {c.max_length} tokens left out, {dataset.truncated} cut"
        )
        out.append(dataset)
    longest = max(longest_example(dataset) for dataset in out)
    if longest > model.config.max_positions:
        raise ValueError(
            f"a conversation has {longest} tokens and the model {model.config.max_positions} "
            "positions; lower data.max_length to those."
        )
    return out[0], out[1]


def longest_example(dataset: ConversationDataset) -> int:
    """Tokens of the longest conversation."""
    return max(len(example.tokens) for example in dataset.examples)


def row_length(config: Settings, *datasets: ConversationDataset) -> int:
    """Tokens in a row: ``data.max_length``, or without packing what the longest one needs."""
    if config.data.packing:
        return config.data.max_length
    return bucket_length(max(map(longest_example, datasets)), multiple=32)


def make_iterator(
    config: Settings, dataset: ConversationDataset, model: Model, length: int
) -> PackedIterator:
    """The training batches."""
    data = PackedIterator(
        dataset.examples,
        batch_size=config.sft.train_batch_size,
        length=length,
        seed=config.seed,
        pad_id=model.tokenizer.pad_token_id,
        packing=config.data.packing,
    )
    print(
        f"an epoch is {data.batches_per_epoch} updates: {len(dataset)} conversations in "
        f"{data.rows_per_epoch} rows of {length} tokens"
    )
    return data


def bind(config: Settings, model: Model) -> Callable[..., Any]:
    """``update`` with all that is static bound: one compilation."""
    c = config.sft
    loss_fn = functools.partial(
        sft_loss,
        config=model.config,
        compute_dtype=model.compute_dtype,
        remat=config.model.remat,
    )
    micro_batches = c.train_batch_size // c.micro_batch_size
    return functools.partial(update, loss_fn=loss_fn, num_micro_batches=micro_batches, name="sft")


def on_device(batch: PackedBatch) -> TokenBatch:
    """The batch's arrays as the trainer takes them."""
    return TokenBatch(*map(jnp.asarray, batch.arrays))


def batch_metrics(batch: PackedBatch) -> dict[str, float]:
    """What is in a batch: conversations, their tokens, and how much of the rows they fill."""
    real = batch.arrays.segment_ids > 0
    return {
        "data/conversations": float(len(batch.example_ids)),
        "data/tokens": float(real.sum()),
        "data/trained_tokens": float((batch.arrays.loss_weights > 0).sum()),
        "data/filled_fraction": float(real.mean()),
    }


def make_validation(
    config: Settings,
    dataset: ConversationDataset,
    model: Model,
    length: int,
    check: Callable[[], None] = lambda: None,
) -> Callable[[Any], dict[str, float]]:
    """params -> ``val/loss`` (nats per trained token of all conversations), ``val/perplexity``.

    ``check`` is called after every batch; what it raises ends the validation.
    """
    micro, pad_id = config.sft.micro_batch_size, model.tokenizer.pad_token_id
    rows = packed_rows([len(e.tokens) for e in dataset.examples], length, config.data.packing)
    loss = jax.jit(
        functools.partial(sft_loss, config=model.config, compute_dtype=model.compute_dtype)
    )

    def run(params: Any) -> dict[str, float]:
        total, count = 0.0, 0
        with progress("validation", total=len(rows), unit="rows") as advance:
            for batch in pass_over(dataset.examples, rows, micro, length=length, pad_id=pad_id):
                trained = int((batch.arrays.loss_weights > 0).sum())
                total += trained * float(loss(params, on_device(batch))[0])
                count += trained
                advance(min(micro, len(rows) - advance.done))
                check()
        mean = total / count
        return {"val/loss": mean, "val/perplexity": float(np.exp(mean))}

    return run


check_updates = functools.partial(ppo_steps.check_updates, look_at="what the last batches hold")


def export_if_best(
    workdir: pathlib.Path, params: Any, model: Model, metrics: Mapping[str, float], best: Any
) -> float:
    """Exports the model to ``export/best`` if its validation loss is the lowest yet.

    Args:
      workdir: the run's directory.
      params: the model's.
      model: what it started from.
      metrics: of a validation.
      best: the lowest loss before it; None for the first validation of a run.

    Returns:
      The lowest so far.

    Raises:
      ValueError: the first validation's loss is not finite, so nothing could be told from it.
    """
    value = metrics["val/loss"]
    if best is None and not math.isfinite(value):
        raise ValueError(
            f"val/loss is {value} before training; check the start model and data.val_files."
        )
    if best is None or value < best:
        export(workdir / "export" / "best", params, model)
        return value
    return best


def export(directory: pathlib.Path, params: Any, model: Model) -> None:
    """``outputs.export``; where ``data.end_token`` is set, whoever samples will stop at it too."""
    if set(model.stop_ids) == set(hf.stop_ids(model.directory, model.tokenizer.eos_token_id)):
        outputs.export(directory, params, model)
        return
    file = model.directory / "generation_config.json"
    fields = json.loads(file.read_text()) if file.exists() else {}
    hf.save(
        directory,
        params,
        model.config,
        dtype=jnp.float32,
        source_dir=model.directory,
        generation_config=fields | {"eos_token_id": list(model.stop_ids)},
    )


def finish(workdir: pathlib.Path, params: Any, model: Model) -> None:
    """Exports the last model and says what the run reached and left."""
    export(workdir / "export" / "last", params, model)
    _, values = read_metrics(workdir / "metrics.jsonl")["val/loss"]
    print(
        f"done: validation loss {values[0]:.3f} before training, {values[-1]:.3f} after, "
        f"{np.nanmin(values):.3f} at best (nats per token)"
    )
    print(f"{workdir} holds metrics.jsonl, curves.png, export/best, export/last")
