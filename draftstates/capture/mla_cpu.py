"""Attention of DeepSeek-type models on the CPU platform.

SGLang's native attention reads k and v back from the latent pool, which holds neither. A prefill
without a prefix passes k and v in, so attention can be computed on them directly.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

TARGET = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend.forward_extend"


def register() -> None:
    """Hook the native attention backend on a machine without a GPU."""
    if torch.cuda.is_available():
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(TARGET, _forward_extend, HookType.AROUND)


def _forward_extend(
    original: object,
    self: object,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: object,
    forward_batch: object,
    save_kv_cache: bool = True,
    **kwargs: object,
) -> torch.Tensor:
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    latent = isinstance(self.token_to_kv_pool, MLATokenToKVPool)
    if not latent or save_kv_cache or sum(forward_batch.extend_prefix_lens_cpu) != 0:
        return original(self, q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
    q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
    k = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim)
    v = v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
    out = q.new_empty((q.shape[0], layer.tp_q_head_num, layer.v_head_dim))
    start = 0
    for length in forward_batch.extend_seq_lens_cpu:
        rows = slice(start, start + length)
        heads = [t[rows].movedim(0, 1)[None] for t in (q, k, v)]
        out[rows] = scaled_dot_product_attention(*heads, is_causal=True, scale=layer.scaling)[
            0
        ].movedim(1, 0)
        start += length
    return out.view(q.shape[0], -1)
