"""vLLM 0.33.0 as far as fa3's backend meets it: names, signatures and calls, for where it is not
installed.

`installed()` puts these modules in vLLM's place. What they say was read in vllm-0.33.0's
`v1/attention/backend.py`, `v1/attention/backends/registry.py` and `_custom_ops.py`; where vLLM is
installed a test compares the signatures. `attend_in_pages` and `attend_without_cache` are the calls
of vLLM's own FlashAttention backend (`v1/attention/backends/flash_attn.py`); there a test compares
the names of their arguments.
"""

import contextlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class AttentionType(str, Enum):
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class MultipleOf:
    def __init__(self, base: int):
        self.base = base


class AttentionCGSupport(Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


class AttentionMetadata:
    pass


@dataclass
class CommonAttentionMetadata:
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool | torch.Tensor = True


class AttentionBackend(ABC):
    supported_dtypes = (torch.float16, torch.bfloat16)
    supported_kv_cache_dtypes = ("auto", "float16", "bfloat16")
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        return [MultipleOf(1)]

    @staticmethod
    @abstractmethod
    def get_name(): ...

    @staticmethod
    @abstractmethod
    def get_impl_cls(): ...

    @staticmethod
    @abstractmethod
    def get_builder_cls(): ...

    @classmethod
    def supports_head_size(cls, head_size):
        return True

    @classmethod
    def supports_dtype(cls, dtype):
        return dtype in cls.supported_dtypes

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype):
        return kv_cache_dtype is None or kv_cache_dtype in cls.supported_kv_cache_dtypes

    @classmethod
    def supports_sink(cls):
        return False

    @classmethod
    def supports_sliding_window(cls):
        return False

    @classmethod
    def supports_non_causal(cls):
        return False

    @classmethod
    def supports_compute_capability(cls, capability):
        return True

    @classmethod
    def supported_kv_cache_layouts(cls):
        return None


class AttentionMetadataBuilder(ABC, Generic[T]):
    _cudagraph_support = AttentionCGSupport.NEVER
    supports_update_block_table = False

    @abstractmethod
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec, self.layer_names = kv_cache_spec, layer_names
        self.vllm_config, self.device = vllm_config, device

    @abstractmethod
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False): ...

    def update_block_table(self, metadata, blk_table, slot_mapping):
        raise NotImplementedError

    def build_for_cudagraph_capture(self, common_attn_metadata):
        return self.build(common_prefix_len=0, common_attn_metadata=common_attn_metadata)


class AttentionImpl(ABC, Generic[T]):
    @abstractmethod
    def __init__(
        self,
        num_heads,
        head_size,
        scale,
        num_kv_heads=None,
        alibi_slopes=None,
        sliding_window=None,
        kv_cache_dtype="auto",
        logits_soft_cap=None,
        attn_type=AttentionType.DECODER,
        kv_sharing_target_layer_name=None,
    ): ...

    @abstractmethod
    def forward(
        self,
        layer,
        query,
        key,
        value,
        kv_cache,
        attn_metadata,
        output,
        output_scale=None,
        output_block_scale=None,
    ): ...


class AttentionBackendEnum(Enum):
    CUSTOM = None


REGISTERED: dict[AttentionBackendEnum, str] = {}


def register_backend(backend, class_path=None, is_mamba=False):
    REGISTERED[backend] = class_path
    return lambda cls: cls


def reshape_and_cache_flash(
    key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale
):
    """In torch what vLLM's kernel does: a slot is page * tokens of a page + token, -1 is none."""
    tokens = key_cache.shape[1]
    for row, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            key_cache[slot // tokens, slot % tokens] = key[row]
            value_cache[slot // tokens, slot % tokens] = value[row]


MODULES = {
    "vllm.v1.attention.backend": (
        AttentionBackend, AttentionCGSupport, AttentionImpl, AttentionMetadata,
        AttentionMetadataBuilder, AttentionType, CommonAttentionMetadata, MultipleOf,
    ),
    "vllm.v1.attention.backends.registry": (AttentionBackendEnum, register_backend),
    "vllm._custom_ops": (reshape_and_cache_flash,),
}  # fmt: skip
"""What is where in vLLM."""


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """With these modules in vLLM's place."""
    found: dict[str, ModuleType] = {}
    for name, members in MODULES.items():
        for end in range(1, name.count(".") + 2):
            part = ".".join(name.split(".")[:end])
            module = found.setdefault(part, ModuleType(part))
            module.__path__ = []
            above, _, last = part.rpartition(".")
            if above:
                setattr(found[above], last, module)
        vars(found[name]).update({member.__name__: member for member in members})
    kept = {name: sys.modules.pop(name) for name in [*sys.modules] if name in found}
    sys.modules.update(found)
    try:
        yield
    finally:
        for name in found:
            sys.modules.pop(name, None)
        sys.modules.update(kept)


LAYER = SimpleNamespace(_k_scale=torch.ones(()), _v_scale=torch.ones(()))
"""A layer of the model, as far as implementations look at it."""

OF_OTHER_VERSIONS = {
    "fa_version": 3, "dynamic_causal": None, "mask_mod": None, "aux_tensors": None,
}  # fmt: skip
"""What vLLM's function has to choose among FlashAttention's versions, and for FlashAttention-4."""


def attend_in_pages(
    function: Callable, impl: SimpleNamespace, step: SimpleNamespace, **besides: object
) -> object:
    """The call of `FlashAttentionImpl.forward`, argument by argument, but for `OF_OTHER_VERSIONS`.

    vLLM gives k_descale and v_descale whatever the cache's dtype is; only FP8 caches need them, and
    they are None here.

    Args:
        function: what is called.
        impl: the layer.
        step: tensors and metadata, by the names of vLLM's local variables.
        besides: arguments that vLLM does not give.
    """
    return function(
        q=step.query[: step.num_actual_tokens],
        k=step.key_cache,
        v=step.value_cache,
        out=step.output[: step.num_actual_tokens],
        cu_seqlens_q=step.cu_seqlens_q,
        max_seqlen_q=step.max_seqlen_q,
        seqused_k=step.seqused_k,
        max_seqlen_k=step.max_seqlen_k,
        softmax_scale=impl.scale,
        causal=step.causal,
        alibi_slopes=impl.alibi_slopes,
        window_size=list(impl.sliding_window),
        block_table=step.block_table,
        softcap=impl.logits_soft_cap,
        scheduler_metadata=step.scheduler_metadata,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        num_splits=step.max_num_splits,
        s_aux=impl.sinks,
        **besides,
    )


def attend_without_cache(
    function: Callable, impl: SimpleNamespace, step: SimpleNamespace
) -> object:
    """The call of `FlashAttentionImpl._forward_encoder_attention`, with the same left out."""
    return function(
        q=step.query,
        k=step.key,
        v=step.value,
        out=step.output,
        cu_seqlens_q=step.cu_seqlens_q,
        cu_seqlens_k=step.cu_seqlens_q,
        max_seqlen_q=step.max_seqlen_q,
        max_seqlen_k=step.max_seqlen_q,
        softmax_scale=impl.scale,
        causal=False,
        alibi_slopes=impl.alibi_slopes,
        window_size=list(impl.sliding_window),
        softcap=impl.logits_soft_cap,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        num_splits=0,
        s_aux=impl.sinks,
    )
