"""Checkpoints in DeepSpec's format give the same block logits as a plain reading of that format, one slot and one head at a time."""

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

from decoding.loop import speculative_decode
from decoding.settings import SamplingSettings
from decoding.target import TransformersTarget
from drafters.config import DrafterConfig
from drafters.drafter import Drafter
from drafters.errors import DrafterError
from drafters.family import TargetFamily, family_of
from drafters.released import from_deepspec, is_deepspec
from drafters.target_head import TargetHead

HIDDEN, VOCAB, HEADS, MASK = 16, 23, 4, 22
QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "rope_scaling": None,
    "vocab_size": VOCAB,
    "hidden_act": "silu",
    "attention_bias": False,
    "layer_types": ["full_attention", "full_attention"],
    "target_layer_ids": [-1, 1, 4],
    "block_size": 4,
    "mask_token_id": MASK,
    "num_anchors": 8,
    "tie_word_embeddings": False,
}
GEMMA4 = {
    **{key: value for key, value in QWEN3.items() if key not in ("rope_theta", "rope_scaling", "hidden_act")},
    "model_type": "gemma4_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 4,
    "global_head_dim": 8,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "enable_moe_block": False,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 5.0,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
    },
}
DFLASH = {"markov_rank": 0, "enable_confidence_head": False}
DSPARK = {"markov_rank": 6, "markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True}
PLAIN_RNN = {"markov_head_type": "rnn", "confidence_head_with_markov": False}
EAGLE3 = {"num_hidden_layers": 1, "draft_num_hidden_layers": 1, "layer_types": ["full_attention"], "ttt_length": 4, "step_loss_decay": 0.8}
CASES = {
    "dspark": {**QWEN3, **DSPARK, "architectures": ["Qwen3DSparkModel"]},
    "dspark gated": {**QWEN3, **DSPARK, "markov_head_type": "gated", "architectures": ["Qwen3DSparkModel"]},
    "dspark rnn": {
        **QWEN3,
        **DSPARK,
        "markov_head_type": "rnn",
        "confidence_head_with_markov": False,
        "architectures": ["Qwen3DSparkModel"],
    },
    "dflash": {**QWEN3, **DFLASH, "architectures": ["Qwen3DSparkModel"]},
    "eagle3": {**QWEN3, **EAGLE3, "architectures": ["Qwen3Eagle3Model"]},
    "gemma4 dspark": {**GEMMA4, **DSPARK, "architectures": ["Gemma4DSparkModel"]},
    "gemma4 dflash": {**GEMMA4, **DFLASH, "attention_k_eq_v": False, "architectures": ["Gemma4DSparkModel"]},
    "gemma4 eagle3": {**GEMMA4, **EAGLE3, "architectures": ["Gemma4Eagle3Model"]},
}


def checkpoint(config: dict) -> dict[str, Tensor]:
    """Random tensors under the documented names, Linear weights as [out, in]."""
    gemma, chain = "Gemma4" in config["architectures"][0], "Eagle3" in config["architectures"][0]
    vocab, hidden, heads = (config[name] for name in ("vocab_size", "hidden_size", "num_attention_heads"))
    shared = gemma and config["attention_k_eq_v"]
    d = config["global_head_dim"] if gemma else config["head_dim"]
    kv_heads = config["num_global_key_value_heads"] if shared else config["num_key_value_heads"]
    shapes = {
        "embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
        "fc.weight": (hidden, len(config["target_layer_ids"]) * hidden),
        "norm.weight": (hidden,),
    }
    inputs = 2 * hidden if chain else hidden
    for layer in range(config["num_hidden_layers"]):
        parts = {
            "self_attn.q_proj.weight": (heads * d, inputs),
            "self_attn.k_proj.weight": (kv_heads * d, inputs),
            "self_attn.o_proj.weight": (hidden, heads * d),
            "self_attn.q_norm.weight": (d,),
            "self_attn.k_norm.weight": (d,),
            "mlp.gate_proj.weight": (config["intermediate_size"], hidden),
            "mlp.up_proj.weight": (config["intermediate_size"], hidden),
            "mlp.down_proj.weight": (hidden, config["intermediate_size"]),
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
        }
        if not shared:
            parts["self_attn.v_proj.weight"] = (kv_heads * d, inputs)
        if chain:
            parts["hidden_norm.weight"] = (hidden,)
        if gemma:
            parts |= {"pre_feedforward_layernorm.weight": (hidden,), "post_feedforward_layernorm.weight": (hidden,), "layer_scalar": (1,)}
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in parts.items()}
    if not chain:
        shapes["hidden_norm.weight"] = (hidden,)
        rank = config["markov_rank"]
        if rank:
            shapes |= {"markov_head.markov_w1.weight": (vocab, rank), "markov_head.markov_w2.weight": (vocab, rank)}
            if config["markov_head_type"] == "gated":
                shapes |= {"markov_head.gate_proj.weight": (rank, hidden + rank), "markov_head.gate_proj.bias": (rank,)}
            if config["markov_head_type"] == "rnn":
                shapes |= {"markov_head.joint_proj.weight": (3 * rank, 2 * rank + hidden), "markov_head.joint_proj.bias": (3 * rank,)}
        if config["enable_confidence_head"]:
            width = hidden + (rank if config["confidence_head_with_markov"] else 0)
            shapes |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
    random = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=random, dtype=torch.float64) * 0.5 for name, shape in shapes.items()}


class Naive:
    """The format's own arithmetic, written out for one request."""

    def __init__(self, config: dict, tensors: dict[str, Tensor]) -> None:
        self.c, self.t = config, tensors
        self.gemma = "Gemma4" in config["architectures"][0]
        self.d = config["global_head_dim"] if self.gemma else config["head_dim"]

    def norm(self, x: Tensor, name: str | None) -> Tensor:
        scaled = x / (x.pow(2).mean(-1, keepdim=True) + self.c["rms_norm_eps"]).sqrt()
        return scaled if name is None else scaled * self.t[f"{name}.weight"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        out = self.t[f"{name}.weight"] @ x
        return out + self.t[f"{name}.bias"] if f"{name}.bias" in self.t else out

    def rotate(self, head: Tensor, position: int) -> Tensor:
        out, half = head.clone(), self.d // 2
        turning = int(0.5 * self.d // 2) if self.gemma else half
        for i in range(turning):
            angle = position * 1e4 ** (-2 * i / self.d)
            a, b = head[i], head[i + half]
            out[i], out[i + half] = a * math.cos(angle) - b * math.sin(angle), b * math.cos(angle) + a * math.sin(angle)
        return out

    def key_value(self, x: Tensor, layer: str, position: int) -> tuple[list[Tensor], list[Tensor]]:
        keys = self.linear(x, f"{layer}.self_attn.k_proj").split(self.d)
        shared = f"{layer}.self_attn.v_proj.weight" not in self.t
        values = keys if shared else self.linear(x, f"{layer}.self_attn.v_proj").split(self.d)
        values = [self.norm(v, None) if self.gemma else v for v in values]
        return [self.rotate(self.norm(k, f"{layer}.self_attn.k_norm"), position) for k in keys], values

    def attend(self, x: Tensor, layer: str, position: int, seen: list[tuple[list[Tensor], list[Tensor]]]) -> Tensor:
        out = []
        for head, q in enumerate(self.linear(x, f"{layer}.self_attn.q_proj").split(self.d)):
            q = self.rotate(self.norm(q, f"{layer}.self_attn.q_norm"), position)
            group = head * len(seen[0][0]) // HEADS
            scores = torch.stack([q @ keys[group] for keys, _ in seen]) * (1.0 if self.gemma else self.d**-0.5)
            out.append(sum(w * values[group] for w, (_, values) in zip(scores.softmax(0), seen, strict=True)))
        return self.linear(torch.cat(out), f"{layer}.self_attn.o_proj")

    def mlp(self, x: Tensor, layer: str) -> Tensor:
        gate = self.linear(x, f"{layer}.mlp.gate_proj")
        gate = torch.nn.functional.gelu(gate, approximate="tanh") if self.gemma else gate * torch.sigmoid(gate)
        return self.linear(gate * self.linear(x, f"{layer}.mlp.up_proj"), f"{layer}.mlp.down_proj")

    def finish(self, x: Tensor, attended: Tensor, layer: str) -> Tensor:
        if not self.gemma:
            x = x + attended
            return x + self.mlp(self.norm(x, f"{layer}.post_attention_layernorm"), layer)
        x = x + self.norm(attended, f"{layer}.post_attention_layernorm")
        fed = self.mlp(self.norm(x, f"{layer}.pre_feedforward_layernorm"), layer)
        return (x + self.norm(fed, f"{layer}.post_feedforward_layernorm")) * self.t[f"{layer}.layer_scalar"]

    def embed(self, token: int) -> Tensor:
        return self.t["embed_tokens.weight"][token] * (HIDDEN**0.5 if self.gemma else 1)

    def logits(self, x: Tensor) -> Tensor:
        raw = self.t["lm_head.weight"] @ x
        cap = self.c.get("final_logit_softcapping")
        return raw if cap is None else torch.tanh(raw / cap) * cap

    def block(self, features: Tensor, anchor: int) -> list[Tensor]:
        """DSpark and DFlash: hidden states of the slots after the context, whose last position is before the anchor's."""
        start = len(features)
        context = [self.norm(self.linear(row, "fc"), "hidden_norm") for row in features]
        slots = [self.embed(anchor), *(self.embed(MASK) for _ in range(self.c["block_size"] - 1))]
        for index in range(self.c["num_hidden_layers"]):
            layer = f"layers.{index}"
            inner = [self.norm(x, f"{layer}.input_layernorm") for x in slots]
            seen = [self.key_value(x, layer, p) for p, x in enumerate(context)]
            seen += [self.key_value(x, layer, start + k) for k, x in enumerate(inner)]
            slots = [
                self.finish(x, self.attend(y, layer, start + k, seen), layer) for k, (x, y) in enumerate(zip(slots, inner, strict=True))
            ]
        return [self.norm(x, "norm") for x in slots]

    def head(self, hidden: list[Tensor], tokens: list[int]) -> list[Tensor]:
        """Logits of the slots, given the tokens before each."""
        if not self.c["markov_rank"]:
            return [self.logits(h) for h in hidden]
        out, state = [], torch.zeros(self.c["markov_rank"], dtype=torch.float64)
        for h, token in zip(hidden, tokens, strict=True):
            w1 = latent = self.t["markov_head.markov_w1.weight"][token]
            if self.c["markov_head_type"] == "gated":
                latent = torch.sigmoid(self.linear(torch.cat([h, w1]), "markov_head.gate_proj")) * w1
            if self.c["markov_head_type"] == "rnn":
                gate, candidate, output = self.linear(torch.cat([state, w1, h]), "markov_head.joint_proj").chunk(3)
                state = torch.sigmoid(gate) * state + (1 - torch.sigmoid(gate)) * torch.tanh(candidate)
                latent = torch.tanh(output)
            out.append(self.logits(h) + self.t["markov_head.markov_w2.weight"] @ latent)
        return out

    def confidence(self, hidden: list[Tensor], tokens: list[int]) -> list[Tensor]:
        markov = self.c["confidence_head_with_markov"]
        rows = [torch.cat([h, self.t["markov_head.markov_w1.weight"][t]]) if markov else h for h, t in zip(hidden, tokens, strict=True)]
        return [self.linear(row, "confidence_head.proj")[0] for row in rows]

    def chain(self, features: Tensor, text: list[int], tokens: list[int]) -> list[Tensor]:
        """Eagle3: logits of the slots; row t joins the features of position t with the token after it."""
        layer, seen, out = "layers.0", [], []
        states = [self.linear(row, "fc") for row in features]
        rows = [(states[t], text[t + 1], t) for t in range(len(states) - 1)]
        for state, token, position in rows:
            seen.append(self.key_value(self.joined(state, token), layer, position))
        state, position = states[-1], len(states) - 1
        for token in tokens:
            inner = self.joined(state, token)
            seen.append(self.key_value(inner, layer, position))
            state = self.finish(state, self.attend(inner, layer, position, seen), layer)
            out.append(self.logits(self.norm(state, "norm")))
            position += 1
        return out

    def joined(self, state: Tensor, token: int) -> Tensor:
        return torch.cat([self.norm(self.embed(token), "layers.0.input_layernorm"), self.norm(state, "layers.0.hidden_norm")])


def loaded(config: dict, tensors: dict[str, Tensor]) -> tuple[Drafter, DrafterConfig]:
    released = from_deepspec(config, tensors)
    gemma = "Gemma4" in config["architectures"][0]
    family = TargetFamily(embedding_scale=HIDDEN**0.5, logit_softcap=5.0, qk_norm=True) if gemma else TargetFamily(qk_norm=True)
    head = TargetHead(VOCAB, HIDDEN, config["rms_norm_eps"], family, torch.float64)
    head.load(released.embedding, torch.ones(HIDDEN, dtype=torch.float64), released.lm_head)
    drafter = Drafter(released.config, head).eval()
    drafter.load_trainable(released.state)
    return drafter, released.config


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_block_logits_are_those_of_the_format(name: str) -> None:
    config = CASES[name]
    tensors = checkpoint(config)
    drafter, ours = loaded(config, tensors)
    naive, length = Naive(config, tensors), 5
    features = torch.randn(length, 3 * HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    text, tokens = [3, 1, 4, 1, 5], [9, 2, 6, 5]
    cache = drafter.new_cache(1, length)
    drafter.extend_context(cache, features[None], torch.tensor([length]), torch.tensor([text]))
    assert ours.block_length == 4
    if "eagle3" in name:
        run = drafter.begin_chain(cache, torch.tensor([length]))
        found = torch.cat([drafter.base_logits(run.step(torch.tensor([token]))) for token in tokens])
        assert_close(found, torch.stack(naive.chain(features, text, tokens)))
        return
    hidden = drafter.block_hidden(cache, torch.tensor([tokens[0]]), torch.tensor([length]))[0]
    logits = drafter.base_logits(hidden)
    if drafter.head is not None:
        logits = logits + drafter.head.bias(drafter.head.latent(hidden, torch.tensor(tokens)))
    expected = naive.block(features, tokens[0])
    assert_close(logits, torch.stack(naive.head(expected, tokens)))
    assert (drafter.confidence is not None) == config["enable_confidence_head"]
    if drafter.confidence is not None:
        assert_close(drafter.confidence_logit(hidden, torch.tensor(tokens)), torch.stack(naive.confidence(expected, tokens)))


def test_what_a_checkpoint_is() -> None:
    kinds = {name: from_deepspec(config, checkpoint(config)).config for name, config in CASES.items()}
    assert {name: config.algorithm for name, config in kinds.items()} == {
        name: "eagle3" if "eagle3" in name else "dflash" if "dflash" in name else "dspark" for name in CASES
    }
    assert from_deepspec(CASES["dspark"], checkpoint(CASES["dspark"])).layer_ids == (-1, 1, 4)
    assert (kinds["gemma4 dspark"].num_kv_heads, kinds["gemma4 dflash"].num_kv_heads, kinds["gemma4 dspark"].head_dim) == (1, 2, 8)
    assert [is_deepspec(config) for config in (CASES["eagle3"], {"architectures": ["LlamaForCausalLM"]}, {})] == [True, False, False]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention_bias": True}, ["attention_bias"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["rotary positions are scaled"]),
        ({"layer_types": ["sliding_attention", "full_attention"]}, ["sliding_attention"]),
        ({"markov_head_type": "transformer"}, ["'transformer'"]),
        ({"block_size": None, "target_layer_ids": None}, ["lacks block_size", "lacks target_layer_ids"]),
        ({"architectures": ["LlamaForCausalLM"]}, ["'LlamaForCausalLM'", "Qwen3Eagle3Model"]),
    ],
)
def test_what_is_not_computed_here_is_refused(changes: dict, words: list[str]) -> None:
    with pytest.raises(DrafterError) as told:
        from_deepspec({**CASES["dspark"], **changes}, checkpoint(CASES["dspark"]))
    for word in words:
        assert word in str(told.value)


def test_a_checkpoint_with_other_tensors_names_them() -> None:
    tensors = checkpoint(CASES["dspark"])
    tensors["layers.1.self_attn.sinks"] = tensors.pop("hidden_norm.weight")
    with pytest.raises(DrafterError, match=r"missing backbone.context_norm.weight.*unexpected backbone.layers.1.self_attn.sinks"):
        loaded(CASES["dspark"], tensors)


@pytest.mark.parametrize("name", ["gemma4 dspark", "gemma4 eagle3"])
def test_a_gemma4_target_decodes_its_own_text_with_it(name: str) -> None:
    model = gemma4_target()
    layers = [-1, 1, 2]
    tensors = {**checkpoint(CASES[name]), "embed_tokens.weight": model.model.embed_tokens.weight, "lm_head.weight": model.lm_head.weight}
    released = from_deepspec({**CASES[name], "target_layer_ids": layers}, tensors)
    head = TargetHead(VOCAB, HIDDEN, model.config.rms_norm_eps, family_of(model.config.to_dict()), torch.float64)
    head.load(released.embedding, model.model.norm.weight, released.lm_head)
    drafter = Drafter(released.config, head).eval()
    drafter.load_trainable(released.state)
    target = TransformersTarget.for_drafter(model, released.layer_ids, released.config)
    prompts, new = [[7, 3, 9, 1, 15], [5, 2], [11, 2, 2, 20, 8, 19, 3, 6, 21]], 12
    for prompt, generation in zip(prompts, speculative_decode(target, drafter, prompts, SamplingSettings(max_new_tokens=new)), strict=True):
        ids = torch.tensor([prompt])
        own = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0
        )
        assert generation.tokens == own[0, len(prompt) :].tolist()


def gemma4_target() -> Gemma4ForCausalLM:
    """A random one: two sizes of heads, a window shorter than the text, keys that serve as values, a softcap."""
    config = Gemma4TextConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        head_dim=4,
        global_head_dim=8,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        final_logit_softcapping=5.0,
        max_position_embeddings=64,
        initializer_range=0.4,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    return Gemma4ForCausalLM(config).to(torch.float64).eval()
