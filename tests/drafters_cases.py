"""Tiny drafters, samples and slow references for the drafters' tests. The references use plain tensors and never the code under test."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from drafters import Drafter, DrafterConfig, SampleTensors, TargetFamily, TargetHead, TrainBatch, pack

HEADS = ["none", "markov", "gated", "rnn"]
H, V, L, G, RANK = 12, 40, 3, 4, 5


def tiny_config(head: str = "markov", layout: str = "dspark", **changes: Any) -> DrafterConfig:
    algorithm = changes.get("algorithm", {"dspark": "dspark", "zlab": "dflash", "chain": "eagle3"}[layout])
    heads, mtp = algorithm == "dspark", algorithm == "mtp1"
    values: dict[str, Any] = {
        "algorithm": algorithm,
        "layout": layout,
        "hidden_size": H,
        "intermediate_size": 20,
        "num_layers": 1 if layout == "chain" else 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 6,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "vocab_size": V,
        "captured_layers": 1 if mtp else L,
        "block_length": 1 if mtp else G,
        "mask_token_id": V - 1,
        "head": head if heads else "none",
        "head_rank": RANK if heads and head != "none" else 0,
        "confidence": heads,
        "confidence_markov": heads and head != "none",
        "qk_norm": True,
        "activation": "silu",
    }
    return DrafterConfig(**{**values, **changes})


def tiny_head(dtype: torch.dtype = torch.float64, family: TargetFamily | None = None, vocab: int = V, hidden: int = H) -> TargetHead:
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    head = TargetHead(vocab, hidden, 1e-5, family or TargetFamily(), dtype)
    return head.load(draw(vocab, hidden), 1 + 0.3 * draw(hidden), draw(vocab, hidden))


def tiny_drafter(
    config: DrafterConfig | None = None, dtype: torch.dtype = torch.float64, family: TargetFamily | None = None, attention: str = "split"
) -> Drafter:
    torch.manual_seed(7)
    drafter = Drafter(config or tiny_config(), tiny_head(dtype, family), attention=attention)
    with torch.no_grad():
        for parameter in drafter.parameters():  # larger than at initialisation, so that every term of every formula shows
            parameter.add_(0.3 * torch.randn(parameter.shape, dtype=parameter.dtype))
    return drafter


def tiny_sample(
    length: int, spans: list[tuple[int, int]], seed: int, dtype: torch.dtype = torch.float64, all_rows: bool = False
) -> SampleTensors:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.zeros(length, dtype=torch.bool)
    for start, stop in spans:
        mask[start:stop] = True
    rows = torch.arange(length) if all_rows else mask[1:].nonzero().squeeze(1)
    return SampleTensors(
        input_ids=torch.randint(0, V - 1, (length,), generator=generator),
        loss_mask=mask,
        context=torch.randn(L, length, H, generator=generator, dtype=torch.float64).to(dtype),
        last_hidden=torch.randn(len(rows), H, generator=generator, dtype=torch.float64).to(dtype),
        last_rows=rows,
    )


def tiny_samples(dtype: torch.dtype = torch.float64, all_rows: bool = False) -> tuple[list[SampleTensors], list[Tensor]]:
    """Four sequences: an answer to the end, two answers, one that starts at position 0, and one too short for an anchor."""
    samples = [
        tiny_sample(17, [(5, 17)], 1, dtype, all_rows),
        tiny_sample(20, [(3, 8), (12, 18)], 2, dtype, all_rows),
        tiny_sample(9, [(0, 9)], 3, dtype, all_rows),
        tiny_sample(6, [(5, 6)], 4, dtype, all_rows),
    ]
    anchors = [torch.tensor([5, 8, 13, 15]), torch.tensor([4, 6, 12]), torch.tensor([0, 1, 7]), torch.tensor([], dtype=torch.int64)]
    return samples, anchors


def tiny_batch(dtype: torch.dtype = torch.float64) -> TrainBatch:
    return pack(*tiny_samples(dtype))


# Slow references, straight from DESIGN 5


def norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x: Tensor, position: int, theta: float) -> Tensor:
    """One head vector [d] at one position."""
    d = len(x)
    out = x.clone()
    for i in range(d // 2):
        angle = position * theta ** (-2 * i / d)
        out[i] = x[i] * math.cos(angle) - x[i + d // 2] * math.sin(angle)
        out[i + d // 2] = x[i + d // 2] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def naive_block(drafter: Drafter, sample: SampleTensors, anchor: int) -> Tensor:
    """h [g, H] of one block, query by query, from the sample's states before the anchor."""
    c, w = drafter.config, drafter.trainable_state()
    group, slots = c.num_heads // c.num_kv_heads, c.block_length + (c.layout == "zlab")
    context = []
    for p in range(anchor):
        states = torch.cat([sample.context[layer, p] for layer in range(c.captured_layers)]).to(w["backbone.fc.weight"].dtype)
        context.append(norm(w["backbone.fc.weight"] @ states, w["backbone.context_norm.weight"]))
    ids = [int(sample.input_ids[anchor])] + [c.mask_token_id] * (slots - 1)
    scale = drafter.target_head.family.embedding_scale
    x = [drafter.target_head.embedding[i] * scale for i in ids]
    for layer in range(c.num_layers):
        t = {name.removeprefix(f"backbone.layers.{layer}."): v for name, v in w.items() if name.startswith(f"backbone.layers.{layer}.")}

        def heads(vector: Tensor, name: str, position: int | None, t: dict[str, Tensor] = t) -> list[Tensor]:
            parts = list((t[f"self_attn.{name}_proj.weight"] @ vector).split(c.head_dim))
            if name != "v":
                parts = [norm(part, t[f"self_attn.{name}_norm.weight"]) if c.qk_norm else part for part in parts]
            return parts if position is None else [rotate(part, position, c.rope_theta) for part in parts]

        inner = [norm(vector, t["input_layernorm.weight"]) for vector in x]
        keys = [(p, heads(v, "k", p), heads(v, "v", None)) for p, v in enumerate(context)]
        keys += [(anchor + j, heads(v, "k", anchor + j), heads(v, "v", None)) for j, v in enumerate(inner)]
        out = []
        for j in range(slots):
            q, mixed = heads(inner[j], "q", anchor + j), []
            for head in range(c.num_heads):
                seen = [n for n, (p, _, _) in enumerate(keys) if n >= anchor or c.window is None or anchor + j - p < c.window]
                scores = torch.stack([q[head] @ keys[n][1][head // group] / math.sqrt(c.head_dim) for n in seen]).softmax(0)
                mixed.append(sum(s * keys[n][2][head // group] for s, n in zip(scores, seen, strict=True)))
            out.append(x[j] + t["self_attn.o_proj.weight"] @ torch.cat(mixed))
        x = []
        for vector in out:
            inside = norm(vector, t["post_attention_layernorm.weight"])
            gate = t["mlp.gate_proj.weight"] @ inside
            gate = (
                gate / (1 + (-gate).exp())
                if c.activation == "silu"
                else 0.5 * gate * (1 + torch.tanh(0.7978845608028654 * (gate + 0.044715 * gate**3)))
            )
            x.append(vector + t["mlp.down_proj.weight"] @ (gate * (t["mlp.up_proj.weight"] @ inside)))
    return torch.stack([norm(vector, w["backbone.norm.weight"]) for vector in x])[slots - c.block_length :]


def naive_latent(drafter: Drafter, h: Tensor, previous: Tensor) -> Tensor | None:
    """m [g, r] of one block from h [g, H] and the previous tokens [g]."""
    w, kind = dict(drafter.named_parameters()), drafter.config.head
    if kind == "none":
        return None
    state, out = h.new_zeros(drafter.config.head_rank), []
    for k in range(len(h)):
        e = w["head.W1.weight"][previous[k]]
        if kind == "markov":
            m = e
        elif kind == "gated":
            m = torch.sigmoid(w["head.gate.weight"] @ torch.cat([h[k], e]) + w["head.gate.bias"]) * e
        else:
            gate, candidate, output = (w["head.joint.weight"] @ torch.cat([state, e, h[k]]) + w["head.joint.bias"]).chunk(3)
            state = torch.sigmoid(gate) * state + (1 - torch.sigmoid(gate)) * torch.tanh(candidate)
            m = torch.tanh(output)
        out.append(m)
    return torch.stack(out)


def naive_shape(logits: Tensor, family: TargetFamily) -> Tensor:
    logits = logits * family.logit_multiplier
    return logits if family.logit_softcap is None else family.logit_softcap * torch.tanh(logits / family.logit_softcap)


def naive_loss_terms(
    h: Tensor, m: Tensor | None, W2: Tensor | None, head: TargetHead, teacher: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor]:
    """CE [N] and ||p_d - p_t||_1 [N] from full logits."""
    logits = naive_shape(h @ head.lm_head.t().to(h.dtype), head.family)
    if m is not None and W2 is not None:
        logits = logits + m @ W2
    p_d = torch.exp(logits) / torch.exp(logits).sum(-1, keepdim=True)
    p_t = naive_shape(teacher @ head.lm_head.t().to(h.dtype), head.family).softmax(-1)
    ce = -torch.log(p_d[torch.arange(len(labels)), labels])
    return ce, (p_d - p_t).abs().sum(-1)


def naive_step(
    drafter: Drafter, samples: list[SampleTensors], anchors: list[Tensor], alphas: tuple[float, float, float], decay: float
) -> tuple[Tensor, Tensor]:
    """Undivided loss and weight total, block by block and slot by slot, from the drafter's own h (naive_block checks that)."""
    h_all = drafter.block_states(pack(samples, anchors))
    head, total, weight_total, block = drafter.target_head, h_all.new_zeros(()), h_all.new_zeros(()), 0
    w = dict(drafter.named_parameters())
    norm_weight = head.final_norm + 1 if head.family.norm_plus_one else head.final_norm
    for sample, chosen in zip(samples, anchors, strict=True):
        for a in chosen.tolist():
            h = h_all[block]
            block += 1
            reach = 0
            while reach < drafter.config.block_length and a + reach + 1 < len(sample.input_ids) and sample.loss_mask[a + reach + 1]:
                reach += 1
            previous = torch.stack([sample.input_ids[a + k] for k in range(reach)])
            m = naive_latent(drafter, h[:reach], previous)
            for k in range(reach):
                row = int((sample.last_rows == a + k).nonzero())
                teacher = norm(sample.last_hidden[row].to(h.dtype), norm_weight)
                label = sample.input_ids[a + k + 1]
                ce, tv = naive_loss_terms(h[k][None], None if m is None else m[k][None], w.get("head.W2"), head, teacher[None], label[None])
                loss = alphas[0] * ce[0] + alphas[1] * tv[0]
                if drafter.confidence is not None:
                    feature = h[k]
                    if drafter.config.confidence_markov:
                        feature = torch.cat([h[k], w["head.W1.weight"][previous[k]]])
                    c = torch.sigmoid(w["confidence.proj.weight"][0] @ feature + w["confidence.proj.bias"][0])
                    target = (1 - tv[0] / 2).detach()
                    loss = loss - alphas[2] * (target * torch.log(c) + (1 - target) * torch.log(1 - c))
                total = total + math.exp(-k / decay) * loss
                weight_total = weight_total + math.exp(-k / decay)
    return total, weight_total


def naive_chain(drafter: Drafter, sample: SampleTensors) -> dict[tuple[int, int], Tensor]:
    """(row t, step j) -> h [H] of Eagle3's training-time test (or MTP-1's only step) over a whole sequence, every row at every step.

    Step j's row t attends to the first step's rows up to t, and to its own of steps 1..j.
    """
    c, w, head = drafter.config, drafter.trainable_state(), drafter.target_head
    t = {name.removeprefix("backbone."): value for name, value in w.items()}
    layer = {name.removeprefix("layers.0."): value for name, value in t.items() if name.startswith("layers.0.")}
    group, tokens = c.num_heads // c.num_kv_heads, len(sample.input_ids)

    def heads(vector: Tensor, name: str, position: int | None) -> list[Tensor]:
        parts = list((layer[f"self_attn.{name}_proj.weight"] @ vector).split(c.head_dim))
        if name != "v" and c.qk_norm:
            parts = [norm(part, layer[f"self_attn.{name}_norm.weight"]) for part in parts]
        return parts if position is None else [rotate(part, position, c.rope_theta) for part in parts]

    if c.algorithm == "eagle3":
        states = [t["fc.weight"] @ torch.cat([plane[p] for plane in sample.context]) for p in range(tokens)]
    else:
        states = list(sample.last_hidden)
    keys: list[dict[int, tuple[list[Tensor], list[Tensor]]]] = []
    out = {}
    for j in range(c.block_length):
        rows = range(tokens - 1 - j)
        residual, queries = {}, {}
        keys.append({})
        for r in rows:
            e = norm(head.embedding[sample.input_ids[r + 1 + j]] * head.family.embedding_scale, t["embed_norm.weight"])
            s = norm(states[r], t["hidden_norm.weight"])
            if c.algorithm == "eagle3":
                residual[r], inner = states[r], torch.cat([e, s])
            else:
                residual[r] = t["proj.weight"] @ torch.cat([s, e])
                inner = norm(residual[r], t["input_layernorm.weight"])
            queries[r] = heads(inner, "q", r + j)
            keys[j][r] = (heads(inner, "k", r + j), heads(inner, "v", None))
        for r in rows:
            seen = [keys[0][p] for p in range(r) if c.window is None or r + j - p < c.window] + [keys[i][r] for i in range(j + 1)]
            mixed = []
            for h in range(c.num_heads):
                scores = torch.stack([queries[r][h] @ k[h // group] / math.sqrt(c.head_dim) for k, _ in seen]).softmax(0)
                mixed.append(sum(a * v[h // group] for a, (_, v) in zip(scores, seen, strict=True)))
            x = residual[r] + layer["self_attn.o_proj.weight"] @ torch.cat(mixed)
            inside = norm(x, layer["post_attention_layernorm.weight"])
            gate = layer["mlp.gate_proj.weight"] @ inside
            states[r] = x + layer["mlp.down_proj.weight"] @ (gate / (1 + (-gate).exp()) * (layer["mlp.up_proj.weight"] @ inside))
            final = head.final_norm + 1 if head.family.norm_plus_one else head.final_norm
            out[r, j] = norm(states[r], t["norm.weight"] if c.algorithm == "eagle3" else final)
    return out
