"""Opens a model directory with transformers (torch) and writes its logits.

    python torch_logits.py MODEL_DIR BATCH.npz LOGITS.npy [float32|float64]

BATCH.npz holds `tokens` i32[B, T], right-padded, and `lengths` i32[B]. The command fails if
transformers reports a tensor as missing, unexpected or of the wrong shape. Logits on padding are
set to 0. In float64 transformers still computes norms, softmax and rotations in float32.
"""

import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM


def logits(
    directory: str, tokens: np.ndarray, lengths: np.ndarray, dtype: str = "float32"
) -> np.ndarray:
    """[B, T, V] of the model in `directory`, computed in `dtype` with eager attention."""
    model, info = AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=getattr(torch, dtype),
        attn_implementation="eager",
        output_loading_info=True,
        local_files_only=True,
    )
    problems = {key: value for key, value in info.items() if value}
    assert not problems, f"transformers did not read every tensor: {problems}"
    real = np.arange(tokens.shape[1]) < lengths[:, None]
    with torch.no_grad():
        out = model.eval()(
            input_ids=torch.from_numpy(tokens.astype(np.int64)),
            attention_mask=torch.from_numpy(real.astype(np.int64)),
            use_cache=False,
        ).logits
    return np.where(real[..., None], out.numpy(), 0)


if __name__ == "__main__":
    directory, batch_path, out_path, *dtype = sys.argv[1:]
    batch = np.load(batch_path)
    np.save(out_path, logits(directory, batch["tokens"], batch["lengths"], *dtype))
