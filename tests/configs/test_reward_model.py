import json

import pytest

from configs.reward_model import get_config
from experiments.reward_steps import check
from experiments.settings import Settings, flatten

FORM = "model=DIR,train=a.jsonl,val=b.jsonl"


@pytest.mark.parametrize("arg", ["tiny", FORM])
def test_every_form_passes_its_own_checks_and_changes_no_types(arg):
    plain, config = get_config(), get_config(arg)
    check(Settings(config))
    assert flatten(json.loads(json.dumps(config.to_dict()))) == flatten(config)
    for key, value in flatten(plain).items():
        assert type(flatten(config)[key]) is type(value), key
    extra = flatten(config).keys() - flatten(plain).keys()
    assert all(key.startswith("embedded.") for key in extra)


def test_the_argument_names_model_and_files():
    config = get_config(FORM)
    assert (config.model.path, config.data.train_files) == ("DIR", "a.jsonl")
    with pytest.raises(ValueError, match="config argument tiny makes its own model and data"):
        get_config("tiny,train=a.jsonl")
    with pytest.raises(ValueError, match=r"data\.train_files and data\.val_files need a file"):
        check(Settings(get_config("model=DIR,train=a.jsonl")))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("rm.micro_batch_size", 3, r"rm.train_batch_size=64 is not a multiple of .* 1, 2, 4, 8"),
        ("rm.train_batch_size", 0, r"rm.train_batch_size=0 must be at least 1"),
        ("rm.centring", -0.1, r"rm.centring=-0.1 must be at least 0"),
        ("rm.label_smoothing", 0.5, r"set label_smoothing below 0.5, not 0.5"),
        ("optimizer.schedule", "constant", r"optimizer.decay_steps and .* have no effect"),
        ("data.overlong", "cut", r"data.overlong='cut' is unknown here; use one of filter, trunca"),
        ("model.remat", "some", r"model.remat='some' is unknown here"),
    ],
)
def test_settings_are_refused(key, value, message):
    config = get_config("tiny")
    config.update_from_flattened_dict({key: value})
    with pytest.raises(ValueError, match=message) as error:
        check(Settings(config))
    assert "\n" not in str(error.value)
