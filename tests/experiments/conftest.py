"""Runs of experiments in processes of their own, and what they leave."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from configs.gsm8k import get_config
from experiments import inputs
from experiments.cli import is_refusal
from experiments.settings import Settings
from jaxrlhf.checkpoint import Checkpointer
from jaxrlhf.data import tables, tokenizer, word_problems
from jaxrlhf.models import hf
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.specs import init_params

# One narrow layer, four prompts and eight rows a step, three steps an epoch, four updates a step.
NANO = {
    "embedded.num_layers": 1,
    "embedded.hidden_size": 32,
    "embedded.num_heads": 1,
    "embedded.train_problems": 12,
    "embedded.val_problems": 8,
    "embedded.demonstrations": 64,
    "embedded.spoil_probability": 0.0,
    "embedded.warmup_steps": 30,
    "embedded.warmup_batch_size": 32,
    "embedded.warmup_learning_rate": 0.01,
    "reward.kwargs.format_score": 0.3,
    "ppo.train_batch_size": 4,
    "ppo.ppo_mini_batch_size": 2,
    "ppo.ppo_micro_batch_size": 2,
    "ppo.ppo_epochs": 2,
    "ppo.critic_warmup": 0,
    "actor.learning_rate": 3e-4,
    "kl.coef": 0.01,
    "data.max_prompt_length": 21,
    "rollout.max_response_length": 11,  # 32 tokens in all: every batch has one shape
    "rollout.n": 2,
    "rollout.batch_size": 8,
    "total_steps": 6,
    "save_freq": 1,
    "test_freq": 2,
}
TINY = "configs/gsm8k.py:tiny"
UNSHARED = ("time/", "throughput/", "memory/", "compile/")
PATIENCE = 900  # seconds; another program's load is no failure


class Run:
    """One run directory, the processes that work in it, and readers of what they left.

    Args:
      path: the directory.
      env: of the processes, whose output goes into a file beside the directory.
      repo_root: where they are started.
    """

    def __init__(self, path, env, repo_root):
        self.path, self.env, self.repo_root = path, env, repo_root
        self.log = path.with_name(path.name + ".log")

    def start(self, changes=None, *, recipe=TINY, base=NANO, script="ppo.py"):
        settings = base | (changes or {})
        command = [sys.executable, f"experiments/{script}", f"--config={recipe}"]
        command += [f"--config.{key}={value}" for key, value in settings.items()]
        command += [f"--workdir={self.path}"]
        with self.log.open("a") as log:
            return subprocess.Popen(
                command, cwd=self.repo_root, env=self.env, stdout=log, stderr=subprocess.STDOUT
            )

    def finish(self, changes=None, *, code=0, **options):
        """Runs to the end, which must have this exit status; returns what was printed."""
        before = self.log.stat().st_size if self.log.exists() else 0
        status = self.start(changes, **options).wait(PATIENCE)
        output = self.log.read_bytes()[before:].decode()
        assert status == code, output
        return output

    def start_until(self, condition, changes=None, **options):
        """Starts a process and returns it as soon as the condition holds."""
        process = self.start(changes, **options)
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return process

    def kill_when(self, condition, changes=None, **options):
        process = self.start_until(condition, changes, **options)
        process.kill()
        assert process.wait(PATIENCE) == -signal.SIGKILL

    def lines(self, *, unshared=False):
        """The metrics of each step, by default without those that no two runs share."""
        text = (self.path / "metrics.jsonl").read_text()
        entries = [json.loads(line) for line in text.splitlines()]
        if unshared:
            return entries
        return [{k: v for k, v in e.items() if not k.startswith(UNSHARED)} for e in entries]

    def last_step(self):
        """The step of the last line, -1 while there is none; for a run that is going on."""
        path = self.path / "metrics.jsonl"
        return path.read_bytes().count(b"\n") - 1 if path.exists() else -1

    def files(self, folder):
        return {path.name: path.read_bytes() for path in (self.path / folder).iterdir()}

    def rollouts(self):
        texts = self.files("rollouts")
        return [json.loads(line) for name in sorted(texts) for line in texts[name].splitlines()]

    def checkpoints(self, *, complete=True):
        """Steps of the checkpoints that have (or lack) the manifest, which is written last."""
        paths = (self.path / "checkpoints").glob("0*")
        found = [path for path in paths if (path / "manifest.json").exists() == complete]
        return sorted(int(path.name[:8]) for path in found)

    def state(self, step=None):
        """``(step, {leaf's name: array}, host)`` of a checkpoint, the newest by default."""
        step = self.checkpoints()[-1] if step is None else step
        *_, file = sorted((self.path / "checkpoints").glob(f"{step:08d}*/manifest.json"))
        leaves = json.loads(file.read_text())["leaves"].items()
        abstract = {
            name: jax.ShapeDtypeStruct(leaf["shape"], leaf["dtype"]) for name, leaf in leaves
        }
        with Checkpointer(self.path / "checkpoints") as reader:
            step, state, host = reader.restore(abstract, step=step)
        return step, {name: leaf.tobytes() for name, leaf in jax.device_get(state).items()}, host


@pytest.fixture(scope="session")
def new_run(tmp_path_factory, repo_root):
    """name -> Run; all of them share a compilation cache, so that only the first compiles."""
    root = tmp_path_factory.mktemp("runs")
    env = os.environ | {
        "PYTHONPATH": f"{repo_root}{os.pathsep}{root}",
        "PYTHONUNBUFFERED": "1",
        "JAX_COMPILATION_CACHE_DIR": str(root / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        # Compiles in half the time.
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0",
    }
    return lambda name: Run(pathlib.Path(root / name), env, repo_root)


@pytest.fixture(scope="session")
def unbroken(new_run):
    """Six steps, two epochs, never stopped."""
    run = new_run("unbroken")
    run.finish()
    return run


@pytest.fixture(scope="session")
def base():
    """The nano recipe's settings without the keywords of GSM8K's scorer."""
    return {key: value for key, value in NANO.items() if "kwargs" not in key}


@pytest.fixture(scope="session")
def workdir(tmp_path_factory):
    """A run's directory with data, tokenizer and an untrained start model of one narrow layer."""
    path = tmp_path_factory.mktemp("run")
    for split, n in (("train", 12), ("val", 8)):
        tables.write_table(
            path / f"data/{split}.parquet", word_problems.generate(0, n, split=split)
        )
    words = tokenizer.build_word_tokenizer(word_problems.corpus(), path / "tokenizer")
    model = ModelConfig(
        family="llama", vocab_size=len(words), hidden_size=16, intermediate_size=16, num_layers=1,
        num_heads=1, num_kv_heads=1, head_dim=16, rope_theta=1e4, norm_eps=1e-5,
        tie_embeddings=True, max_positions=64, init_std=0.5,
    )  # fmt: skip
    params = init_params(jax.random.key(0), model)
    generation = {"eos_token_id": [words.eos_token_id, 0], "temperature": 0.6}
    hf.save(
        path / "start_model", params, model, dtype=np.float32, source_dir=path / "tokenizer",
        generation_config=generation,
    )  # fmt: skip
    return path


@pytest.fixture
def config():
    config = get_config("tiny")
    values = {
        "ppo.train_batch_size": 4, "ppo.ppo_mini_batch_size": 2, "ppo.ppo_micro_batch_size": 2,
        "rollout.n": 2, "rollout.batch_size": 8, "rollout.max_response_length": 8,
        "reward.kwargs.format_score": 0.3,
    }  # fmt: skip
    config.update_from_flattened_dict(values)
    return config


@pytest.fixture
def view(config):
    return Settings(config)


@pytest.fixture(scope="session")
def model(workdir):
    return inputs.load_model(Settings(get_config("tiny")), workdir)


@pytest.fixture
def refused():
    def sentence(call, *args):
        """The one sentence with which ``call`` refuses its arguments."""
        with pytest.raises(Exception) as error:  # which kind is not the point
            call(*args)
        assert is_refusal(error.value), repr(error.value)
        assert "\n" not in str(error.value)
        return str(error.value)

    return sentence
