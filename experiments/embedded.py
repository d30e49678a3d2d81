"""The embedded defaults: data, tokenizer and a small start model, made on the spot.

Everything goes into the run's directory in the forms that a real run reads (parquet files, a
Hugging Face model directory), so that an experiment does not know the difference.
"""

import functools
import itertools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from experiments.settings import Settings
from jaxrlhf.data import batching, chat, tables, tokenizer, word_problems
from jaxrlhf.models import hf
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.specs import init_params
from jaxrlhf.optimizers import OptimizerHyper
from jaxrlhf.progress import progress
from jaxrlhf.trainers.sft import sft_loss
from jaxrlhf.trainers.update import init_train_state, update
from jaxrlhf.types import TokenBatch

CONTEXT = 512  # positions of the start model, more than the recipe needs


def prepare(
    config: Settings, workdir: pathlib.Path, check: Callable[[], None] = lambda: None
) -> None:
    """Writes the data and the start model of ``config.embedded`` into ``workdir``, once.

    The model directory appears whole at the end; if it is there, nothing is done.

    Args:
      config: of a run whose ``data.*_files`` and ``model.path`` are relative to ``workdir``.
      workdir: the run's directory.
      check: called after every update of the warm-up; what it raises ends it, nothing is written.
    """
    c = config.embedded
    target = workdir / config.model.path
    files = {"train": config.data.train_files, "val": config.data.val_files}
    sizes = {"train": c.train_problems, "val": c.val_problems}
    shown, spoil = c.demonstrations, c.spoil_probability
    recipe = {
        "num_layers": c.num_layers,
        "hidden_size": c.hidden_size,
        "num_heads": c.num_heads,
        "steps": c.warmup_steps,
        "batch_size": c.warmup_batch_size,
        "learning_rate": c.warmup_learning_rate,
    }
    if target.exists():
        return
    demonstrations = word_problems.demonstrations(config.seed, shown, spoil_probability=spoil)
    for split, file in files.items():
        records = word_problems.generate(config.seed, sizes[split], split=split)
        tables.write_table(workdir / file, records)
    words = tokenizer.build_word_tokenizer(word_problems.corpus(), workdir / "tokenizer")
    params, model = warm_up(words, demonstrations, check, seed=config.seed, **recipe)
    save_start_model(target, params, model, words)


def prepare_sft(
    config: Settings, workdir: pathlib.Path, check: Callable[[], None] = lambda: None
) -> None:
    """Writes chat tables of right answers and a fresh model into ``workdir``, once.

    The tables are in verl's schema, with the conversations beside it as ``messages``, and those
    for validation are of problems that no training table has.

    Args:
      config, workdir: as in ``prepare``.
      check: called before the model is written; what it raises ends that.
    """
    c = config.embedded
    seed, target = config.seed, workdir / config.model.path
    shape = (c.num_layers, c.hidden_size, c.num_heads)
    sizes = {"train": c.train_conversations, "val": c.val_conversations}
    files = {"train": config.data.train_files, "val": config.data.val_files}
    if target.exists():
        return
    for split, file in files.items():
        records = word_problems.generate(seed, sizes[split], split=split)
        tables.write_table(workdir / file, [_with_conversation(record) for record in records])
    words = tokenizer.build_word_tokenizer(word_problems.corpus(), workdir / "tokenizer")
    model = _small_llama(words, *shape)
    check()
    save_start_model(target, init_params(jax.random.key(seed), model), model, words)


def _with_conversation(record: tables.Record) -> tables.Record:
    answer = {"role": "assistant", "content": record["extra_info"]["answer"]}
    return record | {"messages": [*record["prompt"], answer]}


def save_start_model(target: pathlib.Path, params: dict, model: ModelConfig, words: Any) -> None:
    """Writes the directory as ``hf.save``, with the tokenizer that lies beside it."""
    ids = {"eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id}
    source = target.parent / "tokenizer"
    hf.save(target, params, model, dtype=np.float32, source_dir=source, generation_config=ids)


def _small_llama(words: Any, num_layers: int, hidden_size: int, num_heads: int) -> ModelConfig:
    return ModelConfig(
        family="llama",
        vocab_size=len(words),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        rope_theta=10_000.0,
        norm_eps=1e-5,
        tie_embeddings=True,
        qkv_bias=False,
        qk_norm=False,
        max_positions=CONTEXT,
    )


def warm_up(
    words: Any,
    demonstrations: list[tables.Record],
    check: Callable[[], None],
    *,
    seed: int,
    num_layers: int,
    hidden_size: int,
    num_heads: int,
    steps: int,
    batch_size: int,
    learning_rate: float,
) -> tuple[dict, ModelConfig]:
    """A small Llama after supervised steps on the demonstrations."""
    model = _small_llama(words, num_layers, hidden_size, num_heads)
    examples = [
        chat.encode_example(words, r["prompt"], r["extra_info"]["demonstration"])
        for r in demonstrations
    ]
    hyper = OptimizerHyper.create(
        learning_rate=learning_rate, schedule="cosine", decay_steps=steps, min_ratio=0.1
    )
    state = init_train_state(init_params(jax.random.key(seed), model), hyper, copy=False)
    loss_fn = functools.partial(sft_loss, config=model)
    batches = batching.example_batches(
        examples,
        batch_size=batch_size,
        num_batches=steps,
        seed=seed,
        pad_id=words.pad_token_id,
        multiple=4,
    )
    with progress("warm-up", total=steps, unit="updates") as advance:
        for arrays in itertools.islice(batches, steps):
            batch = TokenBatch(*map(jax.numpy.asarray, arrays))
            state, _ = update(state, batch, hyper, None, loss_fn=loss_fn, name="sft")
            advance(1)
            check()
    return state.params, model
