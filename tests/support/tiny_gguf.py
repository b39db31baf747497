"""A tiny Llama as a GGUF file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gguf

from tests.support.tiny_models import CHATML_TEMPLATE, SPECIAL_TOKENS, byte_alphabet, tiny_model

if TYPE_CHECKING:
    from pathlib import Path

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_tiny_gguf(path: Path, *, seed: int = 0) -> None:
    """Write a random Llama with the byte-level tokenizer and the ChatML template."""
    model, _ = tiny_model("llama", seed=seed, vocab_size=262)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(3)
    writer.add_context_length(2048)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(262)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*byte_alphabet(), *SPECIAL_TOKENS, "th", "in"])
    writer.add_token_types([1] * 256 + [3] * len(SPECIAL_TOKENS) + [1, 1])
    writer.add_token_merges(["t h", "i n"])  # transformers 5.0 reads a list of one as no list
    writer.add_unk_token_id(256)
    writer.add_bos_token_id(258)
    writer.add_eos_token_id(259)
    writer.add_chat_template(CHATML_TEMPLATE)
    for name, tensor in model.state_dict().items():
        writer.add_tensor(_gguf_name(name), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name: str) -> str:
    fixed = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in fixed:
        return fixed[name]
    _, _, layer, *rest = name.split(".")
    return f"blk.{layer}.{_NAMES['.'.join(rest[:-1])]}.weight"
