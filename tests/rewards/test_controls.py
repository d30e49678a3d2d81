"""A control's rewards are the batch's, but not the row's own."""

import numpy as np

from jaxrlhf.rewards import controls, gsm8k
from jaxrlhf.rewards.scoring import find_unscorable, load_scorer, score_rows


def _batch(n):
    records = [{"reward_model": {"ground_truth": str(i)}} for i in range(n)]
    responses = [f"#### {i}" if i % 4 == 0 else "#### -1" for i in range(n)]
    return ["?"] * n, responses, records


def test_scores_are_a_permutation_and_parts_stay():
    batch = _batch(400)
    shuffled = score_rows(load_scorer("jaxrlhf.rewards.controls.shuffled_gsm8k"), *batch)
    true = score_rows(gsm8k.score, *batch)
    np.testing.assert_array_equal(np.sort(shuffled.scores), np.sort(true.scores))
    np.testing.assert_array_equal(shuffled.parts["correct"], true.parts["correct"])
    assert abs(np.corrcoef(shuffled.scores, true.scores)[0, 1]) < 0.15


def test_a_row_without_a_score_takes_part_in_nothing():
    prompts, responses, records = _batch(40)
    for row in (3, 20):  # one with a wrong answer, one with a right one
        records[row] = {"reward_model": {"ground_truth": "none"}}
    scorer = load_scorer("jaxrlhf.rewards.controls.shuffled_gsm8k")
    shuffled = score_rows(scorer, prompts, responses, records, on_error="skip")
    assert np.flatnonzero(~shuffled.scored).tolist() == [3, 20]
    assert shuffled.scores.sum() == 9
    assert find_unscorable(scorer, records) == gsm8k.check_records(records) != {}


def test_the_same_batch_is_dealt_the_same_way_and_another_one_differently():
    one, again = (controls.shuffled_gsm8k(*_batch(50)) for _ in range(2))
    assert one == again
    prompts, responses, records = _batch(50)
    other = controls.shuffled_gsm8k(prompts, ["hm, " + r for r in responses], records)
    assert [row["score"] for row in other] != [row["score"] for row in one]
