"""The configurations of the models that `prepare` and `run.py serve` know by name, for random
weights: sizes as published.

DeepSeek-V3 and GLM-5 have one dense layer in place of three, so that a few layers include experts.
`deepseek-v3-tp8` is the share of one of eight tensor-parallel ranks. `qwen3-30b-a3b-mxfp4` has
experts in MXFP4 and everything else in bfloat16, in the format of compressed-tensors.
"""

from typing import Any

Config = dict[str, Any]
"""The content of a `config.json`."""


def config(architecture: str, unquantised: tuple[str, ...] = (), **sizes: Any) -> Config:
    """Return the configuration of a model with FP8 weights and a scale for each block."""
    return {
        "architectures": [architecture],
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", *unquantised],
        },
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        **sizes,
    }


def deepseek(architecture: str = "DeepseekV3ForCausalLM", **changed: Any) -> Config:
    """Return DeepSeek-V3's configuration with other values."""
    values: Config = dict(
        model_type="deepseek_v3",
        vocab_size=129280,
        max_position_embeddings=163840,
        num_hidden_layers=61,
        first_k_dense_replace=1,
        num_nextn_predict_layers=0,
        hidden_size=7168,
        intermediate_size=18432,
        # Attention.
        attention_bias=False,
        num_attention_heads=128,
        num_key_value_heads=128,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        rope_scaling=None,
        rope_theta=10000,
        # Experts.
        n_routed_experts=256,
        n_shared_experts=1,
        moe_intermediate_size=2048,
        moe_layer_freq=1,
        num_experts_per_tok=8,
        n_group=8,
        topk_group=4,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        bos_token_id=0,
        eos_token_id=1,
    )
    return config(architecture, **values | changed)


def glm5() -> Config:
    values = deepseek(
        "GlmMoeDsaForCausalLM",
        model_type="glm_moe_dsa",
        vocab_size=154880,
        max_position_embeddings=202752,
        num_hidden_layers=78,
        hidden_size=6144,
        intermediate_size=12288,
        num_attention_heads=64,
        num_key_value_heads=64,
        q_lora_rank=2048,
        qk_nope_head_dim=192,
        v_head_dim=256,
        index_head_dim=128,
        index_n_heads=32,
        index_topk=2048,
        rope_parameters={"rope_theta": 1000000, "rope_type": "default"},
        n_group=1,
        topk_group=1,
        rms_norm_eps=1e-5,
    )
    del values["rope_scaling"], values["rope_theta"]  # they are in rope_parameters
    return values


def qwen3(layers: int, **sizes: Any) -> Config:
    """Return a configuration of Qwen3. vLLM quantises its routers unless they are named."""
    return config(
        "Qwen3MoeForCausalLM",
        tuple(f"model.layers.{layer}.mlp.gate" for layer in range(layers)),
        model_type="qwen3_moe",
        vocab_size=151936,
        max_position_embeddings=40960,
        num_hidden_layers=layers,
        max_window_layers=layers,
        attention_bias=False,
        head_dim=128,
        num_key_value_heads=4,
        sliding_window=None,
        use_sliding_window=False,
        rope_scaling=None,
        rope_theta=1000000.0,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        output_router_logits=False,
        router_aux_loss_coef=0.001,
        bos_token_id=151643,
        eos_token_id=151645,
        **sizes,
    )


MXFP4: Config = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "float",
                "strategy": "group",
                "group_size": 32,
                "symmetric": True,
                "dynamic": False,
            },
            "input_activations": {
                "num_bits": 8,
                "type": "float",
                "strategy": "token",
                "symmetric": True,
                "dynamic": True,
            },
        }
    },
}
"""MXFP4 weights with tokens in FP8."""
QWEN3_30B = qwen3(
    48,
    hidden_size=2048,
    intermediate_size=6144,
    moe_intermediate_size=768,
    num_attention_heads=32,
)
MODELS: dict[str, Config] = {
    "deepseek-v3": deepseek(),
    "deepseek-v3-tp8": deepseek(
        vocab_size=16160,
        intermediate_size=2304,
        moe_intermediate_size=256,
        num_attention_heads=16,
        num_key_value_heads=16,
    ),
    "glm-5": glm5(),
    "kimi-k2": deepseek(
        vocab_size=163840,
        max_position_embeddings=131072,
        num_attention_heads=64,
        num_key_value_heads=64,
        rope_theta=50000.0,
        n_routed_experts=384,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=2.827,
    ),
    "minimax-m2": config(
        "MiniMaxM2ForCausalLM",
        model_type="minimax_m2",
        vocab_size=200064,
        max_position_embeddings=196608,
        num_hidden_layers=62,
        num_mtp_modules=0,
        hidden_size=3072,
        intermediate_size=1536,
        head_dim=128,
        num_attention_heads=48,
        num_key_value_heads=8,
        qk_norm_type="per_layer",
        use_qk_norm=True,
        rope_theta=5000000,
        rotary_dim=64,
        num_local_experts=256,
        num_experts_per_tok=8,
        shared_intermediate_size=0,
        scoring_func="sigmoid",
        use_routing_bias=True,
        output_router_logits=False,
        bos_token_id=200034,
        eos_token_id=200020,
    ),
    "qwen3-235b-a22b": qwen3(
        94,
        hidden_size=4096,
        intermediate_size=12288,
        moe_intermediate_size=1536,
        num_attention_heads=64,
    ),
    "qwen3-30b-a3b": QWEN3_30B,
    "qwen3-30b-a3b-mxfp4": QWEN3_30B | {"quantization_config": MXFP4},
}
