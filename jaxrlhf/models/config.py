"""The shape of a decoder transformer as data, and the published shapes by name.

Llama, SmolLM2, Qwen2, Qwen2.5, Qwen3, Gemma 2 and Gemma 3 (text) differ here and nowhere else: the
model code reads fields, never a family's name (which only chooses the ``model_type`` of a saved
``config.json``).
"""

import dataclasses

FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3_text")
ROPE_SCALINGS = ("linear", "llama3")
ACTIVATIONS = ("silu", "gelu_tanh")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for contexts longer than the first training stage's.

    Attributes:
      kind: ``"linear"`` divides every frequency by ``factor``; ``"llama3"`` keeps wavelengths
        below ``original_max_positions / high_freq_factor``, divides those above
        ``original_max_positions / low_freq_factor`` by ``factor`` and blends in between.
      factor: the stretch, at least 1.
      low_freq_factor, high_freq_factor, original_max_positions: read by ``"llama3"`` alone.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in ROPE_SCALINGS:
            raise ValueError(
                f"rope scaling {self.kind!r} is not supported: use one of {list(ROPE_SCALINGS)}, "
                "or None for a context within the unscaled range"
            )
        if self.factor < 1:
            raise ValueError(f"rope scaling factor is {self.factor}: give one of at least 1")
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"rope scaling high_freq_factor {self.high_freq_factor} must be above "
                f"low_freq_factor {self.low_freq_factor}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Everything that the forward pass needs to know besides the parameters; hashable (static).

    Attributes:
      family: one of ``FAMILIES``; names the Hugging Face layout, decides nothing else.
      vocab_size: rows of the embedding as published, padding rows included.
      hidden_size, intermediate_size, num_layers: width D, width of the gated MLP, depth L.
      num_heads, num_kv_heads, head_dim: query heads, key/value heads (a divisor), width of each.
      rope_theta: base of the rotary frequencies.
      rope_scaling: None or a ``RopeScaling``.
      rope_local_theta: base for the layers with a window, which then are never scaled; None: theirs
        are the others' (Gemma 3 has two).
      norm_eps: addend inside the RMS norm's root.
      norm_plus_one: norms multiply by 1 + their weight, which starts at 0 (Gemma).
      post_norms: norms after attention and after the MLP too, before the sums (Gemma).
      tie_embeddings: the output matrix is the embedding.
      qkv_bias: bias on the q, k and v projections (Qwen2).
      qk_norm: RMS norm over head_dim on q and k before the rotation (Qwen3).
      activation: of the gated MLP, one of ``ACTIVATIONS``; ``"gelu_tanh"`` is its tanh form.
      scale_embeddings: embeddings times sqrt(hidden_size), rounded to the compute dtype (Gemma).
      query_scalar: attention scores are divided by its root; None: head_dim.
      sliding_window: a windowed layer sees as many positions, its own included; None: no windows.
      window_pattern: which layers are windowed, repeated over the depth: (True, False) in Gemma 2.
      max_positions: longest published context, in tokens.
      attention_softcap: scores become ``c * tanh(scores / c)`` when given.
      final_softcap: logits become ``c * tanh(logits / c)`` when given.
      init_std: standard deviation of the initial kernels and embeddings.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    rope_local_theta: float | None = None
    norm_eps: float
    norm_plus_one: bool = False
    post_norms: bool = False
    tie_embeddings: bool
    qkv_bias: bool = False
    qk_norm: bool = False
    activation: str = "silu"
    scale_embeddings: bool = False
    query_scalar: int | None = None
    sliding_window: int | None = None
    window_pattern: tuple[bool, ...] = ()
    max_positions: int
    attention_softcap: float | None = None
    final_softcap: float | None = None
    init_std: float = 0.02

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(f"unknown family {self.family!r}: use one of {list(FAMILIES)}")
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"unknown activation {self.activation!r}: use one of {list(ACTIVATIONS)}"
            )
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None or isinstance(value, bool):
                continue
            if field.type in (int, int | None) and value < 1:
                raise ValueError(f"{field.name} is {value}: give at least 1")
            if field.type in (float, float | None) and value <= 0:
                raise ValueError(f"{field.name} is {value}: give a number above 0")
        if (self.sliding_window is not None) != any(self.window_pattern):
            raise ValueError(
                f"sliding_window is {self.sliding_window} and window_pattern {self.window_pattern}:"
                " give both (a pattern with True in it), or neither"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} must be even: rotary pairs halves of it")

    @property
    def windowed_layers(self) -> tuple[bool, ...]:
        """For each layer, whether it has the sliding window."""
        pattern = self.window_pattern or (False,)
        return tuple(pattern[i % len(pattern)] for i in range(self.num_layers))

    @property
    def attention_scale(self) -> float:
        """What attention scores are multiplied with."""
        return float((self.query_scalar or self.head_dim) ** -0.5)


_LLAMA_31 = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
_LLAMA_32 = RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)


def _config(family: str, shape: tuple[int, ...], **fields: object) -> ModelConfig:
    """``shape`` is (vocabulary, hidden, intermediate, layers, heads, kv heads, head dim)."""
    names = [field.name for field in dataclasses.fields(ModelConfig)][1 : 1 + len(shape)]
    return ModelConfig(family=family, **dict(zip(names, shape, strict=True)), **fields)  # type: ignore[arg-type]


def _qwen2(*shape: int, tie: bool, max_positions: int = 32768, **fields: object) -> ModelConfig:
    defaults: dict[str, object] = {"rope_theta": 1e6, "norm_eps": 1e-6, "qkv_bias": True}
    fields = defaults | fields
    return _config("qwen2", shape, tie_embeddings=tie, max_positions=max_positions, **fields)


def _qwen3(*shape: int, tie: bool) -> ModelConfig:
    return _config(
        "qwen3",
        shape,
        rope_theta=1e6,
        norm_eps=1e-6,
        tie_embeddings=tie,
        qk_norm=True,
        max_positions=40960,
    )


def _llama3(*shape: int, tie: bool, scaling: RopeScaling) -> ModelConfig:
    return _config(
        "llama",
        shape,
        rope_theta=5e5,
        rope_scaling=scaling,
        norm_eps=1e-5,
        tie_embeddings=tie,
        max_positions=131072,
    )


def _smollm2(*shape: int, rope_theta: float) -> ModelConfig:
    return _config(
        "llama",
        shape,
        rope_theta=rope_theta,
        norm_eps=1e-5,
        tie_embeddings=True,
        max_positions=8192,
    )


def _gemma(family: str, *shape: int, max_positions: int, **fields: object) -> ModelConfig:
    return _config(
        family,
        shape,
        norm_eps=1e-6,
        norm_plus_one=True,
        post_norms=True,
        tie_embeddings=True,
        activation="gelu_tanh",
        scale_embeddings=True,
        max_positions=max_positions,
        **fields,
    )


def _gemma2(*shape: int, query_scalar: int) -> ModelConfig:
    return _gemma(
        "gemma2",
        *shape,
        rope_theta=1e4,
        query_scalar=query_scalar,
        sliding_window=4096,
        window_pattern=(True, False),
        attention_softcap=50.0,
        final_softcap=30.0,
        max_positions=8192,
    )


def _gemma3(*shape: int) -> ModelConfig:
    return _gemma(
        "gemma3_text",
        *shape,
        rope_theta=1e6,
        rope_local_theta=1e4,
        qk_norm=True,
        query_scalar=256,
        sliding_window=512,
        window_pattern=(True,) * 5 + (False,),
        max_positions=32768,
    )


_LLAMA_8B = _llama3(128256, 4096, 14336, 32, 32, 8, 128, tie=False, scaling=_LLAMA_31)
_LLAMA_70B = _llama3(128256, 8192, 28672, 80, 64, 8, 128, tie=False, scaling=_LLAMA_31)
_LONG = 131072

# Qwen2.5 as in the Instruct checkpoints; the base ones of 7B and more declare 131072 positions, and
# from 14B a norm_eps of 1e-5. Loading a checkpoint reads its own config.json.
PRESETS: dict[str, ModelConfig] = {
    "smollm2-135m": _smollm2(49152, 576, 1536, 30, 9, 3, 64, rope_theta=1e5),
    "smollm2-360m": _smollm2(49152, 960, 2560, 32, 15, 5, 64, rope_theta=1e5),
    "smollm2-1.7b": _smollm2(49152, 2048, 8192, 24, 32, 32, 64, rope_theta=1.3e5),
    "qwen2.5-0.5b": _qwen2(151936, 896, 4864, 24, 14, 2, 64, tie=True),
    "qwen2.5-1.5b": _qwen2(151936, 1536, 8960, 28, 12, 2, 128, tie=True),
    "qwen2.5-3b": _qwen2(151936, 2048, 11008, 36, 16, 2, 128, tie=True),
    "qwen2.5-7b": _qwen2(152064, 3584, 18944, 28, 28, 4, 128, tie=False),
    "qwen2.5-14b": _qwen2(152064, 5120, 13824, 48, 40, 8, 128, tie=False),
    "qwen2.5-32b": _qwen2(152064, 5120, 27648, 64, 40, 8, 128, tie=False),
    "qwen2.5-72b": _qwen2(152064, 8192, 29568, 80, 64, 8, 128, tie=False),
    "qwen3-0.6b": _qwen3(151936, 1024, 3072, 28, 16, 8, 128, tie=True),
    "qwen3-1.7b": _qwen3(151936, 2048, 6144, 28, 16, 8, 128, tie=True),
    "qwen3-4b": _qwen3(151936, 2560, 9728, 36, 32, 8, 128, tie=True),
    "qwen3-8b": _qwen3(151936, 4096, 12288, 36, 32, 8, 128, tie=False),
    "qwen3-14b": _qwen3(151936, 5120, 17408, 40, 40, 8, 128, tie=False),
    "qwen3-32b": _qwen3(151936, 5120, 25600, 64, 64, 8, 128, tie=False),
    "llama-3.2-1b": _llama3(128256, 2048, 8192, 16, 32, 8, 64, tie=True, scaling=_LLAMA_32),
    "llama-3.2-3b": _llama3(128256, 3072, 8192, 28, 24, 8, 128, tie=True, scaling=_LLAMA_32),
    "llama-3.1-8b": _LLAMA_8B,
    "llama-3.1-70b": _LLAMA_70B,
    "gemma-2-2b": _gemma2(256000, 2304, 9216, 26, 8, 4, 256, query_scalar=256),
    "gemma-2-9b": _gemma2(256000, 3584, 14336, 42, 16, 8, 256, query_scalar=256),
    "gemma-2-27b": _gemma2(256000, 4608, 36864, 46, 32, 16, 128, query_scalar=144),
    "gemma-3-270m": _gemma3(262144, 640, 2048, 18, 4, 1, 256),
    "gemma-3-1b": _gemma3(262144, 1152, 6912, 26, 4, 1, 256),
    "deepseek-r1-distill-qwen-1.5b": _qwen2(
        151936, 1536, 8960, 28, 12, 2, 128, tie=False, max_positions=_LONG, rope_theta=1e4
    ),
    "deepseek-r1-distill-qwen-7b": _qwen2(
        152064, 3584, 18944, 28, 28, 4, 128, tie=False, max_positions=_LONG, rope_theta=1e4
    ),
    "deepseek-r1-distill-qwen-14b": _qwen2(
        152064, 5120, 13824, 48, 40, 8, 128, tie=False, max_positions=_LONG, norm_eps=1e-5
    ),
    "deepseek-r1-distill-qwen-32b": _qwen2(
        152064, 5120, 27648, 64, 40, 8, 128, tie=False, max_positions=_LONG, norm_eps=1e-5
    ),
    "deepseek-r1-distill-llama-8b": _LLAMA_8B,
    "deepseek-r1-distill-llama-70b": _LLAMA_70B,
}
