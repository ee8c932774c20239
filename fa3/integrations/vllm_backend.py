"""fa3 as an attention backend of vLLM, on its paged caches.

vLLM packs the queries of all requests of a step into one tensor, and keeps keys and values in
pages. First each layer's `do_kv_cache_update` writes the new ones there; then `forward` is one call
of `flash_attn_varlen_func`, whatever the requests are: those that decode have one query each. What
all layers share, lengths and page tables, they take from vLLM's own description of a step. No
length is read by the host.

The interface is as in vLLM 0.32 and 0.33, where a layer's cache is (pages, heads, tokens of a
page, 2 * head_size): each token's key, then its value.
"""

from copy import copy
from typing import Any

import torch
from vllm import _custom_ops
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)

from fa3.calls.attention import flash_attn_varlen_func
from fa3.problem import FP8_UNIT, HEAD_DIM_UNIT, MAX_HEAD_DIM, NO_BOUND

if not hasattr(AttentionBackend, "supported_kv_cache_layouts"):
    raise ImportError("fa3's backend needs vLLM 0.32 or newer, whose caches have another layout")

PAGE_UNIT = 16
"""Tokens of a page come in multiples of this, so that few TMA copies fetch a block of keys."""

FP8_CACHES = "fp8", "fp8_e4m3"
"""What vLLM calls caches in e4m3. Their tensors have the dtype uint8."""


class Fa3Backend(AttentionBackend):
    """What vLLM asks before it chooses: which layers fa3 can serve."""

    supported_dtypes = [torch.float16, torch.bfloat16]  # noqa: RUF012
    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16", *FP8_CACHES]  # noqa: RUF012
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type["Fa3Attention"]:
        return Fa3Attention

    @staticmethod
    def get_builder_cls() -> type["MetadataBuilder"]:
        return MetadataBuilder

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec=None) -> list[MultipleOf]:
        return [MultipleOf(PAGE_UNIT)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % HEAD_DIM_UNIT == 0 and 0 < head_size <= MAX_HEAD_DIM

    @classmethod
    def supports_compute_capability(cls, capability) -> bool:
        return (capability.major, capability.minor) == (9, 0)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True


class MetadataBuilder(AttentionMetadataBuilder[CommonAttentionMetadata]):
    """Hands vLLM's description of a step to all layers as it is."""

    # Not checked on a GPU. vLLM's graphs of what lies between attentions are not concerned.
    _cudagraph_support = AttentionCGSupport.NEVER
    supports_update_block_table = True

    # vLLM's is abstract.
    def __init__(self, kv_cache_spec, layer_names: list[str], vllm_config, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CommonAttentionMetadata:
        if not isinstance(common_attn_metadata.causal, bool):
            raise NotImplementedError("fa3's backend takes one causal for all requests")
        return common_attn_metadata

    def update_block_table(
        self, metadata: CommonAttentionMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> CommonAttentionMetadata:
        # Where new tokens go, vLLM tells `do_kv_cache_update` itself.
        step = copy(metadata)
        step.block_table_tensor = blk_table
        return step


class Fa3Attention(AttentionImpl[CommonAttentionMetadata]):
    """The attention of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"fa3's backend serves decoders only, got {attn_type}")
        if not Fa3Backend.supports_kv_cache_dtype(kv_cache_dtype):
            raise NotImplementedError(f"fa3's backend has no caches of {kv_cache_dtype}")
        if kv_cache_dtype in FP8_CACHES and head_size % FP8_UNIT:
            raise NotImplementedError(
                f"FP8 caches need head sizes that are multiples of {FP8_UNIT}, got {head_size}"
            )
        self.num_heads, self.head_size = num_heads, head_size
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.scale = float(scale)
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        # vLLM's window counts a query's own key.
        self.window_left = NO_BOUND if sliding_window is None else sliding_window - 1
        self.softcap = float(logits_soft_cap or 0.0)
        self.alibi_slopes = None
        if alibi_slopes is not None:
            self.alibi_slopes = torch.tensor(alibi_slopes, dtype=torch.float32)
        self.sinks = sinks

    def caches(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values, (pages, page size, heads, columns)."""
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        return keys, values

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write new keys and values, (tokens, heads, columns), to their places in the cache."""
        _custom_ops.reshape_and_cache_flash(
            key,
            value,
            *self.caches(kv_cache),
            slot_mapping,
            self.kv_cache_dtype,
            layer._k_scale,
            layer._v_scale,
        )

    def forward(
        self,
        layer: Any,  # with the scales of an FP8 cache
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CommonAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend from each request's queries to all its tokens in the cache.

        Args:
            query, output: (tokens, heads, head_size), with padding after the actual tokens; the
                output's is left as it is.
            key, value: what the cache has already.
            attn_metadata: None when vLLM only tries how much memory it needs.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("fa3's backend does not quantise its output")
        if attn_metadata is None:
            return output.fill_(0)
        step = attn_metadata
        if self.alibi_slopes is not None and self.alibi_slopes.device != query.device:
            self.alibi_slopes = self.alibi_slopes.to(query.device)
        k_descale = v_descale = None
        if self.kv_cache_dtype in FP8_CACHES:
            kv_cache = kv_cache.view(torch.float8_e4m3fn)
            shape = step.seq_lens.shape[0], self.num_kv_heads
            k_descale = layer._k_scale.expand(shape)
            v_descale = layer._v_scale.expand(shape)
        keys, values = self.caches(kv_cache)
        flash_attn_varlen_func(
            query[: step.num_actual_tokens],
            with_aligned_heads(keys),
            with_aligned_heads(values),
            step.query_start_loc,
            None,  # pages have no ends
            step.max_query_len,
            step.max_seq_len,
            seqused_k=step.seq_lens,
            k_descale=k_descale,
            v_descale=v_descale,
            softmax_scale=self.scale,
            causal=step.causal,
            # Without causality a window has two sides.
            window_size=(self.window_left, 0 if step.causal else self.window_left),
            softcap=self.softcap,
            alibi_slopes=self.alibi_slopes,
            sinks=self.sinks,
            page_table=step.block_table_tensor,
            out=output[: step.num_actual_tokens],
        )
        return output


def with_aligned_heads(cache: torch.Tensor) -> torch.Tensor:
    """The same cache with a stride of heads that TMA takes."""
    heads, columns = cache.shape[2:]
    if heads > 1:
        return cache
    page, token, _, column = cache.stride()
    return cache.as_strided(cache.shape, (page, token, columns, column))
