"""What all Transformers model classes share, and `MGKModel`, the model without a head.

Each class wraps a module of `mgk.models` as `self.mgk`. A weight has the same name as in a run of `mgk train`, with the
prefix "mgk.".

B batch, N positions of this call, Nk positions so far, E width of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    BaseModelOutputWithPoolingAndCrossAttentions,
)
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from mgk.files import write_text
from mgk.hf.cache import MGKCache, adopt, stack_of
from mgk.hf.config import MGKConfig
from mgk.hf.inputs import Texts, check_options, read_texts
from mgk.hf.output import as_output_layer
from mgk.merge.sums import SummedModel
from mgk.models import build
from mgk.nn import Block, Stack, TiedSoftmax
from mgk.nn.arguments import loads_its_weight
from mgk.nn.block import recomputed

if TYPE_CHECKING:
    from jaxtyping import Float, Int

HEADS = ("output", "lm_head", "classifier")  # modules of `mgk.models` that a base model does not have
UNEXPECTED = [rf"^mgk\.{head}\." for head in HEADS] + [r"^(score|qa_outputs|output)\."]  # in files of other tasks
LOADER = "modeling_mgk"  # the module of a folder that Transformers imports if it may
LOADING = '"""Loads mgk, which must be installed: pip install \'mgk[hf]\'."""\n\nfrom mgk.hf import *  # noqa: F403\n'
CACHE = 3  # the place of the cache in the arguments of `Block.forward`


class TransformersBlock(GradientCheckpointingLayer, Block):
    """A layer whose gradient checkpointing Transformers turns on and off. Its M-steps are made once."""

    def __call__(self, *inputs: Any) -> Tensor:
        """Apply the layer; the arguments are those of `Block.forward`."""
        cached = len(inputs) > CACHE and inputs[CACHE] is not None  # such a call has no gradient
        if not self.gradient_checkpointing or not self.training or cached:
            return nn.Module.__call__(self, *inputs)  # type: ignore[no-any-return]
        return recomputed(partial(nn.Module.__call__, self), self.attention, inputs)


class MGKPreTrainedModel(SummedModel):
    """Base class: how the models are built, loaded and initialised."""

    config: MGKConfig
    config_class = MGKConfig
    base_model_prefix = "model"
    kinds: ClassVar[tuple[str, ...]] = ()
    auto = "AutoModel"
    pipeline: ClassVar[str]  # the hub's name of the task
    supports_gradient_checkpointing = True
    _no_split_modules = ["TransformersBlock"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": Block}  # noqa: RUF012
    _supports_attention_backend = False

    def __init__(self, config: MGKConfig) -> None:
        super().__init__(config)
        if config.kind not in self.kinds:
            raise ValueError(
                f"config.kind: expected {' or '.join(self.kinds)} for {type(self).__name__}, got {config.kind}"
            )
        self.mgk: Any = self._build(config)
        self._add_head(config)
        self.gradient_checkpointing = config.recompute
        self._on_meta = any(x.is_meta for x in self.parameters())  # `from_pretrained` loads the weights afterwards
        self.post_init()

    def _build(self, config: MGKConfig) -> nn.Module:
        return build(config.to_model())

    def _add_head(self, config: MGKConfig) -> None:
        """Create the modules of a head that `mgk.models` does not have."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "mgk":
            as_transformers_layers(value)
        super().__setattr__(name, value)

    @property
    def _output_capturing_hooks_installed(self) -> bool:
        """Whether Transformers has hooks in the layers that collect hidden states, through this model or a view."""
        return "_captured" in self.mgk.__dict__

    @_output_capturing_hooks_installed.setter
    def _output_capturing_hooks_installed(self, value: bool) -> None:
        self.mgk.__dict__["_captured"] = value

    @property
    def model(self) -> MGKPreTrainedModel:
        """The model without its head. It shares all modules, so weights keep their names; `base_model` returns it."""
        if isinstance(self, MGKModel):
            raise AttributeError("model: MGKModel has no head, it is the base model itself")
        view = self.__dict__.get("_view")
        if view is None or view.mgk is not self.mgk:
            view = MGKModel.__new__(MGKModel)
            SummedModel.__init__(view, self.config)
            view.mgk, view.gradient_checkpointing, view._on_meta = self.mgk, False, False
            view.post_init()
            self.__dict__["_view"] = view  # no submodule of this one
        view.training = self.training
        return view  # type: ignore[no-any-return]

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

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Save the model, with a file by which `trust_remote_code=True` finds mgk where `mgk.hf` is not imported."""
        self.config.auto_map = {"AutoConfig": f"{LOADER}.MGKConfig", self.auto: f"{LOADER}.{type(self).__name__}"}  # type: ignore[misc]
        self.config.auto_map["AutoModel"] = f"{LOADER}.MGKModel"
        if (args[0] if args else kwargs.get("is_main_process", True)) and not Path(save_directory).is_file():
            Path(save_directory).mkdir(parents=True, exist_ok=True)
            write_text(Path(save_directory) / f"{LOADER}.py", LOADING)
        super().save_pretrained(save_directory, *args, **kwargs)

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Give weights that the file did not contain the initial values of `mgk.models`."""
        if not self._on_meta:
            return
        missing = {name: x for name, x in _tensors(self) if not getattr(x, "_is_hf_initialized", False)}
        if missing:
            fresh = dict(_tensors(type(self)(self.config)))
            for name, tensor in missing.items():
                tensor.copy_(fresh[name])

    def wants_states(self, options: dict[str, Any]) -> Any:
        """Return whether the states of all layers are to be returned, or a list of the numbers of layers."""
        asked = options.get("output_hidden_states")
        return self.config.output_hidden_states if asked is None else asked

    @capture_outputs
    def encode(
        self, texts: Texts | None, pixel_values: Tensor | None = None, cache: Cache | None = None, **_: Any
    ) -> BaseModelOutputWithPast:
        """Return the states that the head reads, and those of all layers if `output_hidden_states` asks for them."""
        if texts is None:
            states: list[Tensor] = []
            if loads_its_weight(self.mgk):  # its positions are there only in a call
                self.mgk(pixel_values, states.append)
            hidden = states[0] if states else self.mgk.hidden(pixel_values)
        else:
            tokens, mask, positions, documents = texts
            encode = partial(self.mgk.hidden, last=None) if self.config.kind == "language" else self.mgk.encoder
            past = None if cache is None else stack_of(cache)
            hidden = encode(tokens, mask, positions, past, documents=documents)
        return BaseModelOutputWithPast(last_hidden_state=hidden, past_key_values=cache)  # type: ignore[arg-type]

    def cache_for(
        self, input_ids: Tensor | None, inputs_embeds: Tensor | None, given: Cache | None, use_cache: bool | None
    ) -> Cache | None:
        """Return the cache of a call, a new one if `use_cache` asks for it."""
        if given is None and not use_cache:
            return None
        if self.config.kind != "language":
            raise ValueError(f"use_cache: expected False for a model of kind {self.config.kind!r}, which has no cache")
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        fresh = partial(self.mgk.new_cache, 0 if tokens is None else len(tokens))
        return MGKCache(fresh()) if given is None else adopt(given, fresh)

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
    _keys_to_ignore_on_load_unexpected = UNEXPECTED

    def _build(self, config: MGKConfig) -> nn.Module:
        return without_head(super()._build(config))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the weights, without those of a head that another class has on the same modules."""
        found = super().state_dict(*args, **kwargs)
        for name in [name for name in found if name.startswith(tuple(f"mgk.{head}." for head in HEADS))]:
            del found[name]
        return found

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "b n"] | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Int[Tensor, "b n"] | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Float[Tensor, "b n e"] | None = None,
        use_cache: bool | None = None,
        pixel_values: Float[Tensor, "b c s s"] | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPoolingAndCrossAttentions:
        """Return `last_hidden_state` (B,N,E) and `pooler_output` (B,E) of tokens, or of images for a vision model.

        The pooled output is the mean over the real tokens, or what a classifier of images reads; packed documents have
        none. A cache is for language models; see `MGKForCausalLM`.
        """
        hooked = self.wants_states(kwargs)
        if self.config.kind == "vision":
            check_options(kwargs)
            if pixel_values is None:
                raise ValueError("pixel_values: expected images for a model of kind 'vision', got None")
            found = self.encode(None, pixel_values, output_hidden_states=hooked, return_dict=True)
            pooled = self.mgk.pooled(found.last_hidden_state)
            return _output(found, pooled)
        cache = self.cache_for(input_ids, inputs_embeds, past_key_values, use_cache)
        start = 0 if cache is None else stack_of(cache).length
        texts = read_texts(
            self, input_ids, inputs_embeds, attention_mask, position_ids, kwargs, start=start, cached=cache is not None
        )
        check_options(kwargs)
        found = self.encode(texts, cache=cache, output_hidden_states=hooked, return_dict=True)
        hidden, mask = found.last_hidden_state, texts.mask
        if texts.documents is not None:
            return _output(found, None)
        mask = None if mask is None else mask[:, -hidden.shape[1] :]
        weight = hidden.new_ones(hidden.shape[:2]) if mask is None else mask.to(hidden.dtype)
        return _output(found, torch.einsum("bn,bne->be", weight, hidden) / weight.sum(1, keepdim=True).clamp(min=1))


def as_transformers_layers(model: nn.Module) -> None:
    """Make the layers of a model of `mgk.models` those of Transformers, and its tied softmax an output layer.

    `recompute` becomes gradient checkpointing.
    """
    for module in model.modules():
        if isinstance(module, Stack):
            for layer in module.layers:
                assert isinstance(layer, Block)
                if type(layer) is Block:
                    layer.__class__ = TransformersBlock
                if module.recompute and isinstance(layer, TransformersBlock):
                    layer.gradient_checkpointing = True
            module.recompute = False
    output = getattr(model, "output", None)
    if type(output) is TiedSoftmax and output.cluster_weight is None and model.lm_head is None:
        as_output_layer(output, model)


def without_head(model: nn.Module) -> nn.Module:
    """Replace the head of a model of `mgk.models` by nothing."""
    for head in HEADS:
        if hasattr(model, head):
            setattr(model, head, nn.Identity())
    return model


def _output(found: Any, pooled: Tensor | None) -> BaseModelOutputWithPoolingAndCrossAttentions:
    return BaseModelOutputWithPoolingAndCrossAttentions(pooler_output=pooled, **found)  # type: ignore[arg-type]


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
