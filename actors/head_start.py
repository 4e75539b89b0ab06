"""What the target says after each single token: where a drafter's sequential head may start, instead of at random."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from corpus.conversation import Message
from corpus.template import ChatTemplate
from drafters.drafter import Drafter

_BATCH = 1024


def start_head(drafter: Drafter, model: str, device: torch.device) -> None:
    """Give the drafter's head the target's own next-token logits, to its rank. Costs one forward pass of V tokens.

    Raises:
        DrafterError: this kind of head has no such start.
    """
    if drafter.head is None:
        return
    lm_head = drafter.target_head.lm_head.float() * drafter.target_head.family.logit_multiplier
    hidden = kept_states.of(model, lm_head.shape[0], device)
    drafter.head.start_from(hidden, lm_head, frequency_of(hidden, lm_head))


class KeptStates:
    """`next_hidden`, remembered where asked: the trials of a sweep that share a process all want the same."""

    def __init__(self) -> None:
        self.keep = False
        self._last: tuple[tuple[str, int], Tensor] | None = None

    def of(self, model: str, vocabulary: int, device: torch.device) -> Tensor:
        key = (model, vocabulary)
        if self._last is not None and self._last[0] == key:
            return self._last[1].to(device)
        found = next_hidden(model, vocabulary, device)
        if self.keep:
            self._last = (key, found.cpu())
        return found


kept_states = KeptStates()


@torch.inference_mode()
def next_hidden(model: str, vocabulary: int, device: torch.device) -> Tensor:
    """[V, H] float32: the normed last hidden state after `opening of an assistant turn + token`, for every token.

    Without an opening the token would stand first in the text, where transformers park attention and predict nothing sensible.
    """
    from transformers import AutoModelForCausalLM, DynamicCache

    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    decoder = loaded.to(device).eval().get_decoder()
    opening = torch.tensor([opening_ids(ChatTemplate(Path(model)))], device=device)
    states = []
    for tokens in torch.arange(vocabulary, device=device).split(_BATCH):
        cache = DynamicCache(config=loaded.config)
        decoder(input_ids=opening, past_key_values=cache, use_cache=True)
        cache.batch_repeat_interleave(len(tokens))
        states.append(decoder(input_ids=tokens[:, None], past_key_values=cache, use_cache=True).last_hidden_state[:, -1].float())
    return torch.cat(states)


def frequency_of(hidden: Tensor, lm_head: Tensor, sample: int = 512) -> Tensor:
    """[V] about how often the target says each token: the mean of its predictions after an even sample of tokens, uniform mixed in."""
    some = hidden[:: max(len(hidden) // sample, 1)]
    return (some @ lm_head.T).softmax(1).mean(0) + 0.1 / len(lm_head)


def opening_ids(template: ChatTemplate) -> list[int]:
    """Token ids that open an assistant turn; where the template's cannot be told apart, a stop token, which ends whatever was before."""
    question = [Message("user", "Hello")]
    asked, opened = template.conversation_ids(question), template.prompt_ids(question)
    return opened[len(asked) :] if opened[: len(asked)] == asked and len(opened) > len(asked) else [template.stop_ids[0]]
