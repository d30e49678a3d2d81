import json

import pytest
from ml_collections import ConfigDict

from configs.gsm8k import get_config
from experiments.settings import Settings, check_ppo, flatten

FORMS = ["", "tiny", "smollm2", "smollm2,model=DIR", "model=DIR"]


@pytest.mark.parametrize("arg", FORMS)
def test_every_form_passes_its_own_checks(arg):
    config = get_config(arg)
    check_ppo(Settings(config))
    stored = json.loads(json.dumps(config.to_dict()))
    assert flatten(stored) == flatten(config)  # or no run could be resumed


@pytest.mark.parametrize("arg", FORMS)
def test_forms_change_values_and_no_types(arg):
    """A form that stored an int where others have a float would refuse that form's flags."""
    plain, config = get_config(), get_config(arg)
    assert flatten(plain).keys() <= flatten(config).keys()
    for key, value in flatten(plain).items():
        if value is not None:
            assert type(flatten(config)[key]) is type(value), key
    extra = flatten(config).keys() - flatten(plain).keys()
    assert all(key.startswith("embedded.") for key in extra)


def test_the_default_has_the_settings_of_verls_quickstart():
    config = get_config()
    assert config.model.path == "Qwen/Qwen2.5-0.5B-Instruct"
    assert (config.ppo.train_batch_size, config.ppo.ppo_mini_batch_size) == (256, 64)
    assert (config.actor.learning_rate, config.critic.learning_rate) == (1e-6, 1e-5)
    assert (config.data.max_prompt_length, config.rollout.max_response_length) == (512, 256)
    assert (config.ppo.clip_low, config.ppo.clip_high, config.ppo.value_clip) == (0.2, 0.2, 0.2)
    assert (config.ppo.gamma, config.ppo.lam, config.rollout.temperature) == (1.0, 0.95, 1.0)
    assert config.kl.coef == 0.001


@pytest.mark.parametrize(
    ("arg", "path"),
    [
        ("smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("smollm2,model=../m", "../m"),
        ("model=../m", "../m"),
        ("tiny", "start_model"),
    ],
)
def test_which_model(arg, path):
    assert get_config(arg).model.path == path


def test_another_scorer_does_not_get_this_ones_keywords():
    config = get_config("smollm2,reward=jaxrlhf.rewards.gsm8k.strict_verl")
    assert config.reward.function == "jaxrlhf.rewards.gsm8k.strict_verl"
    assert config.reward.kwargs.to_dict() == {}
    check_ppo(Settings(config))


def test_a_reward_models_directory_and_its_switch():
    config = get_config("smollm2,reward_model=runs/rm/export/best")
    assert config.reward.function == "jaxrlhf.rewards.reward_model.score"
    kwargs = {"directory": "runs/rm/export/best", "normalise": False}
    assert config.reward.kwargs.to_dict() == kwargs
    check_ppo(Settings(config))


@pytest.mark.parametrize(
    "arg", ["tiny,smollm2", "tiny,model=DIR", "large", "reward=a.b,reward_model=DIR"]
)
def test_contradictions_are_one_sentence(arg):
    with pytest.raises(ValueError, match="config argument") as error:
        get_config(arg)
    assert "\n" not in str(error.value)


def test_tiny_can_be_served_later():
    """A head size and a context that other engines take."""
    config = get_config("tiny").embedded
    assert config.hidden_size % config.num_heads == 0
    assert config.hidden_size // config.num_heads in (32, 64)
    assert isinstance(config, ConfigDict)
