"""Tensors that no state depends on: no more than these may be left out."""

import pytest

from draftstates.model.unused import why_unused

TEXT = {"num_hidden_layers": 4, "num_nextn_predict_layers": 2}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("model.layers.0.self_attn.rotary_emb.inv_freq", "rotary cache"),
        ("model.layers.3.self_attn.k_scale", "scale of the KV cache"),
        ("model.layers.3.self_attn.k_proj.k_scale", "scale of the KV cache"),
        ("model.layers.5.mlp.up_proj.weight", "draft layers"),
        ("mtp.layers.0.mlp.up_proj.weight", "draft layers"),
        ("model.visual.blocks.0.attn.qkv.weight", "other modality"),
        ("vision_tower.encoder.layers.0.mlp.fc1.weight", "other modality"),
        ("multi_modal_projector.linear_1.weight", "other modality"),
    ],
)
def test_these_may_be_left_out(name: str, reason: str) -> None:
    assert why_unused(name, text=TEXT, tied=False) == reason


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.3.mlp.up_proj.weight",
        "model.layers.6.mlp.up_proj.weight",
        "model.layers.3.mlp.up_proj.bias",
        "model.layers.3.self_attn.k_proj.weight_scale",
        "model.layers.3.self_attn.k_proj.weight_scale_inv",
        "model.layers.3.self_attn.k_norm.weight",
        "model.layers.3.mlp.gate.e_score_correction_bias",
        "model.language_model.layers.3.mlp.up_proj.weight",
        "model.layers.0.mlp.visual_experts.w1.weight",
        "model.layers.3.audio_gate.weight",
        "transformer.h.1.cross_attn.vit_gate.weight",
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
    ],
)
def test_no_other_tensor_may(name: str) -> None:
    assert why_unused(name, text=TEXT, tied=False) is None


def test_layers_that_the_configuration_does_not_count_are_not_draft_layers() -> None:
    for text in ({"num_hidden_layers": 4}, {"num_hidden_layers": 4, "use_mtp": True}):
        assert why_unused("model.layers.4.mlp.up_proj.weight", text=text, tied=False) is None


@pytest.mark.parametrize("name", ["k_scale", "k_proj.k_scale", "attn.v_scale", "kv_scale"])
def test_a_scale_of_the_kv_cache_may_only_where_the_cache_has_none(name: str) -> None:
    name = f"model.layers.3.self_attn.{name}"
    assert why_unused(name, text=TEXT, tied=False) == "scale of the KV cache"
    assert why_unused(name, text=TEXT, tied=False, scaled_cache=True) is None


def test_a_head_may_only_where_it_is_the_embeddings() -> None:
    assert why_unused("lm_head.weight", text=TEXT, tied=True) == "tied head"
