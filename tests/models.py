"""Small checkpoints with a real tokenizer, written for tests. Random weights; the seed makes them other weights.

python tests/models.py OUT [--tied] [--seed N] [--layers N] [--hidden N]
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 1024
HEAD = 32


def write(out: Path, *, tied: bool = False, seed: int = 0, layers: int = 2, hidden: int = 128, shards: int = 2) -> Path:
    """Write a Qwen3 checkpoint of some hundred KiB, bf16, in `shards` files with an index."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = _tensors(torch.Generator().manual_seed(seed), tied, layers, hidden)
    names = sorted(tensors)
    parts = [names[start::shards] for start in range(shards)]
    weight_map = {}
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05d}-of-{shards:05d}.safetensors"
        save_file({name: tensors[name] for name in part}, out / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    (out / "config.json").write_text(json.dumps(_config(tied, layers, hidden)))
    _write_tokenizer(out)
    for file in out.iterdir():
        file.chmod(0o644)
    return out


def _config(tied: bool, layers: int, hidden: int) -> dict:
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": "bfloat16", "hidden_act": "silu",
        "hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers, "head_dim": HEAD,
        "num_attention_heads": hidden // HEAD, "num_key_value_heads": max(1, hidden // HEAD // 2),
        "vocab_size": VOCABULARY, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "tie_word_embeddings": tied, "attention_bias": False, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
    }  # fmt: skip


def _tensors(generator: torch.Generator, tied: bool, layers: int, hidden: int) -> dict[str, torch.Tensor]:
    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * 0.2).to(torch.bfloat16)

    def norm(size: int) -> torch.Tensor:
        return (1 + 0.1 * torch.randn(size, generator=generator)).to(torch.bfloat16)

    key_values = max(1, hidden // HEAD // 2) * HEAD
    tensors = {"model.embed_tokens.weight": matrix(VOCABULARY, hidden), "model.norm.weight": norm(hidden)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        tensors |= {
            prefix + "input_layernorm.weight": norm(hidden),
            prefix + "post_attention_layernorm.weight": norm(hidden),
            prefix + "self_attn.q_proj.weight": matrix(hidden, hidden),
            prefix + "self_attn.k_proj.weight": matrix(key_values, hidden),
            prefix + "self_attn.v_proj.weight": matrix(key_values, hidden),
            prefix + "self_attn.o_proj.weight": matrix(hidden, hidden),
            prefix + "self_attn.q_norm.weight": norm(HEAD),
            prefix + "self_attn.k_norm.weight": norm(HEAD),
            prefix + "mlp.gate_proj.weight": matrix(2 * hidden, hidden),
            prefix + "mlp.up_proj.weight": matrix(2 * hidden, hidden),
            prefix + "mlp.down_proj.weight": matrix(hidden, 2 * hidden),
        }
    if not tied:
        tensors["lm_head.weight"] = matrix(VOCABULARY, hidden)
    return tensors


def _write_tokenizer(out: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([Path(__file__).read_text()], trainer)
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
        "model_max_length": 512,
    }  # fmt: skip
    (out / "tokenizer_config.json").write_text(json.dumps(settings))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=128)
    arguments = parser.parse_args()
    write(arguments.out, tied=arguments.tied, seed=arguments.seed, layers=arguments.layers, hidden=arguments.hidden)
