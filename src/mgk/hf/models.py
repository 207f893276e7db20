"""Transformers model classes around the models of `mgk.models`.

Each class wraps a module of `mgk.models` as `self.mgk`. A weight has the same name as in a run of `mgk train`, with the
prefix "mgk.".

B batch, N positions of this call, Nk positions so far, E width of the model, V vocabulary, C classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin
from transformers.cache_utils import Cache
from transformers.modeling_outputs import (
    BaseModelOutputWithPooling,
    CausalLMOutputWithPast,
    ImageClassifierOutput,
    SequenceClassifierOutput,
)
from transformers.utils.output_capturing import capture_outputs

from mgk.hf.cache import MGKCache, adopt, stack_of
from mgk.hf.config import MGKConfig
from mgk.merge.sums import SummedModel
from mgk.models import build
from mgk.models.encoder import count_real
from mgk.nn import Block, Stack
from mgk.nn.output import IGNORE

if TYPE_CHECKING:
    from jaxtyping import Float, Int

HEADS = ("output", "lm_head", "classifier")  # modules that `MGKModel` does not have


class MGKPreTrainedModel(SummedModel):
    """Base class: how the models are built, loaded and initialised."""

    config: MGKConfig
    config_class = MGKConfig
    base_model_prefix = ""  # a weight has the same name in all classes
    kinds: ClassVar[tuple[str, ...]] = ()
    auto = "AutoModel"
    pipeline: ClassVar[str]  # the hub's name of the task
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": Block}  # noqa: RUF012
    _supports_attention_backend = False

    def __init__(self, config: MGKConfig) -> None:
        super().__init__(config)
        if config.kind not in self.kinds:
            raise ValueError(
                f"config.kind: expected {' or '.join(self.kinds)} for {type(self).__name__}, got {config.kind}"
            )
        self.mgk: Any = self._build(config)
        self.gradient_checkpointing = config.recompute
        self._on_meta = any(x.is_meta for x in self.mgk.parameters())  # `from_pretrained` loads the weights afterwards
        self.post_init()

    def _build(self, config: MGKConfig) -> nn.Module:
        return build(config.to_model())

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a model, from safetensors only: loading never runs code from a file."""
        kwargs.setdefault("use_safetensors", True)
        try:
            return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        except SafetensorError as error:
            raise OSError(
                f"{pretrained_model_name_or_path}: damaged weights ({error}); download the file again"
            ) from None

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Give weights that the file did not contain the initial values of `mgk.models`."""
        if not self._on_meta:
            return
        missing = {name: x for name, x in _tensors(self.mgk) if not getattr(x, "_is_hf_initialized", False)}
        if missing:
            fresh = dict(_tensors(self._build(self.config)))
            for name, tensor in missing.items():
                tensor.copy_(fresh[name])

    def _set_gradient_checkpointing(self, enable: bool = True, *_: Any, **__: Any) -> None:
        self.gradient_checkpointing = enable
        for module in self.modules():
            if isinstance(module, Stack):
                module.recompute = enable

    def get_input_embeddings(self) -> nn.Module:
        return self.mgk.patches if self.config.kind == "vision" else self.mgk.encoder.tokens  # type: ignore[no-any-return]

    def set_input_embeddings(self, value: nn.Module) -> None:
        if self.config.kind == "vision":
            self.mgk.patches = value
        else:
            self.mgk.encoder.tokens = value


class MGKModel(MGKPreTrainedModel):
    """The model without its head: the last hidden state of every token or patch, and their mean."""

    kinds = ("classifier", "matcher", "language", "vision")
    _keys_to_ignore_on_load_unexpected = [rf"^mgk\.{head}\." for head in HEADS]  # noqa: RUF012

    def _build(self, config: MGKConfig) -> nn.Module:
        model = super()._build(config)
        for head in HEADS:
            if hasattr(model, head):
                setattr(model, head, nn.Identity())
        return model

    @capture_outputs
    def forward(
        self,
        input_ids: Int[Tensor, "b n"] | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Int[Tensor, "b n"] | None = None,
        pixel_values: Float[Tensor, "b c s s"] | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPooling:
        """Return `last_hidden_state` (B,N,E) and `pooler_output` (B,E) of tokens, or of images for a vision model."""
        check_options(kwargs)
        if self.config.kind == "vision":
            if pixel_values is None:
                raise ValueError("pixel_values: expected images for a model of kind 'vision', got None")
            seen: list[Tensor] = []
            handle = self.mgk.stack.register_forward_hook(lambda *call: seen.append(call[2]))
            try:
                pooled = self.mgk(pixel_values)
            finally:
                handle.remove()
            return BaseModelOutputWithPooling(last_hidden_state=seen[0], pooler_output=pooled)  # type: ignore[arg-type]
        if input_ids is None:
            raise ValueError(f"input_ids: expected token ids for a model of kind {self.config.kind!r}, got None")
        mask = real_tokens(self.config, attention_mask, input_ids)
        encode = self.mgk.hidden if self.config.kind == "language" else self.mgk.encoder
        hidden = encode(input_ids, mask, positions_of(position_ids, input_ids, mask))
        weight = torch.ones_like(input_ids, dtype=hidden.dtype) if mask is None else mask.to(hidden.dtype)
        pooled = torch.einsum("bn,bne->be", weight, hidden) / weight.sum(1, keepdim=True).clamp(min=1)
        return BaseModelOutputWithPooling(last_hidden_state=hidden, pooler_output=pooled)  # type: ignore[arg-type]


class MGKForCausalLM(MGKPreTrainedModel, GenerationMixin):
    """A causal language model with `generate()`."""

    kinds = ("language",)
    auto, pipeline = "AutoModelForCausalLM", "text-generation"

    @capture_outputs
    def forward(
        self,
        input_ids: Int[Tensor, "b n"],
        attention_mask: Tensor | None = None,
        position_ids: Int[Tensor, "b n"] | None = None,
        past_key_values: Cache | None = None,
        labels: Int[Tensor, "b n"] | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return the logits of the next token in float32, and the loss if there are labels.

        Args:
            input_ids: (B,N); with a cache, the tokens after those in it.
            attention_mask: (B,Nk), 1 for real tokens and 0 for padding, over the cache and the new tokens. Padding may
                be on either side; with `prior_positions`, only on the right.
            position_ids: (B,N); None counts the real tokens.
            past_key_values: an `MGKCache`, or an empty `DynamicCache`. No gradient flows through such a call.
            labels: (B,N), the same as `input_ids`: the model shifts them. -100 is ignored. In training only the loss
                is returned, and the logits (B,N,V) are never all in memory.
            use_cache: return a cache; by default only if one was passed.
            logits_to_keep: return the logits of this number of last positions; 0 means all.
            num_items_in_batch: divisor of the summed loss, which `Trainer` passes when it accumulates gradients.
            kwargs: `shift_labels` (B,N), targets that are already shifted, instead of `labels`, for sequences that are
                split between devices. It is not a named argument because `Trainer` would expect it in every batch.
        """
        shift_labels: Tensor | None = kwargs.pop("shift_labels", None)
        hooked = kwargs.get("output_hidden_states", self.config.output_hidden_states)
        check_options(kwargs)
        if past_key_values is not None or use_cache:
            fresh = partial(self.mgk.new_cache, len(input_ids))
            past_key_values = MGKCache(fresh()) if past_key_values is None else adopt(past_key_values, fresh)
        if shift_labels is not None or labels is not None:
            if past_key_values is not None:
                raise ValueError("labels: expected None with a cache, through which no gradient flows")
            if logits_to_keep:
                raise ValueError(f"logits_to_keep: expected 0 with labels, got {logits_to_keep}")
        if isinstance(past_key_values, MGKCache) and not hooked:
            step = past_key_values.step(self.mgk, input_ids.shape[1])
            if step is not None:
                found: Any = step(input_ids, attention_mask, positions_of(position_ids, input_ids))
                return CausalLMOutputWithPast(logits=found, past_key_values=past_key_values)
        cache = None if past_key_values is None else stack_of(past_key_values)
        mask = real_tokens(self.config, attention_mask, input_ids, 0 if cache is None else cache.length)
        positions = positions_of(position_ids, input_ids)
        hidden = self.mgk.hidden(input_ids, mask, positions, cache, last=logits_to_keep or None)
        weight = self.mgk.output_weight
        loss = logits = None
        if labels is not None and shift_labels is None:
            shift_labels = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE)
        if shift_labels is not None:
            target = shift_labels.flatten().long()
            count = (target != IGNORE).sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
            loss = self.mgk.output.total_loss(hidden.flatten(0, 1), weight, target) / count
        if shift_labels is None or not self.training:
            logits = self.mgk.output(hidden, weight)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)

    def get_output_embeddings(self) -> nn.Linear | None:
        """Return the output layer of a model whose embeddings are not tied, or None: it uses the input embeddings."""
        return self.mgk.lm_head  # type: ignore[no-any-return]

    def set_output_embeddings(self, value: nn.Linear) -> None:
        self.mgk.lm_head = value

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Change the vocabulary of a model with a plain softmax; an adaptive one has clusters by frequency."""
        if self.mgk.output.cluster_weight is not None:
            raise ValueError("new_num_tokens: expected a model with a plain softmax (cutoffs=()), got an adaptive one")
        if new_num_tokens is None and not args and not kwargs:
            return self.get_input_embeddings()  # type: ignore[return-value]
        self.config.vocabulary_multiple = 1
        self.config.cutoffs = ()  # cutoffs above the old vocabulary may be below the new one
        table: nn.Embedding = super().resize_token_embeddings(new_num_tokens, *args, **kwargs)
        output, size = self.mgk.output, table.num_embeddings
        if output.bias is not None:
            bias = output.bias.new_zeros(size)
            bias[: len(output.bias)] = output.bias.data[:size]
            output.bias = nn.Parameter(bias)
        output.sizes = [size]
        return table

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], generation_mode: Any,
        batch_size: int, max_cache_length: int,
    ) -> None:  # fmt: skip
        kind = generation_config.cache_implementation
        if model_kwargs.get("past_key_values") is not None or generation_config.use_cache is False:
            super()._prepare_cache_for_generation(  # type: ignore[misc]
                generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
            return
        if kind not in (None, "dynamic", "dynamic_full", "static"):
            raise ValueError(f"cache_implementation: expected 'dynamic' or 'static' for this model, got {kind!r}")
        rows = batch_size * max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
        capacity = max_cache_length if kind == "static" else 0
        graph = not generation_config.disable_compile
        compile = graph and generation_config.compile_config is not None
        model_kwargs["past_key_values"] = MGKCache(self.mgk.new_cache(rows), capacity, graph=graph, compile=compile)


class MGKForSequenceClassification(MGKPreTrainedModel):
    """A classifier of one sequence, as in the paper's Long Range Arena experiments."""

    kinds = ("classifier",)
    auto, pipeline = "AutoModelForSequenceClassification", "text-classification"
    accepts_loss_kwargs = False  # the loss is a mean, which `Trainer` divides by the number of accumulated steps

    @capture_outputs
    def forward(
        self,
        input_ids: Int[Tensor, "b n"],
        attention_mask: Tensor | None = None,
        position_ids: Int[Tensor, "b n"] | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Return logits (B,C), and the loss of `config.problem_type` if there are labels.

        Without a `problem_type`, as in Transformers: one class is a regression, float labels are a multi-label problem,
        and anything else is cross-entropy.
        """
        check_options(kwargs)
        mask = real_tokens(self.config, attention_mask, input_ids)
        logits = self.mgk(input_ids, mask, positions_of(position_ids, input_ids, mask))
        return SequenceClassifierOutput(loss=classification_loss(self, logits, labels), logits=logits)


class MGKForDocumentMatching(MGKForSequenceClassification):
    """A classifier of pairs of documents: `input_ids` and `attention_mask` are (B,2,N)."""

    kinds = ("matcher",)
    auto = "AutoModelForNextSentencePrediction"  # Transformers' Auto class for pairs of documents


class MGKForImageClassification(MGKPreTrainedModel):
    """A vision transformer."""

    kinds = ("vision",)
    auto, pipeline = "AutoModelForImageClassification", "image-classification"
    accepts_loss_kwargs = False
    main_input_name = "pixel_values"

    @capture_outputs
    def forward(
        self, pixel_values: Float[Tensor, "b c s s"], labels: Tensor | None = None, **kwargs: Any
    ) -> ImageClassifierOutput:
        """Return logits (B,C), and the loss if there are labels."""
        check_options(kwargs)
        logits = self.mgk(pixel_values)
        return ImageClassifierOutput(loss=classification_loss(self, logits, labels), logits=logits)


TASKS = (MGKForSequenceClassification, MGKForDocumentMatching, MGKForCausalLM, MGKForImageClassification)
CLASSES: dict[str, type[MGKPreTrainedModel]] = {model.kinds[0]: model for model in TASKS}


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def classification_loss(model: MGKPreTrainedModel, logits: Tensor, labels: Tensor | None) -> Any:
    """Compute the loss that `config.problem_type` or the labels ask for; None without labels."""
    if labels is None:
        return None
    logits, kind = logits.float(), model.config.problem_type
    if kind is None and (logits.shape[1] == 1 or labels.is_floating_point()):
        kind = "regression" if logits.shape[1] == 1 else "multi_label_classification"
    if kind in ("regression", "multi_label_classification"):
        if labels.numel() != logits.numel():
            expected = "(B,)" if logits.shape[1] == 1 else "(B,C)"
            raise ValueError(f"labels: expected {expected} numbers of {tuple(logits.shape)}, got {tuple(labels.shape)}")
        labels = labels.float().view_as(logits)
        loss = nn.functional.mse_loss if kind == "regression" else nn.functional.binary_cross_entropy_with_logits
        return loss(logits, labels)
    if labels.shape != logits.shape[:1] or labels.is_floating_point():
        raise ValueError(f"labels: expected integers (B,) = ({len(logits)},), got {labels.dtype} {tuple(labels.shape)}")
    try:
        return nn.functional.cross_entropy(logits, labels.long())
    except IndexError:  # raised on a CPU only
        found = f"{int(labels.min())} to {int(labels.max())}"
        raise ValueError(f"labels: expected 0 to {logits.shape[1] - 1} (num_labels), got {found}") from None


def real_tokens(config: MGKConfig, attention_mask: Tensor | None, input_ids: Tensor, start: int = 0) -> Tensor | None:
    """Return the mask as booleans, True for real tokens, or None if nothing is padded, which is faster."""
    if attention_mask is None:
        return None
    expected = (*input_ids.shape[:-1], start + input_ids.shape[-1])
    if attention_mask.shape != expected:
        raise ValueError(f"attention_mask: expected shape {expected}, got {tuple(attention_mask.shape)}")
    mask = attention_mask.bool()
    if torch.compiler.is_compiling():
        return mask
    if config.prior_positions and bool((mask[..., 1:] & ~mask[..., :-1]).any()):
        raise ValueError(
            "attention_mask: expected padding on the right (prior_positions is set), got padding before a token"
        )
    return None if bool(mask.all()) else mask


def positions_of(position_ids: Tensor | None, input_ids: Tensor, mask: Tensor | None = None) -> Tensor | None:
    """Return `position_ids`, or the number of each real token if there is only a mask, or None."""
    if position_ids is not None:
        return position_ids.expand_as(input_ids)
    return None if mask is None else count_real(mask)


def check_options(options: dict[str, Any]) -> None:
    """Check the keyword arguments that Transformers passes on: reject unknown ones and `output_attentions`."""
    if options.pop("output_attentions", False):
        raise ValueError("output_attentions: expected False; `mgk explore` and mgk.inspect.collect show attention")
    for name in ("output_hidden_states", "return_dict", "use_cache", "token_type_ids", "num_items_in_batch"):
        options.pop(name, None)
    for name, value in options.items():
        if value is not None:  # PEFT adapters pass None for every argument they know
            raise TypeError(f"{name}: no such argument")
