"""Make a tiny chat model with random weights: for the demo and the tests, without any download.

The same arguments give the same bytes on every machine: the weights come from a seeded generator, the tokenizer is
trained on a fixed text. Needs only numpy, tokenizers and safetensors, so it runs in any engine's environment. What the
model says is nonsense, but it says it deterministically, which is what comparing outputs needs.

    python examples/make_model.py build/tiny-model --arch qwen3
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
VOCABULARY_TOKENS = 1000  # at most: the training text is short
VOCABULARY_MULTIPLE = 64
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
WEIGHT_SCALE = 0.15  # wide enough that greedy decoding seldom meets near-ties

TRAINING_TEXT = (
    "The quick brown fox jumps over the lazy dog. Large language models keep a key value cache. "
    "You are a helpful assistant. user system assistant tool question answer context document "
    "0 1 2 3 4 5 6 7 8 9 abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ"
)

CHAT_TEMPLATE = (
    "{%- if tools -%}{{ '<|im_start|>tools\n' + (tools | tojson) + '<|im_end|>\n' }}{%- endif -%}"
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{%- if message['content'] is string -%}{{ message['content'] }}"
    "{%- elif message['content'] -%}"
    "{%- for part in message['content'] -%}{%- if part['type'] == 'text' -%}{{ part['text'] }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- endif -%}"
    "{{ '<|im_end|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)


@dataclass(frozen=True)
class Shape:
    """Of the network. One token's KV takes 2 * layers * kv_heads * (hidden / heads) * 4 bytes in float32."""

    arch: str = "qwen2"
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    positions: int = 8192
    seed: int = 0

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def intermediate(self) -> int:
        return 2 * self.hidden


def make_model(folder: Path, shape: Shape = Shape()) -> None:
    """Write config, tokenizer and weights into `folder`, which is made if it isn't there."""
    if shape.arch not in ARCHITECTURES:
        raise ValueError(f"arch must be one of {', '.join(ARCHITECTURES)}, not {shape.arch!r}")
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(shape))
    vocabulary = -(-tokenizer.get_vocab_size() // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    ends = {"eos_token_id": tokenizer.token_to_id(TURN_END), "pad_token_id": tokenizer.token_to_id(END_OF_TEXT)}
    _write_json(folder / "config.json", {**_config(shape, vocabulary), **ends})
    _write_json(folder / "generation_config.json", {**ends, "do_sample": False})
    save_file(_weights(shape, vocabulary), folder / "model.safetensors", metadata={"format": "pt"})


def _tokenizer() -> Tokenizer:
    words = TRAINING_TEXT.split()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_TOKENS,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(words[start:] + words[:start]) for start in range(len(words))], trainer)
    return tokenizer


def _tokenizer_config(shape: Shape) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [TURN_START],
        "model_max_length": shape.positions,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def _config(shape: Shape, vocabulary: int) -> dict[str, Any]:
    own: dict[str, dict[str, Any]] = {
        "qwen2": {"use_sliding_window": False, "max_window_layers": shape.layers},
        "qwen3": {"use_sliding_window": False, "attention_bias": False, "head_dim": shape.head_dim},
        "llama": {"attention_bias": False, "mlp_bias": False, "head_dim": shape.head_dim},
    }
    return {
        "architectures": [ARCHITECTURES[shape.arch]],
        "model_type": shape.arch,
        "vocab_size": vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": shape.positions,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "torch_dtype": "float32",
        **own[shape.arch],
    }


def _weights(shape: Shape, vocabulary: int) -> dict[str, np.ndarray[Any, Any]]:
    generator = np.random.Generator(np.random.PCG64(shape.seed))

    def random(*size: int) -> np.ndarray[Any, Any]:
        tensor: np.ndarray[Any, Any] = generator.standard_normal(size, dtype=np.float32) * np.float32(WEIGHT_SCALE)
        return tensor

    hidden, queries, keys = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    tensors = {
        "model.embed_tokens.weight": random(vocabulary, hidden),
        "model.norm.weight": np.ones(hidden, np.float32),
        "lm_head.weight": random(vocabulary, hidden),
    }
    for layer in range(shape.layers):
        tensors |= {
            f"model.layers.{layer}.{name}": tensor
            for name, tensor in {
                "input_layernorm.weight": np.ones(hidden, np.float32),
                "post_attention_layernorm.weight": np.ones(hidden, np.float32),
                "self_attn.q_proj.weight": random(queries, hidden),
                "self_attn.k_proj.weight": random(keys, hidden),
                "self_attn.v_proj.weight": random(keys, hidden),
                "self_attn.o_proj.weight": random(hidden, queries),
                "mlp.gate_proj.weight": random(shape.intermediate, hidden),
                "mlp.up_proj.weight": random(shape.intermediate, hidden),
                "mlp.down_proj.weight": random(hidden, shape.intermediate),
            }.items()
        }
        if shape.arch == "qwen2":
            for name, size in (("q", queries), ("k", keys), ("v", keys)):
                tensors[f"model.layers.{layer}.self_attn.{name}_proj.bias"] = random(size)
        if shape.arch == "qwen3":
            for name in ("q_norm", "k_norm"):
                tensors[f"model.layers.{layer}.self_attn.{name}.weight"] = np.ones(shape.head_dim, np.float32)
    return tensors


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def main() -> None:
    default = Shape()
    parser = argparse.ArgumentParser(description="Make a tiny chat model with random weights.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arch", choices=ARCHITECTURES, default=default.arch)
    for name in ("layers", "hidden", "heads", "kv_heads", "positions", "seed"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(default, name))
    arguments = vars(parser.parse_args())
    folder = arguments.pop("folder")
    make_model(folder, Shape(**arguments))
    sys.stdout.write(f"{folder}: {arguments['arch']}\n")


if __name__ == "__main__":
    main()
