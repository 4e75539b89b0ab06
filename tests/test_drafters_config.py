import json

import pytest
import torch
from drafters_cases import H, V, tiny_config, tiny_drafter, tiny_head

from drafters import (
    Drafter,
    DrafterConfig,
    DrafterError,
    LossWeights,
    TargetFamily,
    TargetHead,
    config_from_target,
    default_loss_weights,
    family_of,
)

SMOLLM = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
    "vocab_size": 49152,
    "hidden_act": "silu",
}
GEMMA = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}},
        "vocab_size": 262144,
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": None,
    },
}


def test_every_mistake_is_listed_at_once():
    with pytest.raises(DrafterError) as error:
        tiny_config(
            head="lstm", num_heads=3, head_dim=5, mask_token_id=V, num_layers=0, window=0, rope_theta=-1.0, activation="relu", qk_norm=1
        )
    for name in ("lstm", "num_kv_heads", "head_dim 5", "mask_token_id", "num_layers", "window", "rope_theta", "relu", "qk_norm"):
        assert name in str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"head": "none", "head_rank": 4, "confidence_markov": False}, "head_rank"),
        ({"head": "rnn", "head_rank": 0}, "head_rank"),
        ({"confidence": False}, "confidence_markov"),
        ({"algorithm": "dflash"}, "dflash"),
        ({"layout": "zlab"}, "zlab"),
        ({"layout": "chain"}, "chain"),
        ({"draft_vocabulary": (1, 2)}, "draft vocabulary belongs to eagle3"),
        ({"block_length": True}, "block_length"),
    ],
)
def test_combinations_that_mean_nothing_are_refused(changes, words):
    values = {**tiny_config().to_dict(), **changes}
    with pytest.raises(DrafterError, match=words):
        DrafterConfig(**values)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_layers": 2}, "eagle3 has num_layers 1, not 2"),
        ({"head": "markov", "head_rank": 3}, "eagle3 has neither"),
        ({"layout": "dspark"}, "layout 'dspark' does not belong to eagle3, which has chain"),
        ({"draft_vocabulary": (3, 2)}, "ascending"),
        ({"draft_vocabulary": (3, V)}, "ascending"),
        ({"draft_vocabulary": ()}, "not empty"),
        ({"algorithm": "mtp1"}, "mtp1 has block_length 1, not 4; mtp1 reads one state a position, captured_layers is 3"),
    ],
)
def test_chains_that_mean_nothing_are_refused(changes, words):
    values = {**tiny_config("none", layout="chain").to_dict(), **changes}
    with pytest.raises(DrafterError, match=words):
        DrafterConfig(**values)


def test_dictionary_form_is_strict_and_round_trips():
    config = tiny_config("rnn", window=9)
    for one in (config, tiny_config("none", layout="chain", draft_vocabulary=(1, 4, V - 1))):
        assert DrafterConfig.from_dict(json.loads(json.dumps(one.to_dict()))) == one
    values = config.to_dict()
    del values["head"]
    with pytest.raises(DrafterError, match=r"unknown key 'colour'.*missing key 'head'"):
        DrafterConfig.from_dict({**values, "colour": 1})


def test_config_from_a_llama_target():
    config = config_from_target(SMOLLM, 5, mask_token_id=17, num_layers=2)
    assert (config.head_dim, config.rope_theta, config.head, config.head_rank, config.qk_norm) == (64, 100000.0, "markov", 256, False)
    assert config.confidence_markov
    assert config.block_length == 7
    with pytest.raises(DrafterError, match="mask_token_id"):
        config_from_target(SMOLLM, 5)
    dflash = config_from_target(SMOLLM, 5, mask_token_id=17, algorithm="dflash", layout="zlab")
    assert (dflash.head, dflash.head_rank, dflash.confidence, dflash.input_slots) == ("none", 0, False, 8)
    assert default_loss_weights(dflash) == LossWeights(ce=1.0, tv=0.0, confidence=0.0)
    eagle3 = config_from_target(SMOLLM, 5, mask_token_id=17, algorithm="eagle3")
    assert (eagle3.layout, eagle3.num_layers, eagle3.block_length, eagle3.captured_layers, eagle3.head) == ("chain", 1, 7, 5, "none")
    assert default_loss_weights(eagle3) == LossWeights(ce=0.0, tv=0.0, confidence=0.0, soft_ce=1.0)
    mtp1 = config_from_target(SMOLLM, 5, mask_token_id=17, algorithm="mtp1")
    assert (mtp1.layout, mtp1.num_layers, mtp1.block_length, mtp1.captured_layers, mtp1.confidence) == ("chain", 1, 1, 1, False)
    assert default_loss_weights(mtp1) == LossWeights(ce=1.0, tv=0.0, confidence=0.0)


def test_gemma_family_is_data():
    config = config_from_target(GEMMA, 4, mask_token_id=4)
    assert (config.rope_theta, config.activation, config.qk_norm, config.vocab_size) == (1e6, "gelu_tanh", True, 262144)
    family = family_of(GEMMA)
    assert family.norm_plus_one
    assert family.embedding_scale == pytest.approx(640**0.5)
    assert family_of({"model_type": "gemma4_text", "hidden_size": 9, "final_logit_softcapping": 30.0}).logit_softcap == 30.0
    assert not family_of({"model_type": "gemma4", "text_config": {"hidden_size": 9}}).norm_plus_one
    with pytest.raises(DrafterError, match="mystery"):
        family_of({"model_type": "mystery"})


def test_target_head_refuses_to_be_random():
    head = TargetHead(V, H, 1e-5, TargetFamily())
    assert torch.isnan(head.embedding).all()
    with pytest.raises(DrafterError, match="no weights yet"):
        head.logits(torch.zeros(1, H))
    with pytest.raises(DrafterError, match="no weights yet"):
        Drafter(tiny_config(), head)
    broken = torch.randn(V, H)
    broken[3, 3] = float("nan")
    with pytest.raises(DrafterError, match=r"embedding holds.*lm_head has shape"):
        head.load(broken, torch.ones(H), torch.randn(V + 1, H))
    assert not head.state_dict()


def test_target_head_shares_a_tied_tensor_and_applies_the_family():
    rows, weight = torch.randn(V, H), torch.randn(H)
    family = TargetFamily(norm_plus_one=True, embedding_scale=3.0, logit_softcap=5.0, logit_multiplier=0.5)
    head = TargetHead(V, H, 1e-6, family).load(rows, weight, rows)
    assert head.embedding.data_ptr() == head.lm_head.data_ptr()
    states = torch.randn(2, 3, H)
    normed = states / (states.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + weight)
    torch.testing.assert_close(head.logits(states), 5 * torch.tanh(normed @ rows.t() * 0.5 / 5))
    torch.testing.assert_close(head.embed(torch.tensor([1, 2])), rows[1:3] * 3)


def test_drafter_refuses_another_targets_head_and_weights():
    with pytest.raises(DrafterError, match="vocab_size"):
        Drafter(tiny_config(), tiny_head(vocab=V + 8))
    drafter = tiny_drafter()
    state = drafter.trainable_state()
    state.pop("head.W2")
    state["head.W3"] = torch.zeros(1)
    state["backbone.fc.weight"] = torch.zeros(2, 2)
    with pytest.raises(DrafterError, match=r"missing head.W2.*unexpected head.W3.*backbone.fc.weight has shape"):
        drafter.load_trainable(state)


def test_trainable_state_is_all_that_is_saved_and_restores_exactly():
    drafter, other = tiny_drafter(tiny_config("gated")), tiny_drafter(tiny_config("gated"))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    state = drafter.trainable_state()
    assert set(state) == set(drafter.state_dict()) == {name for name, _ in drafter.named_parameters()}
    assert not any("target_head" in name for name in state)
    other.load_trainable(state)
    for name, value in other.trainable_state().items():
        assert torch.equal(value, state[name])


def test_norms_start_with_ones_whatever_the_targets_are():
    drafter = Drafter(tiny_config(), tiny_head(family=TargetFamily(norm_plus_one=True)))
    for name, parameter in drafter.named_parameters():
        if "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
