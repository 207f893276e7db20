"""Transformers model classes around the models of `mgk.models`: the language model, and the list of all classes.

B batch, N positions of this call, Nk positions so far, E width of the model, V vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin
from transformers.cache_utils import Cache, QuantizedCache, StaticCache
from transformers.generation.configuration_utils import GenerationMode
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from mgk.hf.base import MGKModel, MGKPreTrainedModel
from mgk.hf.cache import MGKCache, adopt, stack_of
from mgk.hf.heads import MGKForDocumentMatching, MGKForImageClassification, MGKForSequenceClassification
from mgk.hf.inputs import check_options, read_texts
from mgk.hf.output import OutputLayer, Vocabulary, summed_loss
from mgk.nn.output import IGNORE
from mgk.variants import LINEAR

if TYPE_CHECKING:
    from jaxtyping import Float, Int

__all__ = [
    "CLASSES",
    "TASKS",
    "MGKForCausalLM",
    "MGKForDocumentMatching",
    "MGKForImageClassification",
    "MGKForSequenceClassification",
    "MGKModel",
    "MGKPreTrainedModel",
]


class MGKForCausalLM(Vocabulary, MGKPreTrainedModel, GenerationMixin):
    """A causal language model with `generate()`."""

    kinds = ("language",)
    auto, pipeline = "AutoModelForCausalLM", "text-generation"

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "b n"] | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Int[Tensor, "b n"] | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Float[Tensor, "b n e"] | None = None,
        labels: Int[Tensor, "b n"] | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        logits_in_training: bool | None = None,
        cache_position: Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return the logits of the next token in float32, and the loss if there are labels.

        Args:
            input_ids: (B,N); with a cache, the tokens after those in it.
            attention_mask: (B,Nk), 1 for real tokens and 0 for padding, over the cache and the new tokens. Padding may
                be on either side; with `prior_positions`, only on the right.
            position_ids: (B,N); None counts the real tokens. Where they start again in a row, a new document begins.
            past_key_values: an `MGKCache`, or an empty `DynamicCache`. No gradient flows through such a call.
            inputs_embeds: (B,N,E), what the embedding returns for tokens, instead of `input_ids`.
            labels: (B,N), the same as `input_ids`: the model shifts them. -100 is ignored.
            use_cache: return a cache. By default `config.use_cache`, where no gradient is computed, there are no labels
                and nothing traces the model.
            logits_to_keep: return the logits of this number of last positions, or at these positions; 0 means all.
            num_items_in_batch: divisor of the summed loss, which `Trainer` passes when it accumulates gradients.
            logits_in_training: in training with labels return the logits, too. By default that is
                `config.logits_in_training`, which is False: then the logits (B,N,V) are never all in memory.
            cache_position: ignored, the cache knows its length.
            kwargs: `shift_labels` (B,N), targets that are already shifted, instead of `labels`, for sequences that are
                split between devices. It is not a named argument because `Trainer` would expect it in every batch.
                `cu_seq_lens_q`, `seq_idx` and so on, which collators pass beside packed documents.
        """
        shift_labels: Tensor | None = kwargs.pop("shift_labels", None)
        hooked = self.wants_states(kwargs)
        cache = self.cache_for(input_ids, inputs_embeds, past_key_values, use_cache)
        keeps_all = isinstance(logits_to_keep, int) and not logits_to_keep
        if shift_labels is not None or labels is not None:
            if cache is not None:
                raise ValueError("labels: expected None with a cache, through which no gradient flows")
            if not keeps_all:
                raise ValueError(f"logits_to_keep: expected 0 with labels, got {logits_to_keep}")
        if isinstance(cache, MGKCache) and input_ids is not None and not hooked:
            step = cache.step(self.mgk, input_ids.shape[1])
            if step is not None:
                check_options(kwargs)
                place = None if position_ids is None else position_ids.expand_as(input_ids)
                return CausalLMOutputWithPast(logits=step(input_ids, attention_mask, place), past_key_values=cache)  # type: ignore[arg-type]
        start = 0 if cache is None else stack_of(cache).length
        texts = read_texts(
            self, input_ids, inputs_embeds, attention_mask, position_ids, kwargs, start=start, cached=cache is not None
        )
        check_options(kwargs)
        if use_cache is None and cache is None and labels is None and shift_labels is None and texts.documents is None:
            quiet = not (torch.is_grad_enabled() or self.training or torch.compiler.is_compiling())
            cache = self.cache_for(input_ids, inputs_embeds, None, quiet and self.config.use_cache)
        found = self.encode(texts, cache=cache, output_hidden_states=hooked, return_dict=True)
        hidden, weight = found.last_hidden_state, self.mgk.output_weight
        loss: Any = None
        logits: Any = None
        if labels is not None and shift_labels is None:
            shift_labels = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE)
        if shift_labels is not None:
            target = shift_labels.flatten().long()
            count = (target != IGNORE).sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
            loss = summed_loss(self.mgk.output, hidden.flatten(0, 1), weight, target) / count
        if logits_in_training is None:
            logits_in_training = self.config.logits_in_training
        if shift_labels is None or not self.training or logits_in_training:
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.mgk.output(hidden[:, kept], weight)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=cache, hidden_states=found.hidden_states
        )

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the output layer, whose weight may be that of the embedding; None for an adaptive softmax."""
        if self.mgk.lm_head is not None:
            return self.mgk.lm_head  # type: ignore[no-any-return]
        return self.mgk.output if isinstance(self.mgk.output, OutputLayer) else None

    lm_head = property(get_output_embeddings)

    @property
    def softmax(self) -> Any:
        """The softmax over the vocabulary."""
        return self.mgk.output

    def set_output_embeddings(self, value: nn.Linear) -> None:
        """Replace the output layer; a tied one keeps the weight of the embedding, which `set_input_embeddings` sets."""
        if value is not self.mgk.output:
            self.mgk.lm_head = value

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], generation_mode: Any,
        batch_size: int, max_cache_length: int,
    ) -> None:  # fmt: skip
        kind = generation_config.cache_implementation
        assists = generation_mode == GenerationMode.ASSISTED_GENERATION or generation_config.is_assistant
        if assists and self.config.attention in LINEAR:
            raise ValueError(
                f"assistant_model, prompt_lookup_num_tokens: expected None with {self.config.attention!r}: the "
                "state of the linear family cannot remove the tokens that are rejected"
            )
        rows = batch_size * max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
        if isinstance(given := model_kwargs.get("past_key_values"), StaticCache):  # which generate() would compile
            graph = not generation_config.disable_compile
            model_kwargs["past_key_values"] = adopt(given, partial(self.mgk.new_cache, rows), graph=graph)
        if model_kwargs.get("past_key_values") is not None or generation_config.use_cache is False:
            super()._prepare_cache_for_generation(  # type: ignore[misc]
                generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
            return
        if kind == "quantized":
            options = dict(generation_config.cache_config or {})
            given = QuantizedCache(options.pop("backend", "quanto"), options.pop("config", self.config), **options)
            model_kwargs["past_key_values"] = adopt(given, partial(self.mgk.new_cache, rows))
            return
        if kind not in (None, "dynamic", "dynamic_full", "static"):
            raise ValueError(
                f"cache_implementation: expected 'dynamic', 'quantized' or 'static' for this model, got {kind!r}"
            )
        capacity = max_cache_length if kind == "static" else 0
        graph = not generation_config.disable_compile
        compile = graph and generation_config.compile_config is not None
        model_kwargs["past_key_values"] = MGKCache(self.mgk.new_cache(rows), capacity, graph=graph, compile=compile)


TASKS = (MGKForSequenceClassification, MGKForDocumentMatching, MGKForCausalLM, MGKForImageClassification)
CLASSES: dict[str, type[MGKPreTrainedModel]] = {model.kinds[0]: model for model in TASKS}
