"""Names and kinds of known families are followed; any other is refused with the reason."""

from pathlib import Path

import pytest
import torch

from draftstates.errors import UserError
from draftstates.model import family
from draftstates.model.family import LogitForm

ORIGIN = Path("m/config.json")


@pytest.mark.parametrize(
    ("names", "name"),
    [
        (family.HEAD_NAMES, "lm_head.weight"),
        (family.HEAD_NAMES, "language_model.lm_head.weight"),
        (family.EMBEDDING_NAMES, "model.embed_tokens.weight"),
        (family.EMBEDDING_NAMES, "model.language_model.embed_tokens.weight"),
        (family.FINAL_NORM_NAMES, "model.norm.weight"),
        (family.FINAL_NORM_NAMES, "model.language_model.norm.weight"),
        (family.FINAL_NORM_NAMES, "language_model.model.norm.weight"),
        (family.FINAL_NORM_NAMES, "model.embedding_norm.weight"),
        (family.FINAL_NORM_NAMES, "backbone.norm_f.weight"),
        (family.FINAL_NORM_NAMES, "transformer.ln_f.weight"),
        (family.FINAL_NORM_BIASES, "model.final_layernorm.bias"),
        (family.HEAD_NAMES, "language_model.output.weight"),
        (family.EMBEDDING_NAMES, "transformer.wte.weight"),
        (family.EMBEDDING_NAMES, "language_model.model.tok_embeddings.weight"),
    ],
)
def test_tensors_of_plain_and_wrapped_models_are_known(names: object, name: str) -> None:
    assert names.fullmatch(name)


@pytest.mark.parametrize(
    ("names", "name"),
    [
        (family.HEAD_NAMES, "lm_head.weight_scale"),
        (family.EMBEDDING_NAMES, "model.layers.61.embed_tokens.weight"),
        (family.FINAL_NORM_NAMES, "model.layers.0.norm.weight"),
        (family.FINAL_NORM_NAMES, "vision_tower.model.norm.weight"),
        (family.HEAD_NAMES, "model.layers.0.attention.output.weight"),
        (family.EMBEDDING_NAMES, "vision_model.embeddings.weight"),
    ],
)
def test_tensors_of_other_parts_are_not_taken_for_them(names: object, name: str) -> None:
    assert not names.fullmatch(name)


@pytest.mark.parametrize(
    "config",
    [
        {"hidden_size": 8},
        {"text_config": {"hidden_size": 8}},
        {"llm_config": {"hidden_size": 8}, "hidden_size": 4},
        {"language_config": {"hidden_size": 8}},
        {"thinker_config": {"text_config": {"hidden_size": 8}}},
    ],
)
def test_the_language_models_part_of_a_configuration_is_found(config: dict) -> None:
    assert family.text_config(config) == {"hidden_size": 8}


def test_values_under_other_names_are_found_and_usual_names_win() -> None:
    gpt2 = family.with_usual_names({"n_layer": 12, "n_embd": 768})
    assert (gpt2["num_hidden_layers"], gpt2["hidden_size"]) == (12, 768)
    hybrid = family.with_usual_names({"layers_block_type": ["mamba", "mlp"], "hidden_size": 8})
    assert (hybrid["num_hidden_layers"], hybrid["hidden_size"]) == (2, 8)
    usual = {"num_hidden_layers": 3, "num_layers": 9}
    assert family.with_usual_names(usual) == usual


def test_the_final_norms_formula_is_the_familys() -> None:
    llama = family.final_norm({"model_type": "llama", "rms_norm_eps": 1e-5}, origin=ORIGIN)
    assert (llama.kind, llama.eps) == (family.RMS, 1e-5)
    gemma = family.final_norm({"model_type": "gemma2", "rms_norm_eps": 1e-6}, origin=ORIGIN)
    assert (gemma.kind, gemma.eps) == (family.RMS_PLUS_ONE, 1e-6)
    cohere = family.final_norm({"model_type": "cohere", "layer_norm_eps": 1e-4}, origin=ORIGIN)
    assert (cohere.kind, cohere.eps) == (family.LAYER, 1e-4)


def test_a_norm_that_is_not_known_is_refused() -> None:
    with pytest.raises(UserError, match=r"m/config.json: the final norm of model_type 'of-others'"):
        family.final_norm({"model_type": "of-others", "rms_norm_eps": 1e-5}, origin=ORIGIN)
    with pytest.raises(UserError, match=r"m/config.json: expected rms_norm_eps"):
        family.final_norm({"model_type": "llama"}, origin=ORIGIN)


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ({}, LogitForm()),
        ({"logit_scale": 0.0625}, LogitForm(scale=0.0625)),
        ({"logits_scaling": 8.0}, LogitForm(scale=0.125)),
        ({"lm_head_multiplier": 0.5}, LogitForm(scale=0.5)),
        ({"final_logit_softcapping": 30.0}, LogitForm(cap=30.0)),
        ({"output_soft_cap_temp": 20.0, "output_multiplier": 0.5}, LogitForm(scale=0.5, cap=20.0)),
        ({"use_mup": True, "output_mult": 2.0, "mup_scale_factor": 8.0}, LogitForm(scale=0.25)),
        ({"final_logit_softcapping": None, "logit_scale": None}, LogitForm()),
    ],
)
def test_scales_and_caps_of_logits_are_read(text: dict, form: LogitForm) -> None:
    assert family.logits(text) == form


def test_a_logits_product_and_slope_are_those_of_its_form() -> None:
    form = LogitForm(scale=0.5, cap=30.0)
    product = torch.tensor([-80.0, -1.0, 0.0, 3.0, 60.0], dtype=torch.float64)
    logits = form(product)
    torch.testing.assert_close(logits, 30 * torch.tanh(product * 0.5 / 30))
    torch.testing.assert_close(form.product(logits), product)
    step = 1e-6
    torch.testing.assert_close(
        form.slope(logits), (form(product + step) - form(product - step)) / (2 * step)
    )


@pytest.mark.parametrize(
    ("text", "scale"),
    [
        ({"model_type": "llama"}, 1.0),
        ({"model_type": "gemma2", "hidden_size": 64}, 8.0),
        ({"model_type": "granite", "embedding_multiplier": 12.0}, 12.0),
        ({"model_type": "minicpm", "scale_emb": 12}, 12.0),
        ({"model_type": "afmoe", "mup_enabled": True, "hidden_size": 64}, 8.0),
        ({"model_type": "afmoe", "mup_enabled": False, "hidden_size": 64}, 1.0),
        ({"model_type": "phi3small", "mup_embedding_multiplier": 10.0}, 10.0),
        ({"model_type": "phi3small", "mup_embedding_multiplier": -1.0}, 1.0),
        ({"model_type": "llama", "use_mup": True, "input_mult": 3.0}, 3.0),
        ({"model_type": "gpt2"}, None),
        ({"model_type": "muse_spark_text"}, None),
    ],
)
def test_the_embeddings_scale_is_the_familys(text: dict, scale: float | None) -> None:
    assert family.embedding_scale(text) == scale


def test_a_mup_scale_before_the_head_is_read() -> None:
    assert family.final_scale({"hidden_size": 2304, "dim_model_base": 256}) == 256 / 2304
    assert family.final_scale({"hidden_size": 2304}) == 1.0
    assert family.final_scale({"logits_mup_width_multiplier": 4.0}) == 0.25


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "deepseek_v4", "hc_mult": 4}, "hyper-connections"),
        ({"model_type": "x", "text_config": {"altup_num_inputs": 4}}, "AltUp"),
        ({"model_type": "iquestloopcoder", "loop_num": 2}, "run several times"),
        ({"model_type": "kimi_k3"}, "attend to the states of earlier layers"),
        ({"architectures": ["Grok1ForCausalLM"]}, "fused across layers"),
        ({"model_type": "x", "mhc": True}, "hyper-connections"),
        ({"model_type": "x", "num_loops": 2}, "run several times"),
        ({"model_type": "sdar"}, "diffusion"),
        ({"model_type": "olmo3"}, "reads no rope_theta"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "an encoder and a decoder"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "no head"),
        ({"architectures": ["LlamaForCausalLM", "Qwen2ForRewardModel"]}, "no head"),
        ({"model_type": "qwen3", "architectures": ["Qwen3Model"]}, "no head"),
        ({"model_type": "gemma3_text", "architectures": ["EmbeddingGemmaModel"]}, "no head"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "sees later tokens"),
        ({"model_type": "qwen2", "is_causal": False}, "sees later tokens"),
        ({"architectures": ["DiffusionGemmaForBlockDiffusion"]}, "diffusion"),
        ({"model_type": "x", "text_config": {"model_type": "diffusion_gemma_text"}}, "diffusion"),
        ({"model_type": "llada", "architectures": ["LLaDAModelLM"]}, "diffusion"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "a drafter"),
        ({"architectures": ["DeepseekV3ForCausalLMNextN"]}, "a drafter"),
        ({"architectures": ["DFlashDraftModel"]}, "no head|a drafter"),
        ({"model_type": "nanbeige"}, "run several times"),
        ({"model_type": "phi"}, "bias of its head"),
        ({"model_type": "phimoe"}, "bias of its head"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rotary angles at every length"),
        ({"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}, "rotary angles"),
        ({"model_type": "qwen4_exp", "text_config": {"hc_count": 4}}, "hyper-connections"),
    ],
)
def test_what_no_tap_can_read_is_refused_from_the_configuration(config: dict, reason: str) -> None:
    with pytest.raises(UserError, match=rf"m/config.json: .* cannot be captured: .*{reason}"):
        family.check_capturable(config, origin=ORIGIN)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hc_mult": 1},
        {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
        {"model_type": "internvl_chat", "architectures": ["InternVLChatModel"]},
        {"model_type": "chatglm", "architectures": ["ChatGLMModel"]},
        {"model_type": "gemma4", "text_config": {"use_bidirectional_attention": "vision"}},
        {"model_type": "nanbeige", "num_loops": 1},
        {"rope_scaling": {"type": "dynamic", "factor": 1.0}},
        {"rope_scaling": {"type": "dynamic", "alpha": 1000.0}},
    ],
)
def test_an_ordinary_model_is_not_refused(config: dict) -> None:
    family.check_capturable(config, origin=ORIGIN)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ({"layer_types": ["full_attention", "linear_attention"]}, "the kind linear_attention"),
        ({"layer_types": ["conv", "full_attention"]}, "the kind conv"),
        ({"layers_block_type": ["mamba", "attention"]}, "the kind mamba"),
        ({"hybrid_override_pattern": "M-M*"}, "hybrid_override_pattern"),
        ({"full_attention_interval": 4}, "full_attention_interval"),
        ({"mamba_d_ssm": 64}, "mamba_d_ssm"),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_hybrid_model_whose_prefixes_cannot_be_reused_is_refused(
    text: dict, found: str, wrapped: bool
) -> None:
    text = {"model_type": "hybrid", **text}
    config = {"model_type": "wrapper", "text_config": text} if wrapped else text
    with pytest.raises(UserError, match=rf"hybrid has .*{found}.*reuse_prefixes: false"):
        family.check_reusable(config, origin=ORIGIN)


@pytest.mark.parametrize(
    "layers", [[], ["full_attention", "sliding_attention"], ["chunked_attention"]]
)
def test_a_model_of_attention_layers_can_reuse_prefixes(layers: list[str]) -> None:
    family.check_reusable({"model_type": "qwen3", "layer_types": layers}, origin=ORIGIN)
