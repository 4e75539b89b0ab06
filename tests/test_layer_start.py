"""A parallel drafter whose layers start as the target's own last ones."""

import copy
from pathlib import Path

import pytest
import torch
from tiny_models import LAYERS, write_tiny_model
from transformers import AutoModelForCausalLM

from actors.drafter import build_drafter
from actors.layer_start import start_layers
from drafters.config import config_from_target
from drafters.errors import DrafterError
from drafters.norm import rms_norm
from storage.target_files import read_model_config


def drafter_of(folder: Path, **options):
    config = config_from_target(read_model_config(folder), 3, mask_token_id=5, **{"num_layers": 2, "head_rank": 4, **options})
    return build_drafter(str(folder), config, "float64")


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_without_context_the_layers_compute_what_the_targets_do(tmp_path: Path, family: str):
    """One slot that sees nothing but itself is a text of one token for the target's last two layers."""
    folder = write_tiny_model(tmp_path / family, family)
    drafter = drafter_of(folder, block_length=1)
    start_layers(drafter, str(folder))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    tail = copy.deepcopy(model)
    tail.model.layers = tail.model.layers[LAYERS - 2 :]
    with torch.no_grad():
        expected = tail.model(input_ids=torch.tensor([[7]]), use_cache=False).last_hidden_state[0, 0]
        cache = drafter.new_cache(1, 1)
        h = drafter.block_hidden(cache, torch.tensor([7]), torch.tensor([0]))[0, 0]
    # The drafter's final norm is its own, ones; put the target's in its place.
    drafter.backbone.norm.weight.data.copy_(drafter.target_head.norm_weight())
    with torch.no_grad():
        again = drafter.block_hidden(cache, torch.tensor([7]), torch.tensor([0]))[0, 0]
    # transformers works its norms out in float32, whatever the model's type.
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(again, expected, **close)
    one = torch.ones(())
    torch.testing.assert_close(rms_norm(expected, one, 0.0), rms_norm(h * model.model.norm.weight, one, 0.0), **close)


def test_layers_with_other_parts_are_refused_and_nothing_is_copied(tmp_path: Path):
    gemma, llama = (write_tiny_model(tmp_path / family, family) for family in ("gemma3", "llama"))
    for drafter, folder, words in (
        (drafter_of(gemma), gemma, "the target has post_feedforward_layernorm.weight"),
        (drafter_of(llama, qk_norm=True), llama, "the drafter has self_attn.k_norm.weight"),
        (drafter_of(llama, intermediate_size=64), llama, r"mlp.down_proj.weight is \[128, 192\] in the target, \[128, 64\]"),
        (drafter_of(llama, algorithm="eagle3", num_layers=1, head_rank=0), llama, "a chain's layer"),
    ):
        before = {name: tensor.clone() for name, tensor in drafter.trainable_state().items()}
        with pytest.raises(DrafterError, match=words):
            start_layers(drafter, str(folder))
        assert all(torch.equal(tensor, before[name]) for name, tensor in drafter.trainable_state().items())
