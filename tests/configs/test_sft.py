import json

import pytest

from configs.sft import get_config
from experiments.settings import Settings, check_sft, flatten

FORMS = ["", "tiny", "model=DIR,train=a.jsonl,val=b.jsonl"]


@pytest.mark.parametrize("arg", FORMS)
def test_every_form_passes_its_own_checks_and_changes_no_types(arg):
    plain, config = get_config(), get_config(arg)
    check_sft(Settings(config))
    assert flatten(json.loads(json.dumps(config.to_dict()))) == flatten(config)
    for key, value in flatten(plain).items():
        assert type(flatten(config)[key]) is type(value), key
    extra = flatten(config).keys() - flatten(plain).keys()
    assert all(key.startswith("embedded.") for key in extra)


def test_the_argument_names_model_and_files():
    config = get_config(FORMS[2])
    assert (config.model.path, config.data.train_files) == ("DIR", "a.jsonl")
    with pytest.raises(ValueError, match="config argument tiny makes its own model and data"):
        get_config("tiny,train=a.jsonl")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "sft.micro_batch_size",
            3,
            r"sft.train_batch_size=8 is not a multiple of .* 1, 2, 4, 8 fo",
        ),
        ("sft.train_batch_size", 0, r"sft.train_batch_size=0 must be at least 1"),
        ("optimizer.learning_rate", float("nan"), r"optimizer.learning_rate=nan must be at least"),
        ("optimizer.schedule", "constant", r"optimizer.decay_steps and .* have no effect"),
        ("data.turns", "first", r"data.turns='first' is unknown here; use one of all, last"),
        ("data.overlong", "cut", r"data.overlong='cut' is unknown here; use one of filter, trunca"),
        ("logging.writers", ("print",), r"logging.writers names \['print'\]; choose from console"),
        ("logging.console_freq", 0, r"logging.console_freq=0 must be at least 1"),
    ],
)
def test_settings_are_refused(key, value, message):
    config = get_config("tiny")
    config.update_from_flattened_dict({key: value})
    with pytest.raises(ValueError, match=message) as error:
        check_sft(Settings(config))
    assert "\n" not in str(error.value)
