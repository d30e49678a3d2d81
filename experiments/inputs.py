"""What a run starts from, made from its config: model, prompts, sampler, scorer, validation."""

import functools
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from experiments import embedded
from experiments.settings import Settings
from jaxrlhf.data import prompts, tables
from jaxrlhf.data.tokenizer import load_tokenizer, tokenizer_digest
from jaxrlhf.evaluate import responses_text, validate
from jaxrlhf.models import hf
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.progress import progress
from jaxrlhf.rewards.scoring import Scores, find_unscorable, load_scorer, score_rows, scorer_name
from jaxrlhf.rollout.native import NativeSampler
from jaxrlhf.rollout.sampling import step_key
from jaxrlhf.types import Rollout


class Model(NamedTuple):
    """A start model: float32 parameters, and what belongs to them."""

    params: Any
    config: ModelConfig
    compute_dtype: Any
    tokenizer: Any
    stop_ids: tuple[int, ...]
    directory: pathlib.Path


def load_model(
    config: Settings,
    workdir: pathlib.Path,
    check: Callable[[], None] = lambda: None,
    *,
    prepare: Callable[..., None] = embedded.prepare,
) -> Model:
    """Opens ``model.path`` (in an embedded recipe made first, by ``prepare``) and its tokenizer.

    ``check`` is called while the start model is made; what it raises ends that.
    """
    if "embedded" in config:
        prepare(config, workdir, check)
        directory = workdir / config.model.path
    else:
        directory = hf.resolve(config.model.path)
    hf.load_config(directory)  # says soonest and plainest what is no model directory
    tokenizer = load_tokenizer(directory, require_chat_template=False)  # prompts may be plain text
    stop_ids = hf.stop_ids(directory, tokenizer.eos_token_id)
    if ignored := hf.ignored_generation_fields(directory):
        print(f"generation_config.json: these settings are not used: {ignored}")
    print(f"rows end at {[tokenizer.decode([i]) for i in stop_ids]} (ids {list(stop_ids)})")
    params, model = hf.load(directory)
    dtype = jnp.dtype(config.model.compute_dtype)
    return Model(params, model, dtype, tokenizer, stop_ids, pathlib.Path(directory))


def load_prompts(
    config: Settings, workdir: pathlib.Path, tokenizer: Any
) -> tuple[prompts.PromptDataset, prompts.PromptDataset]:
    """Training and validation prompts, checked by the scorer that will read them, and tokenised.

    Raises:
      TableError: a record that the scorer says it cannot score; under ``reward.on_error=skip``
        all of a file's records.
    """
    base = workdir if "embedded" in config else pathlib.Path()
    c = config.data
    options = template_options(config)
    out = []
    for file, limit in ((c.train_files, None), (c.val_files, c.max_val_prompts or None)):
        records = tables.read_table(base / file)[:limit]
        _check_scorable(config, records, file)
        with progress(f"tokenising {file}", total=len(records), unit="prompts") as advance:
            dataset = prompts.tokenize_prompts(
                records,
                tokenizer,
                max_prompt_length=c.max_prompt_length,
                overlong=c.overlong_prompts,
                source=file,
                template_options=options,
                on_progress=advance.update,
            )
        print(
            f"{file}: {len(dataset)} prompts; {dataset.filtered} over {c.max_prompt_length} tokens "
            f"left out, {dataset.truncated} cut"
        )
        out.append(dataset)
    return out[0], out[1]


def template_options(config: Settings) -> dict[str, Any]:
    """The chat template's options that are set."""
    return {k: v for k, v in config.data.template_options.as_dict().items() if v != ""}


def _check_scorable(config: Settings, records: list[tables.Record], file: str) -> None:
    c = config.reward
    problems = find_unscorable(load_scorer(c.function, c.kwargs.as_dict()), records)
    if not problems:
        return
    row, reason = next(iter(problems.items()))
    told = f"{tables.where(file, row)}: {reason}"
    if c.on_error == "raise" or len(problems) == len(records):
        raise tables.TableError(
            f"{told} ({len(problems)} of {len(records)} rows cannot be scored; with "
            "reward.on_error=skip such rows are counted and train nothing, as long as others can)."
        )
    print(f"{told} ({len(problems)} of {len(records)} rows cannot be scored and train nothing)")


def make_sampler(config: Settings, model: Model) -> NativeSampler:
    """The native sampler, for training and validation alike."""
    c = config.rollout
    return NativeSampler(
        model.config,
        max_prompt_length=config.data.max_prompt_length,
        max_response_length=c.max_response_length,
        stop_ids=model.stop_ids,
        pad_id=model.tokenizer.pad_token_id,
        compute_dtype=model.compute_dtype,
        chunk_length=c.chunk_length,
        batch_size=c.batch_size,
        prompt_bucket=min(64, config.data.max_prompt_length),
    )


_digest = functools.lru_cache(maxsize=4)(tokenizer_digest)  # takes a second of a large vocabulary


def make_decode(tokenizer: Any) -> Callable[[list[int]], str]:
    """Token ids to the text that scorers read: without special tokens."""
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True)


def make_scorer(config: Settings) -> Callable[..., Scores]:
    """(prompt texts, response texts, records, places) -> Scores, by the config's function."""
    c = config.reward
    scorer = load_scorer(c.function, c.kwargs.as_dict())
    on_error = c.on_error
    print(f"scorer: {scorer_name(scorer)}")
    return lambda prompts, responses, records, places=None: score_rows(
        scorer, prompts, responses, records, places, on_error=on_error
    )


def report_problems(scores: Scores, at_most: int = 5) -> None:
    """Prints why rows have no score."""
    for problem in scores.problems[:at_most]:
        print(f"unscored: {problem}")
    if (more := len(scores.problems) - at_most) > 0:
        print(f"unscored: {more} more rows")


def score_rollout(
    rollout: Rollout, batch: prompts.PromptBatch, score: Callable[..., Scores], model: Model
) -> tuple[Scores, dict[str, Any]]:
    """Scores every row; returns the scores, and the texts ``prompts`` and ``responses``."""
    decode = make_decode(model.tokenizer)
    n = rollout.tokens.shape[0] // len(batch.records)
    responses = responses_text(rollout, decode, _digest(model.tokenizer))
    questions = [decode(ids) for ids in batch.token_ids for _ in range(n)]
    records, places = ([x for x in xs for _ in range(n)] for xs in (batch.records, batch.places))
    scores = score(questions, responses, records, places)
    report_problems(scores)
    return scores, {"prompts": questions, "responses": responses}


def make_validation(
    config: Settings,
    sampler: NativeSampler,
    dataset: prompts.PromptDataset,
    score: Callable[..., Scores],
    model: Model,
    check: Callable[[], None] = lambda: None,
) -> Callable[[Any], dict[str, float]]:
    """params -> ``val/…`` metrics of greedy answers to all validation prompts.

    ``check`` is called as they come; what it raises ends the validation.
    """
    decode = make_decode(model.tokenizer)
    digest = _digest(model.tokenizer)
    key = step_key(config.seed, 0)  # greedy: no effect
    places = [dataset.place(i) for i in range(len(dataset))]

    def run(params: Any) -> dict[str, float]:
        def on_progress(tokens: int, rows: int, total: int) -> None:
            advance.update(rows)
            check()

        with progress("validation", total=len(dataset), unit="rows") as advance:
            result = validate(
                sampler,
                params,
                prompts=dataset.token_ids,
                records=dataset.records,
                decode=decode,
                score=lambda *texts: score(*texts, places),
                key=key,
                tokenizer=digest,
                on_progress=on_progress,
            )
        report_problems(result.scores)
        return result.metrics

    return run
