"""Chat templates: from messages to the token ids that a target is served with.

The text of a message is text. Where somebody types `<|im_end|>` into a question, the tokenizer would turn it into the control token
that ends the turn; here it stays characters. For this, typed control tokens are cut in two before the template is rendered, the
rendered prompt is tokenized piece by piece, and neither piece spells the token. Prompts without typed control tokens are tokenized
whole, exactly as the serving engine does.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from corpus.conversation import Message
from corpus.errors import CorpusError, TemplateRefused

# Some templates print today's date into the system prompt. A fixed day keeps prompts, and with them resume and masks, reproducible.
_FIXED_DAY = datetime.datetime(2025, 1, 1)
_PRIVATE_USE = range(0xE000, 0xF8FF)


class ChatTemplate:
    """The chat template, tokenizer and stop ids of one target, read from its folder.

    Attributes:
        folder: where the tokenizer lies.
        source: text of the Jinja template.
        stop_ids: token ids that end an answer, ascending: those of generation_config.json and config.json, the tokenizer's
            end-of-sequence token, and the token that the template itself writes after an answer.
        hash: over the template's text and the tokenizer's files; what decides `prompt_ids`.
    """

    def __init__(self, folder: str | Path, chat_template: str | None = None) -> None:
        """Load the tokenizer.

        Args:
            folder: a local folder with tokenizer files; nothing is downloaded.
            chat_template: template text to use in place of the folder's, for base models that bring none.

        Raises:
            CorpusError: missing folder, unreadable tokenizer, no chat template, or no way to know where an answer ends.
        """
        self.folder = Path(folder)
        self._tokenizer = _load_tokenizer(self.folder)
        if chat_template is not None:
            self._tokenizer.chat_template = chat_template
        source = self._tokenizer.chat_template
        if isinstance(source, dict):
            source = source.get("default")
            self._tokenizer.chat_template = source
        if not source:
            raise CorpusError(
                f"the tokenizer in {self.folder} has no chat template (base models usually have none). "
                f"Use an instruction-tuned target, or give the text of a template as chat_template."
            )
        self.source: str = source
        self._special = {token.content for token in self._tokenizer.added_tokens_decoder.values() if token.special}
        # Tokens such as <think> or <tool_call> are often not flagged as special, yet the template uses them to steer the model.
        markers = {t.content for t in self._tokenizer.added_tokens_decoder.values() if t.content.strip() and t.content in source}
        self._asked = _token_pattern(self._special | markers)
        self._answered = _token_pattern(self._special)
        self.stop_ids = self._find_stop_ids()
        self.hash = self._digest()

    # -- messages to ids

    def prompt_ids(self, messages: Sequence[Message], enable_thinking: bool = False, tools: Sequence[str] = ()) -> list[int]:
        """Token ids of the prompt that asks for the next answer: all messages, then the template's opening of an assistant turn.

        Args:
            messages: the conversation so far, the last one not the assistant's.
            enable_thinking: for templates that know it (Qwen3): whether the model may think first. Others ignore it.
            tools: function definitions as JSON.

        Raises:
            TemplateRefused: the template raised, for instance on a system message that it does not know.
        """
        return self._encode(self._render(messages, enable_thinking, tools, generation_prompt=True))

    def conversation_ids(self, messages: Sequence[Message], enable_thinking: bool = False, tools: Sequence[str] = ()) -> list[int]:
        """Token ids of a whole conversation that ends with an answer, without opening another turn."""
        return self._encode(self._render(messages, enable_thinking, tools, generation_prompt=False))

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """How many tokens each text has by itself, without any markup of the template."""
        return [len(ids) for ids in self._tokenizer(list(texts), add_special_tokens=False)["input_ids"]] if texts else []

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, control tokens included."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def answer_text(self, answer_ids: Sequence[int]) -> str:
        """Text of a generated answer without the stop tokens at its end: what the next turn's prompt holds."""
        end = len(answer_ids)
        while end and int(answer_ids[end - 1]) in self.stop_ids:
            end -= 1
        return self.decode([int(i) for i in answer_ids[:end]])

    def vocabulary(self) -> dict[str, int]:
        """Token -> id, added tokens included."""
        return dict(self._tokenizer.get_vocab())

    @property
    def control_ids(self) -> frozenset[int]:
        """Ids of the special tokens."""
        return frozenset(i for i, token in self._tokenizer.added_tokens_decoder.items() if token.special)

    def _render(self, messages: Sequence[Message], enable_thinking: bool, tools: Sequence[str], generation_prompt: bool) -> list[str]:
        """The rendered text, cut inside every control token that a message spells out."""
        if not messages:
            raise TemplateRefused("no_turns", "there is no message to render")
        rows = [message.for_template() for message in messages]
        definitions = [json.loads(tool) for tool in tools]
        cut = _unused_character(rows, definitions)
        rows = [{key: value if key == "role" else self._cut(value, cut, row["role"]) for key, value in row.items()} for row in rows]
        try:
            text = self._tokenizer.apply_chat_template(
                rows,
                tools=self._cut(definitions, cut, "system") or None,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                enable_thinking=enable_thinking,
                strftime_now=_FIXED_DAY.strftime,
                date_string=_FIXED_DAY.strftime("%d %b %Y"),
            )
        except Exception as error:  # a template raises whatever its author thought fit, jinja2's errors among them
            raise TemplateRefused("template_refused", f"the chat template of {self.folder} raised: {error}") from error
        return text.split(cut)

    def _encode(self, pieces: list[str]) -> list[int]:
        return [i for piece in pieces for i in self._tokenizer.encode(piece, add_special_tokens=False)]

    def _cut(self, value: Any, mark: str, role: str) -> Any:
        """Put `mark` after the first character of every control token in every text inside `value`."""
        if isinstance(value, str):
            # An assistant's own <think> and <tool_call> are what it generated; only tokens that end or open turns are cut there.
            return _cut_text(value, mark, self._answered if role == "assistant" else self._asked)
        if isinstance(value, list):
            return [self._cut(item, mark, role) for item in value]
        if isinstance(value, dict):
            return {key: self._cut(item, mark, role) for key, item in value.items()}
        return value

    # -- what is fixed for a target

    def _find_stop_ids(self) -> tuple[int, ...]:
        found: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            found.update(_eos_of(self.folder / name))
        if self._tokenizer.eos_token_id is not None:
            found.add(self._tokenizer.eos_token_id)
        end = self._turn_end()
        if end is not None:
            found.add(end)
        if not found:
            raise CorpusError(
                f"nothing in {self.folder} says where an answer ends: no eos_token_id in generation_config.json, config.json or the "
                f"tokenizer, and the chat template writes no special token after an answer. Set eos_token_id in generation_config.json."
            )
        return tuple(sorted(found))

    def _turn_end(self) -> int | None:
        """The special token that the template writes right after an answer, None where it writes none."""
        answer = "An answer to find."
        try:
            text = "".join(self._render([Message("user", "A question."), Message("assistant", answer)], False, (), generation_prompt=False))
        except TemplateRefused:
            return None
        if self._answered is None or answer not in text:
            return None
        match = self._answered.match(text[text.rindex(answer) + len(answer) :].lstrip())
        return self._tokenizer.convert_tokens_to_ids(match.group()) if match else None

    def _digest(self) -> str:
        digest = hashlib.sha256(self.source.encode())
        names = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json")
        for path in (self.folder / name for name in names):
            if path.is_file():
                digest.update(path.name.encode() + b"\0" + path.read_bytes())
        return digest.hexdigest()[:32]


def _load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer  # takes seconds to import, and rows can be read without it

    if not folder.is_dir():
        raise CorpusError(f"no tokenizer folder {folder}. Give the folder of the target, the one that holds tokenizer.json.")
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise CorpusError(
            f"cannot load a tokenizer from {folder}: {lines[0]} Check that the folder holds a target's tokenizer files."
        ) from error


def _eos_of(path: Path) -> set[int]:
    """`eos_token_id` of a JSON config: a number, a list, or absent; multimodal configs keep it under text_config."""
    if not path.is_file():
        return set()
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CorpusError(f"{path} is not JSON: {error}. Copy the target's folder again.") from error
    value = config.get("eos_token_id", config.get("text_config", {}).get("eos_token_id"))
    ids = value if isinstance(value, list) else [value]
    return {int(i) for i in ids if i is not None}


def _token_pattern(tokens: set[str]) -> re.Pattern[str] | None:
    """Matches any of the tokens, the longest where one starts like another."""
    if not tokens:
        return None
    return re.compile("|".join(re.escape(t) for t in sorted(tokens, key=lambda t: (-len(t), t))))


def _cut_text(text: str, mark: str, pattern: re.Pattern[str] | None) -> str:
    pieces: list[str] = []
    while pattern is not None and (match := pattern.search(text)):
        if len(match.group()) == 1:
            raise TemplateRefused("control_character", f"the text holds {match.group()!r}, a control token of one character")
        at = match.start() + 1
        pieces.append(text[:at])
        text = text[at:]  # the rest is searched again: cutting one token could uncover another
    return mark.join([*pieces, text])


def _unused_character(*values: Any) -> str:
    """A private-use character that occurs in none of the texts."""
    used = set(json.dumps(values, ensure_ascii=False))
    return next(chr(code) for code in _PRIVATE_USE if chr(code) not in used)
