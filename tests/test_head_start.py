"""A sequential head that starts as the target's own logits after each single token."""

from pathlib import Path

import pytest
import torch
from tiny_models import write_tiny_model
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from actors.drafter import build_drafter
from actors.head_start import frequency_of, next_hidden, opening_ids, start_head
from corpus.template import ChatTemplate
from drafters.config import config_from_target
from drafters.errors import DrafterError
from drafters.heads import low_rank_logits
from storage.target_files import read_model_config


def test_low_rank_logits_are_as_good_as_the_best_of_the_whole_matrix():
    torch.manual_seed(0)
    hidden, lm_head, weights = torch.randn(30, 8).double(), torch.randn(50, 8).double(), torch.rand(30).double() + 0.1
    logits = hidden @ lm_head.T
    logits = logits - logits.mean(1, keepdim=True)
    for rank in (1, 3, 8):
        A, B = low_rank_logits(hidden, lm_head, rank, weights)
        assert A.shape == (30, rank)
        assert B.shape == (rank, 50)
        error = (weights.sqrt()[:, None] * (A @ B - logits)).norm()
        # Eckart-Young on the weighted matrix itself.
        best = torch.linalg.svdvals(weights.sqrt()[:, None] * logits)[rank:].norm()
        assert_close(error, best, atol=1e-8, rtol=1e-6)
        assert_close(A.std(), B.std())


def test_rank_above_the_hidden_size_is_refused():
    with pytest.raises(DrafterError, match="exceeds the hidden size"):
        low_rank_logits(torch.randn(9, 4), torch.randn(9, 4), 5, torch.ones(9))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "llama", "llama")


def test_next_hidden_is_the_targets_after_the_opening_and_one_token(tiny: Path):
    opening = opening_ids(ChatTemplate(tiny))
    assert ChatTemplate(tiny).decode(opening) == "<|im_start|>assistant\n"
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16)
    states = next_hidden(str(tiny), 320, torch.device("cpu"))
    for token in (0, 7, 319):
        with torch.no_grad():
            naive = model.get_decoder()(input_ids=torch.tensor([[*opening, token]])).last_hidden_state[0, -1]
        assert_close(states[token], naive.float(), atol=0.1, rtol=0.05)


@torch.no_grad()
def test_a_head_of_full_rank_starts_as_the_targets_distribution(tiny: Path):
    config = config_from_target(read_model_config(tiny), 3, mask_token_id=5, num_layers=1, head_rank=128)
    drafter = build_drafter(str(tiny), config, "float32")
    start_head(drafter, str(tiny), torch.device("cpu"))
    assert drafter.head is not None
    tokens = torch.arange(320)
    bias = drafter.head.bias(drafter.head.latent(torch.zeros(320, 1, 128), tokens[:, None])[:, 0])
    states = next_hidden(str(tiny), 320, torch.device("cpu"))
    assert_close(bias.softmax(-1), (states @ drafter.target_head.lm_head.T).softmax(-1), atol=1e-4, rtol=1e-3)


def test_frequency_is_positive_and_follows_the_target():
    torch.manual_seed(0)
    hidden, lm_head = torch.randn(64, 8), torch.randn(64, 8)
    frequency = frequency_of(hidden, lm_head, sample=64)
    assert bool((frequency > 0).all())
    assert_close(frequency - 0.1 / 64, (hidden @ lm_head.T).softmax(1).mean(0))


def test_heads_that_are_not_linear_in_the_previous_token_refuse(tiny: Path):
    config = config_from_target(read_model_config(tiny), 3, mask_token_id=5, num_layers=1, head="rnn", head_rank=16)
    with pytest.raises(DrafterError, match="head_start=random"):
        start_head(build_drafter(str(tiny), config, "float32"), str(tiny), torch.device("cpu"))
