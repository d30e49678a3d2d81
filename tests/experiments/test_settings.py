import json
import math
import os
import subprocess
import sys

import pytest
from absl import flags
from ml_collections import config_flags

from configs.gsm8k import get_config
from experiments import cli, workdir
from experiments.cli import recipe_name
from experiments.settings import Settings, check_ppo, flatten
from experiments.workdir import open_workdir


@pytest.fixture
def config():
    config = get_config("tiny")
    config.kl.coef, config.actor.learning_rate, config.ppo.critic_warmup = 0.01, 3e-4, 0
    return config


def changed(config, **values):
    """``ppo__gamma=1.0`` sets ``config.ppo.gamma``; the config is changed and returned."""
    with config.unlocked():
        for key, value in values.items():
            config.update_from_flattened_dict({key.replace("__", "."): value})
    return config


# Reading


def test_settings_remember_what_was_read(config):
    view = Settings(config)
    assert set(view.unread()) == set(flatten(config))
    assert view.ppo.gamma == config.ppo.gamma
    assert view.total_steps == config.total_steps
    assert view.logging.writers == config.logging.writers
    assert set(flatten(config)) - set(view.unread()) == {
        "ppo.gamma", "total_steps", "logging.writers",
    }  # fmt: skip
    assert view.actor.as_dict() == config.actor.to_dict()
    assert not [key for key in view.unread() if key.startswith("actor.")]
    view.critic  # noqa: B018 - passing a group on is not reading it
    assert "critic.eps" in view.unread()
    assert "embedded" in view
    assert "nothing" not in view
    with pytest.raises(KeyError):
        view.ppo.gama  # noqa: B018


def test_a_view_of_its_own_reads_for_nobody_else(config):
    view = Settings(config)
    check_ppo(Settings(config))
    assert set(view.unread()) == set(flatten(config))


def test_unread_keys_are_refused(config):
    view = Settings(config)
    view.as_dict()
    view.refuse_unread()
    with config.unlocked():
        config.ppo.clip = 0.3
    view = Settings(config)
    view.actor.as_dict()
    with pytest.raises(
        ValueError, match=r"^config keys that nothing reads: critic\.beta1, "
    ) as error:
        view.refuse_unread()
    assert "ppo.clip," in str(error.value)
    assert "actor" not in str(error.value)


def test_flatten():
    assert flatten({"a": {"b": 1, "c": {"d": (1, 2)}}, "e": None, "f": {}}) == {
        "a.b": 1, "a.c.d": [1, 2], "e": None,
    }  # fmt: skip


# Refusing

REFUSALS = [
    ({"ppo__train_batch_size": 0}, "ppo.train_batch_size=0 must be at least 1."),
    ({"ppo__ppo_mini_batch_size": -2}, "ppo.ppo_mini_batch_size=-2 must be at least 1."),
    ({"ppo__ppo_micro_batch_size": 0}, "ppo.ppo_micro_batch_size=0 must be at least 1."),
    ({"ppo__ppo_epochs": 0}, "ppo.ppo_epochs=0 must be at least 1."),
    ({"rollout__n": 0}, "rollout.n=0 must be at least 1."),
    ({"rollout__batch_size": 0}, "rollout.batch_size=0 must be at least 1."),
    ({"rollout__chunk_length": 0}, "rollout.chunk_length=0 must be at least 1."),
    ({"rollout__max_response_length": 0}, "rollout.max_response_length=0 must be at least 1."),
    ({"data__max_prompt_length": 0}, "data.max_prompt_length=0 must be at least 1."),
    ({"data__max_val_prompts": -3}, "data.max_val_prompts=-3 must be at least 0."),
    ({"keep_checkpoints": 0}, "keep_checkpoints=0 must be at least 1."),
    ({"total_epochs": 0}, "total_epochs=0 must be at least 1."),
    ({"save_freq": -1}, "save_freq=-1 must be at least 0."),
    ({"test_freq": -1}, "test_freq=-1 must be at least 0."),
    ({"kl__coef": -0.5}, "kl.coef=-0.5 must be at least 0."),
    ({"kl__coef": math.nan}, "kl.coef=nan must be at least 0."),
    ({"critic__learning_rate": math.nan}, "critic.learning_rate=nan must be at least 0."),
    ({"logging__writers": ("print", "jsonl")}, "logging.writers names ['print']; choose from"),
    ({"ppo__critic_warmup": 60}, "ppo.critic_warmup=60 of total_steps=60 leaves no step to train"),
    (
        {"ppo__ppo_mini_batch_size": 24},
        "ppo.train_batch_size=64 is not a multiple of ppo.ppo_mini_batch_size=24; use one of "
        "1, 2, 4, 8, 16, 32, 64 for the latter.",
    ),
    (
        {"ppo__ppo_micro_batch_size": 3, "ppo__ppo_mini_batch_size": 2},
        "ppo.ppo_mini_batch_size=2 x rollout.n=4 = 8 rows is not a multiple of "
        "ppo.ppo_micro_batch_size=3; use one of 1, 2, 4, 8.",
    ),
    ({"rollout__n": 512, "ppo__ppo_micro_batch_size": 128}, "rollout.n=512 is above rollout.batch"),
    ({"rollout__temperature": 0.0}, "rollout.temperature=0.0 leaves nothing to learn from"),
    ({"rollout__temperature": -1.0}, "rollout.temperature=-1.0 leaves nothing to learn from"),
    ({"model__compute_dtype": "float16"}, "model.compute_dtype='float16' is unknown here; use one"),
    ({"model__remat": "some"}, "model.remat='some' is unknown here; use one of none, full, dots."),
    ({"data__overlong_prompts": "cut"}, "data.overlong_prompts='cut' is unknown here"),
    ({"reward__on_error": "ignore"}, "reward.on_error='ignore' is unknown here; use one of raise"),
    ({"ppo__aggregation": "mean"}, "ppo.aggregation='mean' is unknown here; use one of token_mean"),
    ({"ppo__aggregation": "seq_mean_token_sum_norm"}, "give the constant together"),
    ({"ppo__aggregation_norm": 8.0}, "and only then"),
    ({"kl__where": "rewards"}, "kl.where='rewards' is unknown here; use one of reward, loss, none"),
    ({"kl__estimator": "k4"}, "kl.estimator='k4' is unknown with kl.where=reward; use one of k1"),
    ({"kl__where": "loss"}, "kl.estimator='k1' is unknown with kl.where=loss; use one of k3_st"),
    ({"kl__where": "none"}, "kl.coef=0.01 and kl.target=0.0 have no effect while kl.where is none"),
    (
        {"kl__where": "none", "kl__coef": 0.0, "kl__target": 0.1},
        "kl.coef=0.0 and kl.target=0.1 have no effect while kl.where is none; set both to 0",
    ),
    ({"kl__coef": 0.0, "kl__target": 0.1}, "kl.coef=0 stays 0 under the adaptive controller"),
    ({"kl__target": 0.1, "kl__horizon": 0.0}, "kl.horizon=0.0 must be positive."),
    ({"actor__schedule": "cosine"}, "actor.schedule='cosine' needs actor.decay_steps; give the"),
    ({"critic__schedule": "linear"}, "critic.schedule='linear' needs critic.decay_steps; give the"),
    ({"actor__decay_steps": 9}, "actor.decay_steps and actor.min_ratio have no effect while"),
    ({"critic__min_ratio": 0.1}, "critic.decay_steps and critic.min_ratio have no effect while"),
    (
        {"ppo__critic_warmup": 2, "critic__learning_rate": 0.0},
        "ppo.critic_warmup has no effect while critic.learning_rate is 0; set one of them.",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("values", "sentence"), REFUSALS)
def test_check_ppo_refuses_in_one_sentence(config, values, sentence):
    check_ppo(Settings(config))
    with pytest.raises(ValueError) as error:
        check_ppo(Settings(changed(config, **values)))
    message = str(error.value)
    assert sentence in message
    assert "\n" not in message
    assert message.endswith(".")


@pytest.mark.parametrize(
    "values",
    [
        {"kl__where": "loss", "kl__estimator": "k3_st"},
        {"kl__where": "none", "kl__coef": 0.0},
        {"kl__target": 0.1},
        {"kl__coef": 0.0},
        {"actor__learning_rate": 0.0},
        {"actor__schedule": "cosine", "actor__decay_steps": 9, "actor__min_ratio": 0.1},
        {"ppo__critic_warmup": 2},
        {"rollout__n": 256, "ppo__ppo_micro_batch_size": 128},
    ],
)
def test_check_ppo_lets_what_makes_sense_pass(config, values):
    check_ppo(Settings(changed(config, **values)))


# The run's directory


def test_a_workdir_is_made_locked_and_written(config, tmp_path, monkeypatch):
    path, lock = open_workdir(config, str(tmp_path / "a" / "b"), "x")
    assert path == tmp_path / "a" / "b"
    assert flatten(json.loads((path / "config.json").read_text())) == flatten(config)
    with pytest.raises(ValueError, match=f"{path} is in use by another run; choose another"):
        open_workdir(config, str(path), "x")
    lock.close()
    open_workdir(config, str(path), "x")[1].close()
    monkeypatch.chdir(tmp_path)
    path, lock = open_workdir(config, None, "gsm8k-tiny")
    lock.close()
    assert path.parent == tmp_path / "runs"
    assert path.name.startswith("gsm8k-tiny-20")


def test_another_process_is_refused(tmp_path, repo_root):
    path, lock = open_workdir(get_config("tiny"), str(tmp_path), "x")
    code = (
        "import sys; from configs.gsm8k import get_config; from experiments import workdir; "
        "workdir.open_workdir(get_config('tiny'), sys.argv[1], 'x')"
    )

    def other():
        env = {**os.environ, "PYTHONPATH": str(repo_root)}
        command = [sys.executable, "-c", code, str(path)]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False)

    assert "is in use by another run" in other().stderr
    lock.close()
    assert other().returncode == 0


def test_what_a_resumed_run_may_change(config, tmp_path):
    open_workdir(config, str(tmp_path), "x")[1].close()
    changed(
        config, total_steps=99, total_epochs=3, save_freq=1, test_freq=0, keep_checkpoints=5,
        logging__writers=("jsonl",), logging__rollouts_per_step=1, logging__project="p",
    )  # fmt: skip
    open_workdir(config, str(tmp_path), "x")[1].close()
    stored = json.loads((tmp_path / "config.json").read_text())
    assert (stored["total_steps"], stored["logging"]["writers"]) == (99, ["jsonl"])


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"seed": 1}, "seed (0 -> 1)"),
        ({"actor__learning_rate": 1e-3}, "actor.learning_rate (0.0003 -> 0.001)"),
        ({"ppo__dual_clip": 3.0}, "ppo.dual_clip (0.0 -> 3.0)"),
        ({"reward__kwargs__format_score": 0.5}, "reward.kwargs.format_score (0.0 -> 0.5)"),
        ({"kl__where": "loss", "seed": 2}, "kl.where (reward -> loss), seed (0 -> 2);"),
    ],
)
def test_what_it_may_not_is_named(config, tmp_path, values, named):
    open_workdir(config, str(tmp_path), "x")[1].close()
    before = (tmp_path / "config.json").read_bytes()
    with pytest.raises(ValueError) as error:
        open_workdir(changed(config, **values), str(tmp_path), "x")
    assert named in str(error.value)
    assert (tmp_path / "config.json").read_bytes() == before


def test_a_key_more_or_less_is_a_change(config, tmp_path):
    open_workdir(config, str(tmp_path), "x")[1].close()
    with config.unlocked():
        config.reward.kwargs.strictness = 1
        del config.embedded.num_heads
    named = r"embedded.num_heads \(4 -> absent\).*strictness \(absent -> 1\)"
    with pytest.raises(ValueError, match=named):
        open_workdir(config, str(tmp_path), "x")


def test_a_directory_with_something_else_is_refused(config, tmp_path):
    (tmp_path / "thesis.tex").write_text("words")
    with pytest.raises(ValueError, match=r"is not empty and holds no config\.json; choose another"):
        open_workdir(config, str(tmp_path), "x")
    assert not (tmp_path / "config.json").exists()


def test_another_programs_config_is_refused_in_a_short_sentence(config, tmp_path):
    model = {"model_type": "llama", "hidden_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(model))
    with pytest.raises(ValueError, match="holds a run with other settings") as error:
        open_workdir(config, str(tmp_path), "x")
    assert len(str(error.value)) < 1000
    assert json.loads((tmp_path / "config.json").read_text()) == model


def test_a_kill_while_the_config_was_written_leaves_a_usable_directory(config, tmp_path):
    (tmp_path / ".lock").touch()
    (tmp_path / "config.partial").write_text('{"actor": ')
    open_workdir(config, str(tmp_path), "x")[1].close()
    assert json.loads((tmp_path / "config.json").read_text())["seed"] == 0


def test_json_files_are_replaced_whole(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    workdir.write_json(path, {"x": 1})
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        workdir.write_json(path, {"x": 2})
    assert json.loads(path.read_text()) == {"x": 1}


# The command line


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ("configs/gsm8k.py", "gsm8k"),
        ("/a/b/configs/gsm8k.py:tiny", "gsm8k-tiny"),
        ("configs/gsm8k.py:smollm2,model=../models/s", "gsm8k-smollm2-model-..-models-s"),
        ("configs/gsm8k.py:model=" + "d" * 99, ("gsm8k-model-" + "d" * 99)[:60]),
    ],
)
def test_recipe_name(config, name, monkeypatch):
    monkeypatch.setattr(config_flags, "get_config_filename", lambda flag: config)
    monkeypatch.setattr(flags, "FLAGS", {"config": None})
    assert recipe_name(["ppo.py"]) == name
    with pytest.raises(ValueError, match=r"\['seed=1'\] are no flags; write settings as --config"):
        recipe_name(["ppo.py", "seed=1"])


def run_main(main, capsys, *, traceback=False):
    """What a program with this ``main`` prints to stderr, and its exit status."""
    flags.FLAGS.mark_as_parsed()
    flags.FLAGS.traceback = traceback
    try:
        with pytest.raises(SystemExit) as stop:
            cli.one_sentence(main)([])
    finally:
        flags.FLAGS.unparse_flags()
    print(stop.value.code, file=sys.stderr)  # as the interpreter does with a text
    return capsys.readouterr().err


def test_refusals_are_one_sentence_and_faults_keep_their_traceback(config, capsys):
    def refused(argv):
        check_ppo(Settings(changed(config, ppo__ppo_epochs=0)))

    expected = "error: ppo.ppo_epochs=0 must be at least 1.\n(--traceback shows where"
    assert run_main(refused, capsys).startswith(expected)
    with pytest.raises(ValueError, match="must be at least 1"):
        run_main(refused, capsys, traceback=True)

    def missing(argv):
        open("/nowhere/at/all")  # noqa: SIM115

    assert "error: [Errno 2] No such file or directory: '/nowhere/at/all'" in run_main(
        missing, capsys
    )

    def of_the_interpreter(argv):
        flatten({"a": 1}, prefix=1)  # a TypeError inside our own code

    def of_a_library(argv):
        int("x")

    def of_a_test(argv):
        raise ValueError("not from the project")

    for fault in (of_the_interpreter, of_a_library, of_a_test):
        with pytest.raises((TypeError, ValueError)):
            run_main(fault, capsys)


def test_a_run_that_ends_well_or_by_exit_is_left_alone():
    assert cli.one_sentence(lambda argv: None)([]) is None
    with pytest.raises(SystemExit) as stop:
        cli.one_sentence(lambda argv: sys.exit(143))([])
    assert stop.value.code == 143


def test_an_unknown_setting_is_named(monkeypatch):
    def parse(argv):
        get_config("tiny").ppo.get_type("gama")

    monkeypatch.setattr(cli.app, "parse_flags_with_usage", parse)
    with pytest.raises(SystemExit, match="error: the recipe has no setting gama; configs/common"):
        cli.parse_flags(["ppo.py", "--config.ppo.gama=1"])
