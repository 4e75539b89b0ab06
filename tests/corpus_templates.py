"""Small chat templates in the manner of real targets, over a tiny byte-level tokenizer, for the corpus tests.

They are written for these tests; each keeps the trait of its family that masks and prompts have to get right.
"""

from __future__ import annotations

import functools
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hypothesis import HealthCheck, settings
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from corpus.template import ChatTemplate

# Property tests run beside others on a busy machine: how long one example takes says nothing.
relaxed = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])

# Each turn fenced, a default system message: SmolLM2's trait.
SMOLLM2 = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful test.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Thinking only in the last answer; an empty thought in the prompt switches it off; tools and tool results.
QWEN3 = """{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}Tools: {% for t in tools %}{{ t | tojson }}{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}{%- set ns = namespace(last=0) %}{%- for m in messages %}{% if m.role == 'user' %}
{%- set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{%- if m.role == 'user' %}<|im_start|>user
{{ m.content }}<|im_end|>
{% elif m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% elif m.role == 'assistant' %}{%- set thought = m.reasoning_content or '' %}{%- set said = m.content %}
{%- if not thought and '</think>' in said %}{% set thought = said.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set said = said.split('</think>')[-1].lstrip('\\n') %}{% endif %}<|im_start|>assistant
{% if loop.index0 > ns.last and (loop.last or thought) %}<think>
{{ thought }}
</think>

{% endif %}{{ said }}{% for c in m.tool_calls or [] %}{% if said %}
{% endif %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""
# A begin token, headers, trimmed contents, today's date in the system turn.
LLAMA3 = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nToday is {{ strftime_now('%d %B %Y') }}\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% set messages = messages[1:] %}{% endif %}<|eot_id|>"
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# The assistant is called model, there is no system role and roles must alternate.
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """A template with the tokens it uses; `eos` is the tokenizer's end of sequence, `config_eos` that of generation_config.json."""

    template: str
    special: tuple[str, ...]
    eos: str
    markers: tuple[str, ...] = ()
    bos: str | None = None
    config_eos: tuple[str, ...] = ()


FAMILIES = {
    "chatml": Family(CHATML, ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), "<|im_end|>"),
    "smollm2": Family(SMOLLM2, ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), "<|im_end|>"),
    "qwen3": Family(
        QWEN3,
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        "<|im_end|>",
        ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
        config_eos=("<|im_end|>", "<|endoftext|>"),
    ),
    "llama3": Family(
        LLAMA3,
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|end_of_text|>",
        bos="<|begin_of_text|>",
    ),
    "gemma": Family(GEMMA, ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"), "<eos>", bos="<bos>"),
}

_TEXT = [
    "What is the capital of France? The capital of France is Paris.",
    "assistant user system model\n\nPlease reason step by step. The answer is 42.\n",
    "def add(a, b):\n    return a + b\n",
]


def save_target(folder: Path, family: Family, chat_template: str | None = None) -> Path:
    """Write the tokenizer files of a target of that family; the vocabulary is bytes plus a few merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(_TEXT, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False))
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in family.special])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in family.markers])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": family.eos, "clean_up_tokenization_spaces": False}
    if family.bos:
        config["bos_token"] = family.bos
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    template = family.template if chat_template is None else chat_template
    if template:
        (folder / "chat_template.jinja").write_text(template)
    if family.config_eos:
        ids = [tokenizer.token_to_id(t) for t in family.config_eos]
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return folder


@functools.cache
def target(name: str) -> ChatTemplate:
    """The chat template of a family, loaded once a session."""
    with tempfile.TemporaryDirectory() as folder:
        return ChatTemplate(save_target(Path(folder) / name, FAMILIES[name]))
