import jax
import pytest

from configs.gsm8k import get_config
from experiments import inputs
from experiments.monitor import Interrupted
from experiments.settings import Settings


def test_a_stop_ends_the_warm_up_and_the_next_start_makes_it_anew(tmp_path):
    config = get_config("tiny")
    narrow = {"num_layers": 1, "hidden_size": 16, "num_heads": 1, "warmup_batch_size": 8}
    sizes = {"train_problems": 8, "val_problems": 8, "demonstrations": 32, "warmup_steps": 3}
    config.embedded.update(narrow | sizes)
    calls = []

    def check():
        calls.append(None)
        if len(calls) == 2:
            raise Interrupted

    jax.config.update("jax_disable_most_optimizations", True)
    try:
        with pytest.raises(Interrupted):
            inputs.load_model(Settings(config), tmp_path, check)
        assert len(calls) == 2
        assert not (tmp_path / "start_model").exists()
        inputs.load_model(Settings(config), tmp_path)
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
