"""Configurations of the models: plain data, saved with every run, from which the same model can be built again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args, get_origin, get_type_hints

from mgk.nn.embeddings import BASE, RotaryScaling, check_base
from mgk.ops import arguments as check
from mgk.variants import LINEAR, FeatureMapName, Prior, Variant


@dataclass(frozen=True)
class TransformerConfig:
    """The attention and the layers of a model. The defaults are those of the paper's Long Range Arena."""

    attention: Variant = "smgk"
    """Attention variant; linear, mlk and smlk are the linear family."""
    heads: int = 4
    """Attention heads."""
    num_kv_heads: int | None = None
    """Heads of keys and values, each read by heads / num_kv_heads query heads; None is heads."""
    head_dim: int | None = 32
    """Width of a head, independent of the width of the model; None is width / heads."""
    components: int = 2
    """Components of each key's mixture; softmax and linear have none."""
    e_step: Literal["soft", "hard"] = "soft"
    """How the components combine (mgk, smgk): soft adds them, hard takes the nearest one, without priors."""
    prior: Prior = "sgd"
    """Priors of the components: learned, updated by an M-step in every training step (mgk, smgk), or none."""
    prior_positions: int | None = None
    """With prior=em: a prior for each of so many key positions; None is one prior for all positions."""
    prior_momentum: float = 0.0
    """With prior=em: the weight of the old prior in an update."""
    learn_variance: bool = False
    """Learn the variance per head and component (mgk, smgk) instead of sqrt(head_dim)."""
    means: Literal["sgd", "em"] = "sgd"
    """Shifts of the components: learned, or updated with the variances by an M-step in every training step (smgk)."""
    mixing: Literal["features", "keys"] = "features"
    """For mlk and smlk: mix after the feature map, or before it; keys is the authors' LRA code."""
    feature_map: FeatureMapName = "elu"
    """Feature map of the linear family; favor is the Performer's."""
    attention_bias: bool = True
    """Biases in the four projections of an attention layer."""
    qk_norm: bool = False
    """RMSNorm of the queries and keys of every head."""
    layers: int = 2
    """Transformer layers."""
    width: int = 64
    """Width of the model."""
    hidden: int = 128
    """Hidden width of the feed-forward part of a layer."""
    activation: Literal["gelu", "relu", "swiglu"] = "gelu"
    """Activation of the feed-forward part; swiglu has a third weight matrix, the gate."""
    mlp_bias: bool = True
    """Biases in the feed-forward part."""
    norm: Literal["pre", "post"] = "pre"
    """Norm before each part of a layer and after the last layer (pre), or after each residual sum (post)."""
    norm_type: Literal["layer", "rms"] = "layer"
    """LayerNorm or RMSNorm."""
    dropout: float = 0.1
    """Dropout after the embedding and in the layers."""
    attention_dropout: float = 0.1
    """Dropout of attention weights; the linear family has no weights to drop and ignores it."""
    recompute: bool = False
    """Activation checkpointing: keep only the inputs of the layers. Less memory, a third more time."""
    impl: Literal["auto", "reference", "blockwise", "native", "triton"] = "auto"
    """Implementation of the attention."""

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self)).items():
            value = getattr(self, name)
            if get_origin(kind) is Literal:
                check.check_choice(name, value, get_args(kind))
            elif kind is int or (kind == int | None and value is not None):
                check.check_count(name, value)
            elif kind is bool:
                check.check_flag(name, value)
        for name in ("dropout", "attention_dropout", "prior_momentum"):
            check.check_probability(name, getattr(self, name))

    @property
    def windows(self) -> tuple[int | None, ...]:
        """How many keys a query of each layer sees; None is all."""
        return (None,) * self.layers

    @property
    def width_of_head(self) -> int:
        """Width of a head."""
        return self.head_dim or self.width // self.heads

    @property
    def weight_dropout(self) -> float:
        """Dropout of attention weights; 0 for the linear family, which has none."""
        return 0.0 if self.attention in LINEAR else self.attention_dropout


@dataclass(frozen=True)
class TokenConfig(TransformerConfig):
    """Tokens and their positions, for all models that read tokens."""

    vocabulary: int = 512
    """Number of tokens."""
    max_length: int = 4096
    """Length of the longest input."""
    positions: Literal["learned", "sinusoidal", "rotary"] = "learned"
    """How positions are encoded."""
    rotary_share: float = 0.5
    """With positions=rotary: the share of a head that is rotated."""
    rope_theta: float = BASE
    """With positions=rotary: the base of the frequencies."""
    rope_type: Literal["default", "linear", "llama3", "yarn"] = "default"
    """With positions=rotary: how frequencies are lowered for long texts."""
    rope_factor: float = 1.0
    """With rope_type: how many times longer the texts are."""
    rope_original_length: int | None = None
    """With rope_type=llama3 and yarn: the length trained on, in tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_base("rope_theta", self.rope_theta)
        if self.rope_type == "default" and (self.rope_factor != 1 or self.rope_original_length is not None):
            raise ValueError(
                "rope_type: expected linear, llama3 or yarn with rope_factor or rope_original_length, got default"
            )
        if self.positions != "rotary" and (self.rope_type != "default" or self.rope_theta != BASE):
            raise ValueError(f"positions: expected rotary with rope_type or rope_theta, got {self.positions}")
        _ = self.rotary_scaling  # raises if it is wrong

    @property
    def embedding_rows(self) -> int:
        """Rows of the embedding of tokens."""
        return self.vocabulary

    @property
    def rotary_scaling(self) -> RotaryScaling | None:
        """How the frequencies of rotary positions are lowered."""
        if self.rope_type == "default":
            return None
        return RotaryScaling(self.rope_type, self.rope_factor, self.rope_original_length)


@dataclass(frozen=True)
class ClassifierConfig(TokenConfig):
    """Encoder of one sequence of tokens, pooled and classified."""

    vocabulary: int = 512
    """Number of tokens; token 0 is padding."""
    max_length: int = 4096
    """Length of the longest input, and the divisor of padded pooling."""
    classes: int = 2
    """Number of classes."""
    classifier_hidden: int = 128
    """Hidden width of the classifier after the encoder."""
    pooling: Literal["mean", "padded"] = "mean"
    """mean: over the real positions. padded: their sum divided by max_length, as in the authors' code."""


@dataclass(frozen=True)
class MatcherConfig(ClassifierConfig):
    """One encoder for two sequences, whose pooled vectors [x0, x1, x0*x1, x0-x1] are classified."""


@dataclass(frozen=True)
class LanguageModelConfig(TokenConfig):
    """Causal language model. The defaults are those of the paper's WikiText-103."""

    heads: int = 8
    """Attention heads."""
    head_dim: int | None = 16
    """Width of a head, independent of the width of the model; None is width / heads."""
    attention_bias: bool = False
    """Biases in the four projections of an attention layer."""
    layers: int = 16
    """Transformer layers."""
    width: int = 128
    """Width of the model."""
    hidden: int = 2048
    """Hidden width of the feed-forward part of a layer."""
    activation: Literal["gelu", "relu", "swiglu"] = "relu"
    """Activation of the feed-forward part; swiglu has a third weight matrix, the gate."""
    norm: Literal["pre", "post"] = "post"
    """Norm before each part of a layer and after the last layer (pre), or after each residual sum (post)."""
    attention_dropout: float = 0.0
    """Dropout of attention weights; the linear family has no weights to drop and ignores it."""
    window: int | None = None
    """Keys that a query sees, up to its own position; None is all. The linear family has no window."""
    global_every: int | None = None
    """With window: every global_every-th layer sees all keys, 6 for five layers with a window and one without; None:
    no layer does."""
    vocabulary: int = 267_735
    """Number of tokens; with cutoffs they are sorted by falling frequency."""
    cutoffs: tuple[int, ...] = (20_000, 40_000, 200_000)
    """First tokens of the clusters of the adaptive softmax. Cutoffs at or above the vocabulary are ignored; without any
    the softmax is plain."""
    vocabulary_multiple: int = 1
    """Pad the embedding to a multiple of this many rows, which a GPU multiplies faster; no token uses the last ones."""
    tie_word_embeddings: bool = True
    """Use the embedding of the tokens as the weight of the output layer, too."""
    output_bias: bool = True
    """A bias for each token in a plain softmax; GPT-2 has none."""
    max_length: int = 256
    """Context length: a limit for learned positions, otherwise the default of data and evaluation."""
    positions: Literal["learned", "sinusoidal", "rotary"] = "sinusoidal"
    """How positions are encoded."""

    def __post_init__(self) -> None:
        super().__post_init__()
        adaptive = any(cutoff < self.vocabulary for cutoff in check.check_cutoffs(self.cutoffs))
        if adaptive and not self.output_bias:
            raise ValueError("output_bias: expected True with cutoffs, got False")
        if adaptive and self.vocabulary_multiple != 1:
            raise ValueError(f"vocabulary_multiple: expected 1 with cutoffs, got {self.vocabulary_multiple}")
        if self.window is None and self.global_every is not None:
            raise ValueError(f"global_every: expected None without window, got {self.global_every}")
        if self.window is not None and self.attention in LINEAR:
            raise ValueError(f"window: expected None for attention {self.attention!r}, got {self.window}")

    @property
    def windows(self) -> tuple[int | None, ...]:
        """How many keys a query of each layer sees; None is all."""
        every = self.global_every or self.layers + 1
        return tuple(None if layer % every == 0 else self.window for layer in range(1, self.layers + 1))

    @property
    def embedding_rows(self) -> int:
        """Rows of the embedding of tokens, with those behind the vocabulary."""
        return -(-self.vocabulary // self.vocabulary_multiple) * self.vocabulary_multiple


@dataclass(frozen=True)
class VisionConfig(TransformerConfig):
    """Vision transformer: an image as a sequence of patches."""

    image_size: int = 32
    """Height and width of the images, in pixels."""
    patch_size: int = 4
    """Height and width of a patch; it divides the image."""
    channels: int = 3
    """Channels of the images."""
    classes: int = 10
    """Number of classes."""
    pooling: Literal["mean", "class"] = "mean"
    """mean: over the patches. class: the output of an extra, learned position."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.image_size % self.patch_size:
            raise ValueError(f"patch_size: expected a divisor of image_size = {self.image_size}, got {self.patch_size}")


@dataclass(frozen=True)
class TranslatorConfig(TokenConfig):
    """Encoder-decoder for translation. The defaults are those of the recipe multi30k."""

    attention_bias: bool = False
    """Biases in the four projections of an attention layer."""
    layers: int = 3
    """Layers of the encoder."""
    decoder_layers: int = 3
    """Layers of the decoder."""
    width: int = 256
    """Width of the model."""
    hidden: int = 1024
    """Hidden width of the feed-forward part of a layer."""
    attention_dropout: float = 0.0
    """Dropout of attention weights; the linear family has no weights to drop and ignores it."""
    vocabulary: int = 10_000
    """Number of tokens, of both languages; token 0 begins and ends a sentence."""
    max_length: int = 128
    """Longest source and target, in tokens; longer ones are cut."""
    positions: Literal["learned", "sinusoidal", "rotary"] = "sinusoidal"
    """How positions are encoded; a translator has sinusoidal ones."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.positions != "sinusoidal":
            raise ValueError(f"positions: expected sinusoidal for a translator, got {self.positions}")
        if self.prior_positions is not None:
            raise ValueError(f"prior_positions: expected None for a translator, got {self.prior_positions}")


ModelConfig = ClassifierConfig | MatcherConfig | LanguageModelConfig | VisionConfig | TranslatorConfig
