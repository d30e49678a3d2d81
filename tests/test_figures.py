"""Figures: made from metrics.jsonl alone, whatever a run left in it."""

import json
import sys

import numpy as np
import pytest
from matplotlib import image

from jaxrlhf import figures
from jaxrlhf.figures import PANELS, Panel, read_metrics, training_curves


def write(path, steps, names, *, val_every=5, torn=""):
    lines = []
    for step in range(steps + 1):
        entry = {"step": step}
        if step % val_every == 0:
            entry["val/accuracy"] = step / max(steps, 1)
        if step > 0:
            entry |= dict.fromkeys(names, None if step == 3 else step * 0.1)
        lines.append(json.dumps(entry) + "\n")
    path.write_text("".join(lines) + torn)


ALL = [name for panel in PANELS for name, _ in panel.series if name != "val/accuracy"]


@pytest.mark.parametrize("steps", [0, 1, 6, 60])
def test_draws_runs_of_any_length(tmp_path, steps):
    path, png = tmp_path / "metrics.jsonl", tmp_path / "figures" / "curves.png"
    write(path, steps, ALL, torn='{"step": 61, "rew')
    training_curves(path, png, title="tiny, seed 0")
    pixels = image.imread(png)
    assert pixels.shape[0] > 300
    assert pixels.shape[1] > (400 if steps == 0 else 1500)
    assert pixels.std() > 0.02  # something was drawn
    assert [p.name for p in png.parent.iterdir()] == ["curves.png"]


def test_uses_no_global_state_of_pyplot(tmp_path):
    write(tmp_path / "m.jsonl", 3, ALL)
    training_curves(tmp_path / "m.jsonl", tmp_path / "c.png")
    assert (
        "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()
    )


def test_panels_without_data_are_left_out_and_none_at_all_is_an_error(tmp_path):
    write(tmp_path / "m.jsonl", 6, ["reward/mean"])
    training_curves(tmp_path / "m.jsonl", tmp_path / "two.png")
    training_curves(
        tmp_path / "m.jsonl", tmp_path / "one.png", panels=[Panel("R", "", (("reward/mean", "r"),))]
    )
    widths = [image.imread(tmp_path / f"{name}.png").shape[1] for name in ("one", "two")]
    assert widths[1] == 2 * widths[0]
    write(tmp_path / "m.jsonl", 6, ["other"], val_every=100)
    (tmp_path / "m.jsonl").write_text('{"step": 1, "other": 2.0}\n')
    with pytest.raises(ValueError, match="holds none of the metrics to draw"):
        training_curves(tmp_path / "m.jsonl", tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_a_panel_gives_way_to_another(tmp_path):
    """Validation shows one panel: accuracy, and the score where there is no accuracy."""
    widths = []
    for name in ("accuracy", "score"):
        write(tmp_path / "m.jsonl", 6, ["reward/mean", "val/score"])
        if name == "score":
            text = (tmp_path / "m.jsonl").read_text().replace("val/accuracy", "other")
            (tmp_path / "m.jsonl").write_text(text)
        training_curves(tmp_path / "m.jsonl", tmp_path / "c.png")
        widths.append(image.imread(tmp_path / "c.png").shape[1])
    training_curves(tmp_path / "m.jsonl", tmp_path / "c.png", panels=PANELS[:1])
    assert widths == [2 * image.imread(tmp_path / "c.png").shape[1]] * 2


def test_an_all_null_metric_leaves_an_empty_panel(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"step": 1, "reward/mean": null}\n')
    training_curves(tmp_path / "m.jsonl", tmp_path / "c.png")
    assert (tmp_path / "c.png").exists()


def test_columns_hold_their_own_steps_and_nan_for_null(tmp_path):
    write(tmp_path / "m.jsonl", 10, ["a"], torn='{"step": 11')
    columns = read_metrics(tmp_path / "m.jsonl")
    steps, values = columns["val/accuracy"]
    assert steps.tolist() == [0, 5, 10]
    assert values.tolist() == [0.0, 0.5, 1.0]
    steps, values = columns["a"]
    assert steps.tolist() == list(range(1, 11))
    assert np.isnan(values[2])
    assert np.isfinite(np.delete(values, 2)).all()


def test_running_mean_is_a_centred_mean_without_nan():
    values = np.arange(80.0)
    values[40] = np.nan
    mean = figures._running_mean(values)
    np.testing.assert_allclose(mean[2:38], values[2:38])
    assert np.isnan(mean[40])
    np.testing.assert_allclose(mean[0], [0, 1, 2] @ np.ones(3) / 3)
    np.testing.assert_allclose(mean[39], (37 + 38 + 39 + 41) / 4)
