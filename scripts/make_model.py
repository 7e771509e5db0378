#!/usr/bin/env python3
"""Write a random checkpoint of a given size, with a small tokenizer of its own: for tests and benchmarks.

    python3 scripts/make_model.py OUT [--gigabytes 14.4 | --layers N --hidden N --intermediate N]
                                  [--quantize fp8-block] [--mla] [--seed N] [--tied]

A Qwen3 in bfloat16, or with `--quantize fp8-block` the same in block-wise fp8 (e4m3, one scale for 128 × 128 weights),
or with `--mla` a DeepSeek-V2 with multi-head latent attention and dense layers. Made on the GPU where there is one. Two
seeds give checkpoints with equal headers and other bytes. The vocabulary is larger than the tokenizer: compare token
ids, not text.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

HEAD = 128
BLOCK = 128
SHARD_BYTES = 4 * 10**9
TOKENIZER_SIZE = 1000
CONTEXT = 8192
SPREAD = 0.02
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model, in elements."""

    layers: int
    hidden: int
    intermediate: int
    vocabulary: int = 32_000
    tied: bool = False

    @property
    def heads(self) -> int:
        return self.hidden // HEAD

    @property
    def key_value_heads(self) -> int:
        return max(1, self.heads // 4)


SHAPES = {
    0.1: Shape(2, 512, 1536),
    1.5: Shape(12, 2048, 6144),
    3.0: Shape(28, 2048, 6144),
    7.6: Shape(36, 2560, 9728),
    14.4: Shape(36, 4096, 12288),
    28.3: Shape(40, 5120, 17408),
}
"""Gigabytes in bfloat16, roughly → a shape; the larger ones are those of Qwen3 models."""

Tensors = Iterator[tuple[str, torch.Tensor]]


class Draw:
    """Random tensors from one seed, on the GPU where there is one."""

    def __init__(self, seed: int):
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self._generator = torch.Generator(self.device).manual_seed(seed)

    def matrix(self, rows: int, columns: int) -> torch.Tensor:
        """bfloat16, on the device."""
        drawn = torch.randn(rows, columns, generator=self._generator, device=self.device, dtype=torch.bfloat16)
        return drawn.mul_(SPREAD)

    def norm(self, size: int) -> torch.Tensor:
        drawn = torch.randn(size, generator=self._generator, device=self.device)
        return (1 + 0.1 * drawn).to(torch.bfloat16)


def qwen3(shape: Shape, draw: Draw) -> Tensors:
    """Names as in Qwen3's checkpoints."""
    yield "model.embed_tokens.weight", draw.matrix(shape.vocabulary, shape.hidden)
    for layer in range(shape.layers):
        attention = f"model.layers.{layer}.self_attn."
        yield attention + "q_proj.weight", draw.matrix(shape.heads * HEAD, shape.hidden)
        yield attention + "k_proj.weight", draw.matrix(shape.key_value_heads * HEAD, shape.hidden)
        yield attention + "v_proj.weight", draw.matrix(shape.key_value_heads * HEAD, shape.hidden)
        yield attention + "o_proj.weight", draw.matrix(shape.hidden, shape.heads * HEAD)
        yield attention + "q_norm.weight", draw.norm(HEAD)
        yield attention + "k_norm.weight", draw.norm(HEAD)
        yield from rest_of_layer(shape, draw, layer)
    yield from rest_of_model(shape, draw)


def deepseek(shape: Shape, draw: Draw) -> Tensors:
    """Names as in DeepSeek-V2's checkpoints, without experts."""
    yield "model.embed_tokens.weight", draw.matrix(shape.vocabulary, shape.hidden)
    latent, rotary = 512, 64
    for layer in range(shape.layers):
        attention = f"model.layers.{layer}.self_attn."
        yield attention + "q_proj.weight", draw.matrix(shape.heads * (HEAD + rotary), shape.hidden)
        yield attention + "kv_a_proj_with_mqa.weight", draw.matrix(latent + rotary, shape.hidden)
        yield attention + "kv_a_layernorm.weight", draw.norm(latent)
        yield attention + "kv_b_proj.weight", draw.matrix(shape.heads * 2 * HEAD, latent)
        yield attention + "o_proj.weight", draw.matrix(shape.hidden, shape.heads * HEAD)
        yield from rest_of_layer(shape, draw, layer)
    yield from rest_of_model(shape, draw)


def rest_of_layer(shape: Shape, draw: Draw, layer: int) -> Tensors:
    prefix = f"model.layers.{layer}."
    yield prefix + "mlp.gate_proj.weight", draw.matrix(shape.intermediate, shape.hidden)
    yield prefix + "mlp.up_proj.weight", draw.matrix(shape.intermediate, shape.hidden)
    yield prefix + "mlp.down_proj.weight", draw.matrix(shape.hidden, shape.intermediate)
    yield prefix + "input_layernorm.weight", draw.norm(shape.hidden)
    yield prefix + "post_attention_layernorm.weight", draw.norm(shape.hidden)


def rest_of_model(shape: Shape, draw: Draw) -> Tensors:
    yield "model.norm.weight", draw.norm(shape.hidden)
    if not shape.tied:
        yield "lm_head.weight", draw.matrix(shape.vocabulary, shape.hidden)


def in_fp8_blocks(tensors: Tensors) -> Tensors:
    """Linear layers as e4m3 with `weight_scale_inv`; embedding, head and norms stay as they are."""
    for name, tensor in tensors:
        if not name.endswith("_proj.weight"):
            yield name, tensor
            continue
        quantized, scale = quantize(tensor)
        yield name, quantized
        yield name.replace(".weight", ".weight_scale_inv"), scale


def quantize(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 in the shape of `tensor`, [rows, columns], and a float32 factor for each 128 × 128 block of it."""
    rows, columns = tensor.shape
    padded = torch.nn.functional.pad(tensor.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.view(-(-rows // BLOCK), BLOCK, -(-columns // BLOCK), BLOCK)
    scale = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-12) / torch.finfo(FP8).max
    quantized = (blocks / scale[:, None, :, None]).to(FP8).view(padded.shape)[:rows, :columns].contiguous()
    return quantized, scale.contiguous()


def config_of(shape: Shape, mla: bool, quantize_to: str | None) -> dict[str, Any]:
    """config.json."""
    config: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": "bfloat16", "torch_dtype": "bfloat16",
        "hidden_size": shape.hidden, "intermediate_size": shape.intermediate, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.key_value_heads, "head_dim": HEAD,
        "vocab_size": shape.vocabulary, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "tie_word_embeddings": shape.tied, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
        "attention_bias": False,
    }  # fmt: skip
    if mla:
        del config["head_dim"]
        config |= {
            "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "rope_theta": 10_000.0,
            "num_key_value_heads": shape.heads, "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": HEAD,
            "qk_rope_head_dim": 64, "v_head_dim": HEAD, "n_routed_experts": 8, "n_shared_experts": 1,
            "num_experts_per_tok": 2, "first_k_dense_replace": shape.layers, "moe_layer_freq": 1,
            "moe_intermediate_size": shape.intermediate, "topk_method": "greedy", "n_group": 1, "topk_group": 1,
            "norm_topk_prob": False, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "mlp_bias": False,
        }  # fmt: skip
    if quantize_to:
        config["quantization_config"] = {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK],
        }  # fmt: skip
    return config


def write(out: Path, tensors: Tensors, say: Callable[[str], None]) -> int:
    """Write shards and index; the bytes of all tensors."""
    weight_map: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    size = total = count = 0

    def flush() -> None:
        nonlocal shard, size, count
        if shard:
            count += 1
            file = f"model-{count:05d}.safetensors"
            save_file(shard, out / file, metadata={"format": "pt"})
            (out / file).chmod(0o644)
            weight_map.update(dict.fromkeys(shard, file))
            say(f"{file}: {size / 1e9:.2f} GB")
            shard, size = {}, 0

    for name, tensor in tensors:
        shard[name] = tensor.cpu()
        size += tensor.nbytes
        total += tensor.nbytes
        if size > SHARD_BYTES:
            flush()
    flush()
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def write_tokenizer(out: Path) -> None:
    """A byte-level BPE, trained on this file."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_SIZE, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator([Path(__file__).read_text()], trainer)
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
        "model_max_length": CONTEXT,
    }  # fmt: skip
    (out / "tokenizer_config.json").write_text(json.dumps(settings))


def make(
    out: Path, shape: Shape, *, seed: int = 0, quantize_to: str | None = None, mla: bool = False, say=lambda text: None
) -> int:
    """Write a whole checkpoint; the bytes of its tensors. Two seeds give equal headers."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config_of(shape, mla, quantize_to), indent=1))
    write_tokenizer(out)
    tensors = (deepseek if mla else qwen3)(shape, Draw(seed))
    return write(out, in_fp8_blocks(tensors) if quantize_to else tensors, say)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gigabytes", type=float, choices=sorted(SHAPES), default=1.5, help="in bfloat16, roughly")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--intermediate", type=int)
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--quantize", choices=["fp8-block"])
    parser.add_argument("--mla", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    known = SHAPES[arguments.gigabytes]
    shape = Shape(
        arguments.layers or known.layers,
        arguments.hidden or known.hidden,
        arguments.intermediate or known.intermediate,
        tied=arguments.tied,
    )
    begun = time.monotonic()
    total = make(
        arguments.out, shape, seed=arguments.seed, quantize_to=arguments.quantize, mla=arguments.mla, say=print
    )
    print(f"{arguments.out}: {total / 1e9:.2f} GB in {time.monotonic() - begun:.1f} s")


if __name__ == "__main__":
    main()
