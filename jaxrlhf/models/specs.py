"""One tree of parameter specs per model: initial values, abstract shapes, shardings, HF names.

The tree has the parameters' own structure. Kernels are ``[in, out]``; the layers' leaves are
stacked on axis 0, so that a ``lax.scan`` runs over them. A leaf's logical axes are what the
sharding rules map to mesh axes.
"""

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.nn import initializers

from jaxrlhf.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One parameter.

    Attributes:
      shape: the array's shape, the stacked layer axis first where there is one.
      axes: a logical name per axis: layers, embed, heads, kv_heads, head_dim, mlp, vocab.
      init: ``(key, shape, dtype) -> array``.
      hf_name: the tensor's name in a Hugging Face checkpoint, ``{layer}`` standing for the index
        along axis 0 when the leaf is stacked.
      hf_transposed: Hugging Face stores ``[out, in]`` where we hold ``[in, out]``.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: jax.nn.initializers.Initializer
    hf_name: str
    hf_transposed: bool = False

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ValueError(f"{self.hf_name}: name one axis for each entry of shape {self.shape}")

    @property
    def stacked(self) -> bool:
        """Whether axis 0 counts layers."""
        return self.axes[0] == "layers"


def param_specs(config: ModelConfig) -> dict[str, Any]:
    """The spec tree: ``embed`` [V, D], ``layers``, ``final_norm`` [D], maybe ``lm_head`` [V, D]."""
    vocab = (config.vocab_size, config.hidden_size)
    normal = initializers.normal(config.init_std)
    specs: dict[str, Any] = {
        "embed": ParamSpec(vocab, ("vocab", "embed"), normal, "model.embed_tokens.weight"),
        "layers": _attention_specs(config) | _mlp_specs(config),
        "final_norm": ParamSpec(vocab[1:], ("embed",), _norm_init(config), "model.norm.weight"),
    }
    if not config.tie_embeddings:
        specs["lm_head"] = ParamSpec(vocab, ("vocab", "embed"), normal, "lm_head.weight")
    return specs


def _norm_init(config: ModelConfig) -> initializers.Initializer:
    """Every norm's factor starts at 1."""
    return initializers.zeros if config.norm_plus_one else initializers.ones


def _layer_spec(
    config: ModelConfig, dims: dict[str, int], init: initializers.Initializer, name: str
) -> ParamSpec:
    """A stacked leaf; ``dims`` maps the axes after the layer axis to their sizes."""
    return ParamSpec(
        shape=(config.num_layers, *dims.values()),
        axes=("layers", *dims),
        init=init,
        hf_name=f"model.layers.{{layer}}.{name}",
        hf_transposed=len(dims) == 2,
    )


def _attention_specs(config: ModelConfig) -> dict[str, ParamSpec]:
    normal = initializers.normal(config.init_std)
    embed = {"embed": config.hidden_size}
    heads = {"heads": config.num_heads * config.head_dim}
    kv_heads = {"kv_heads": config.num_kv_heads * config.head_dim}
    norm = partial(_layer_spec, config, init=_norm_init(config))
    specs = {
        "attention_norm": norm(embed, name="input_layernorm.weight"),
        "o_kernel": _layer_spec(config, heads | embed, normal, "self_attn.o_proj.weight"),
    }
    for name, out in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        projection = f"self_attn.{name}_proj"
        specs[f"{name}_kernel"] = _layer_spec(config, embed | out, normal, f"{projection}.weight")
        if config.qkv_bias:
            bias = _layer_spec(config, out, initializers.zeros, f"{projection}.bias")
            specs[f"{name}_bias"] = bias
    if config.qk_norm:
        for name in ("q_norm", "k_norm"):
            specs[name] = norm({"head_dim": config.head_dim}, name=f"self_attn.{name}.weight")
    if config.post_norms:
        specs["attention_post_norm"] = norm(embed, name="post_attention_layernorm.weight")
    return specs


def _mlp_specs(config: ModelConfig) -> dict[str, ParamSpec]:
    normal = initializers.normal(config.init_std)
    embed, mlp = {"embed": config.hidden_size}, {"mlp": config.intermediate_size}
    norm = partial(_layer_spec, config, embed, _norm_init(config))
    specs = {
        "gate_kernel": _layer_spec(config, embed | mlp, normal, "mlp.gate_proj.weight"),
        "up_kernel": _layer_spec(config, embed | mlp, normal, "mlp.up_proj.weight"),
        "down_kernel": _layer_spec(config, mlp | embed, normal, "mlp.down_proj.weight"),
    }
    if not config.post_norms:
        return specs | {"mlp_norm": norm("post_attention_layernorm.weight")}
    return specs | {
        "mlp_norm": norm("pre_feedforward_layernorm.weight"),
        "mlp_post_norm": norm("post_feedforward_layernorm.weight"),
    }


def init_params(
    key: jax.Array, config: ModelConfig, dtype: jax.typing.DTypeLike = jnp.float32
) -> dict[str, Any]:
    """Fresh parameters: normal kernels and embeddings, zero biases, norms of factor 1."""
    specs, structure = jax.tree.flatten(param_specs(config))
    keys = jax.random.split(key, len(specs))
    leaves = [spec.init(k, spec.shape, dtype) for k, spec in zip(keys, specs, strict=True)]
    return jax.tree.unflatten(structure, leaves)


def abstract_params(
    config: ModelConfig, dtype: jax.typing.DTypeLike = jnp.float32
) -> dict[str, Any]:
    """The parameters' shapes and dtypes, without arrays."""
    return jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, dtype), param_specs(config))


def count_params(config: ModelConfig) -> int:
    """Number of scalars; a tied output matrix counts once."""
    return sum(math.prod(spec.shape) for spec in jax.tree.leaves(param_specs(config)))
