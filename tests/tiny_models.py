"""Tiny random targets as model folders: what the engines, the tokenizer and the target's files need, and nothing to download."""

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

FAMILIES = ("llama", "qwen3", "gemma3")
VOCABULARY = 320  # every row of the embedding is a token
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|reserved_0|>", "<|reserved_1|>")
LAYERS, HIDDEN, WINDOW = 8, 128, 16
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXT = [
    "What is the capital of France? The capital of France is Paris.",
    "assistant user system model\n\nPlease reason step by step. The answer is 42.\n",
    "def add(a, b):\n    return a + b\n\nfor number in range(10):\n    print(number)\n",
]


def write_tiny_model(folder: Path, family: str, *, seed: int = 0, tied: bool = True, dtype: torch.dtype = torch.float32) -> Path:
    """Write a random causal language model of that family and return its folder.

    Args:
        folder: created; holds config, safetensors, byte-level BPE tokenizer with a ChatML template, and generation config afterwards.
        family: llama, qwen3, or gemma3 (text only; three layers in four see `WINDOW` tokens back).
        seed: of the weights.
        tied: whether the LM head is the embedding.
        dtype: of the stored weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stop = _write_tokenizer(folder)
    torch.manual_seed(seed)
    model = _model(family, tied, stop)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # else a norm that is left out, or Gemma's 1 + w, would not show
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
        # transformers leaves the pad token's row at zero; a state of norm zero has no relative error.
        model.get_input_embeddings().weight[stop - 2].normal_(std=0.1)
        # A longer row makes this token's logit swing widest, so that sampled answers end by themselves after some tokens.
        model.get_output_embeddings().weight[stop] *= 3
    model.generation_config = GenerationConfig(eos_token_id=stop, pad_token_id=stop - 2)
    model.to(dtype).save_pretrained(str(folder))
    return folder


def _model(family: str, tied: bool, stop: int) -> PreTrainedModel:
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 192,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,  # vLLM's CPU attention knows few sizes
        "max_position_embeddings": 1024,
        "initializer_range": 0.1,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": stop,
        "pad_token_id": stop - 2,
    }
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**shape))
    if family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**shape))
    if family == "gemma3":
        kinds = ["full_attention" if layer % 4 == 2 else "sliding_attention" for layer in range(LAYERS)]
        return Gemma3ForCausalLM(Gemma3TextConfig(**shape, query_pre_attn_scalar=64, sliding_window=WINDOW, layer_types=kinds))
    raise ValueError(f"no tiny model of family {family!r}; there are {', '.join(FAMILIES)}")


def _write_tokenizer(folder: Path) -> int:
    """Returns the id of the token that ends a turn."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    size, alphabet = VOCABULARY - len(SPECIAL), sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(_TEXT, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    assert tokenizer.get_vocab_size() == VOCABULARY
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(CHATML)
    return tokenizer.token_to_id("<|im_end|>")
