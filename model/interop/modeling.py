"""Our decoder as a model of transformers. A folder of `to=remote` has this file beside the modules of the decoder.

Written for transformers 5. `AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)` runs it.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from ..cache import KVCache
from ..config import decoder_config
from ..decoder import Decoder


class VariantConfig(PretrainedConfig):
    """`stack` holds the fields of our DecoderConfig; the others are for the tools of transformers."""

    model_type = "attention_variants"

    def __init__(self, stack: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.stack = stack or {}
        cfg = decoder_config(self.stack)
        kwargs.setdefault("tie_word_embeddings", cfg.tie)
        self.vocab_size, self.hidden_size, self.intermediate_size = cfg.vocab_size, cfg.d_model, cfg.d_ff
        self.num_hidden_layers, self.num_attention_heads = cfg.n_layer, cfg.n_head
        self.num_key_value_heads, self.head_dim = cfg.n_kv_head, cfg.head_dim
        self.max_position_embeddings = cfg.context
        super().__init__(**kwargs)


class VariantForCausalLM(PreTrainedModel, GenerationMixin):
    """A Decoder behind transformers' interface: logits, loss, and generation with its DynamicCache."""

    config_class = VariantConfig
    _tied_weights_keys = {"decoder.head.weight": "decoder.embedding.weight"}
    accepts_loss_kwargs = False  # transformers' Trainer: the loss is a mean, to be divided by accumulation steps
    supports_gradient_checkpointing = True

    def __init__(self, config: VariantConfig) -> None:
        config.stack = config.stack | {"tie": config.tie_word_embeddings}  # which users and transformers change
        super().__init__(config)
        self.decoder = Decoder(decoder_config(config.stack))
        if not self.decoder.head.weight.is_meta:  # else from_pretrained loads the weights
            for module in self.modules():
                module._is_hf_initialized = True
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Called for a module of which a checkpoint lacks weights, and for a new, resized embedding or head."""
        name = next((name for name, one in self.named_modules() if one is module), None)
        if name is not None:  # its memory is only reserved
            raise ValueError(f"the checkpoint lacks weights of {name}: leave out tie_word_embeddings, or save it whole")
        nn.init.normal_(module.weight, std=0.02)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.decoder.embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.decoder.embedding = value

    def get_output_embeddings(self) -> nn.Linear:
        return self.decoder.head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.decoder.head = new_embeddings

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        embedding = super().resize_token_embeddings(*args, **kwargs)
        self.decoder.cfg = replace(self.decoder.cfg, vocab_size=embedding.num_embeddings)
        self.config.stack = self.config.stack | {"vocab_size": embedding.num_embeddings}
        return embedding

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: DynamicCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **others: Any,
    ) -> CausalLMOutputWithPast:
        """input_ids (B, T) -> logits (B, T, V), or those of the last `logits_to_keep` tokens.

        attention_mask (B, S): 0 marks padding, S counting the cached tokens. position_ids (B, T): documents begin where these
        start again.
        """
        if input_ids is None or others.get("inputs_embeds") is not None:
            raise ValueError("this model takes input_ids only: give input_ids, and leave out inputs_embeds")
        for name in ("output_attentions", "output_hidden_states"):
            if others.get(name) or getattr(self.config, name, False):
                raise ValueError(f"this model returns neither maps nor hidden states: leave out {name}")
        if past_key_values is None and use_cache and not self.training:
            past_key_values = DynamicCache()
        cache = None if past_key_values is None else _Cache(past_key_values, self.config.num_hidden_layers)
        T, S = input_ids.shape[1], input_ids.shape[1] + (cache.length if cache else 0)
        rows = torch.arange(S - min(logits_to_keep, T), S, device=input_ids.device) if logits_to_keep else None
        keys = self._keys(attention_mask)
        documents = self._documents(input_ids, position_ids, keys, cache is not None)
        logits = self.decoder(input_ids, cache=cache, documents=documents, keys=keys, rows=rows)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten().to(logits.device))
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)

    def _keys(self, attention_mask: Tensor | None) -> Tensor | None:
        """Which keys may be seen, (B, S); None where there is no padding."""
        if attention_mask is None or attention_mask.all():
            return None
        if attention_mask.dim() != 2:
            raise ValueError("this model takes an attention_mask (B, S) of zeros and ones: leave out 4-D masks")
        if self.decoder.positions is not None and not attention_mask[:, 0].all():
            raise ValueError("padding on the left shifts learned positions: give prompts of one length, or one at a time")
        return attention_mask.bool()

    def _documents(self, tokens: Tensor, positions: Tensor | None, keys: Tensor | None, cached: bool) -> Tensor | None:
        """The document of each token (B, T), counted by positions that start again; None where they do not."""
        if positions is None:
            return None
        begins = positions.diff(dim=1) != 1  # (B or 1, T - 1)
        if keys is not None:
            keys = keys[:, -tokens.shape[1] :]
            begins = begins & keys[:, 1:] & keys[:, :-1]
        if not begins.any():
            return None
        if cached or self.decoder.positions is not None:
            raise ValueError("position_ids start again: leave out use_cache; with learned positions, give rows of one document")
        documents = F.pad(begins.cumsum(1), (1, 0)).expand_as(tokens)
        return documents + (tokens == self.decoder.cfg.eot).cumsum(1) if self.decoder.cfg.document_mask else documents


class _Cache(KVCache):
    """A KVCache that keeps everything in transformers' cache. One layer there holds the keys and values of one call."""

    def __init__(self, past: DynamicCache, n_layer: int) -> None:
        if type(past) is not DynamicCache or past.offloading:
            raise ValueError(f"this model cannot use a {type(past).__name__} as its cache: leave out cache_implementation")
        self.past, self.n_layer, self.length = past, n_layer, past.get_seq_length()

    def append(self, k: Tensor, v: Tensor, layer: int, slot: int) -> tuple[Tensor, Tensor]:
        index = slot * (self.n_layer + 1) + layer % (self.n_layer + 1)  # the layer -1 (token ids) comes last
        while len(self.past.layers) <= index:  # transformers makes one cache layer per block
            self.past.layers.append(DynamicLayer())
        return self.past.update(k, v, index)
