"""Opens sequence classifiers with transformers (torch), writes their scores, saves them anew.

    python torch_scores.py ROOT

Every directory ROOT/*/ holds a model and BATCH.npz with `tokens` i32[B, T], right-padded, `lengths`
i32[B] and `pad` (the id that fills). Written into it are SCORES.npz, with f32[B] for rows in one
batch and one by one, padded on the right and on the left, and `resaved/`, what transformers makes
of the model. The command fails if transformers reports a tensor as missing or unexpected.
"""

import pathlib
import sys

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification


def left(tokens: np.ndarray, lengths: np.ndarray, pad: int) -> np.ndarray:
    """The rows with their padding on the left."""
    out = np.full_like(tokens, pad)
    for row, n in enumerate(lengths):
        out[row, tokens.shape[1] - n :] = tokens[row, :n]
    return out


def scores(model: torch.nn.Module, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        logits = model(
            input_ids=torch.from_numpy(tokens.astype(np.int64)),
            attention_mask=torch.from_numpy(mask.astype(np.int64)),
            use_cache=False,
        ).logits
    assert logits.shape == (len(tokens), 1)
    return logits[:, 0].numpy()


def run(directory: pathlib.Path) -> None:
    model, info = AutoModelForSequenceClassification.from_pretrained(
        directory,
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
        local_files_only=True,
    )
    problems = {key: value for key, value in info.items() if value}
    assert not problems, f"transformers did not read every tensor: {problems}"
    model.eval()
    batch = np.load(directory / "batch.npz")
    tokens, lengths, pad = batch["tokens"], batch["lengths"], int(batch["pad"])
    real = np.arange(tokens.shape[1]) < lengths[:, None]
    out = {}
    for side, rows, mask in (("right", tokens, real), ("left", left(tokens, lengths, pad), None)):
        mask = left(real, lengths, 0) if mask is None else mask
        out[f"{side}_together"] = scores(model, rows, mask)
        alone = [scores(model, rows[i : i + 1], mask[i : i + 1]) for i in range(len(rows))]
        out[f"{side}_alone"] = np.concatenate(alone)
    np.savez(directory / "scores.npz", **out)
    model.save_pretrained(directory / "resaved")


if __name__ == "__main__":
    for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):
        run(path)
