"""Opens a model directory with transformers (torch) and writes its float32 logits.

    python torch_logits.py MODEL_DIR BATCH.npz LOGITS.npy

BATCH.npz holds `tokens` i32[B, T], right-padded, and `lengths` i32[B]. The command fails if
transformers reports a tensor as missing, unexpected or of the wrong shape. Logits on padding are
set to 0.
"""

import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM


def logits(directory: str, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """f32[B, T, V] of the model in `directory`, computed in float32 with eager attention."""
    model, info = AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=torch.float32,
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
    return np.where(real[..., None], out.float().numpy(), 0)


if __name__ == "__main__":
    directory, batch_path, out_path = sys.argv[1:]
    batch = np.load(batch_path)
    np.save(out_path, logits(directory, batch["tokens"], batch["lengths"]))
