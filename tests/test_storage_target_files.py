"""A target's files: one strict loader for its head, and an identity that changes with what matters."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from storage.errors import StorageError
from storage.target_files import load_head_weights, load_layer_weights, read_model_config, target_identity

HIDDEN, ROWS, LAYERS = 8, 40, 3
CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "vocab_size": ROWS,
    "tie_word_embeddings": False,
    "transformers_version": "5.0",
}


def tensors(prefix: str = "model.", head: str | None = "lm_head.weight") -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    found = {prefix + "embed_tokens.weight": draw(ROWS, HIDDEN), prefix + "norm.weight": draw(HIDDEN)}
    for layer in range(LAYERS):
        found[f"{prefix}layers.{layer}.self_attn.q_proj.weight"] = draw(HIDDEN, HIDDEN)
        found[f"{prefix}layers.{layer}.input_layernorm.weight"] = draw(HIDDEN)
    if head:
        found[head] = draw(ROWS, HIDDEN)
    return found


def tokenizer(count: int, added: int = 0) -> dict:
    words = {f"t{number}": number for number in range(count)}
    return {"model": {"type": "BPE", "vocab": words}, "added_tokens": [{"id": count + number, "content": "x"} for number in range(added)]}


def write(folder, config=CONFIG, weights=None, shards: int = 1, words: int = 30, template: str | None = "hello") -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    weights = tensors() if weights is None else weights
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
    else:
        names = sorted(weights)
        where = {name: f"model-{number % shards + 1:05d}-of-{shards:05d}.safetensors" for number, name in enumerate(names)}
        for file in set(where.values()):
            save_file({name: weights[name] for name in names if where[name] == file}, folder / file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer(words, 2)))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "t1"} | ({"chat_template": template} if template else {})))
    return str(folder)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_single_or_sharded_tied_or_not(tmp_path, shards, tied):
    weights = tensors(head=None if tied else "lm_head.weight")
    head = load_head_weights(write(tmp_path / "m", {**CONFIG, "tie_word_embeddings": tied}, weights, shards))
    assert torch.equal(head.embedding, weights["model.embed_tokens.weight"])
    assert torch.equal(head.final_norm, weights["model.norm.weight"])
    assert (head.lm_head is head.embedding) == tied
    if not tied:
        assert torch.equal(head.lm_head, weights["lm_head.weight"])
    assert head.embedding.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("prefix", "head"),
    [
        ("language_model.model.", None),
        ("model.language_model.", None),
        ("language_model.model.", "language_model.lm_head.weight"),
        ("model.language_model.", "lm_head.weight"),
    ],
)
def test_multimodal_checkpoints_are_unwrapped(tmp_path, prefix, head):
    text = {"model_type": "gemma3_text", "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "final_logit_softcapping": 30.0}
    config = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": text,
        "vision_config": {"hidden_size": 99},
    }
    config |= {"tie_word_embeddings": False} if head else {}
    weights = tensors(prefix, head) | {"vision_tower.embed.weight": torch.ones(3), "multi_modal_projector.norm.weight": torch.ones(5)}
    folder = write(tmp_path / "m", config, weights)
    loaded = load_head_weights(folder)
    assert torch.equal(loaded.final_norm, weights[prefix + "norm.weight"])
    assert torch.equal(loaded.lm_head, weights[head or prefix + "embed_tokens.weight"])
    assert read_model_config(folder) == {**{k: config[k] for k in ("architectures", "tie_word_embeddings") if k in config}, **text}
    identity = target_identity(folder, "gemma")
    assert identity.embedding_scale == float(torch.tensor(HIDDEN**0.5).bfloat16())
    assert (identity.logit_softcap, identity.hidden_size, identity.num_layers) == (30.0, HIDDEN, LAYERS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w, c: w.pop("model.embed_tokens.weight"), "no token embedding"),
        (lambda w, c: w.pop("model.norm.weight"), r"lack model\.norm\.weight"),
        (lambda w, c: w.pop("lm_head.weight"), "no lm_head.weight, and tie_word_embeddings is false"),
        (lambda w, c: (w.pop("lm_head.weight"), c.pop("tie_word_embeddings")), "tie_word_embeddings is not given"),
        (lambda w, c: w.update({"lm_head.weight": torch.ones(ROWS - 1, HIDDEN)}), r"lm_head\.weight is \[39, 8\]"),
        (lambda w, c: w.update({"model.norm.weight": torch.ones(HIDDEN + 1)}), r"norm\.weight is \[9\]"),
        (lambda w, c: c.update(hidden_size=HIDDEN * 2), r"the configuration says \[\*, 16\]"),
        (lambda w, c: c.update(vocab_size=ROWS + 1), "configuration says vocab_size 41"),
        (lambda w, c: c.update(tie_word_embeddings=True), "differs from the embedding"),
        (lambda w, c: w["lm_head.weight"].fill_(float("nan")), "LM head holds NaN"),
        (lambda w, c: w.update({"lm_head.weight": torch.ones(ROWS, HIDDEN, dtype=torch.int8)}), "quantized"),
        (lambda w, c: w.update({"language_model.model.embed_tokens.weight": torch.ones(2, 2)}), "2 candidates"),
        (lambda w, c: w.update({"language_model.lm_head.weight": torch.ones(2, 2)}), "several LM heads"),
        (lambda w, c: c.pop("hidden_size"), "gives no hidden_size"),
    ],
)
def test_whatever_is_missing_or_doubtful_is_an_error(tmp_path, change, message):
    weights, config = tensors(), dict(CONFIG)
    change(weights, config)
    with pytest.raises(StorageError, match=message):
        load_head_weights(write(tmp_path / "m", config, weights))


def test_a_tied_model_may_store_its_head_twice(tmp_path):
    weights = tensors()
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    head = load_head_weights(write(tmp_path / "m", {**CONFIG, "tie_word_embeddings": True}, weights))
    assert head.lm_head is head.embedding


def test_incomplete_downloads_are_named(tmp_path):
    folder = tmp_path / "m"
    write(folder, shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(StorageError, match=r"model-00002-of-00003\.safetensors is missing"):
        load_head_weights(folder)
    write(folder, shards=3)
    whole = (folder / "model-00002-of-00003.safetensors").read_bytes()
    for cut in (1, 8, len(whole) - 4):
        (folder / "model-00002-of-00003.safetensors").write_bytes(whole[:-cut])
        with pytest.raises(StorageError, match=r"model-00002-of-00003\.safetensors is (truncated|not a readable)"):
            load_head_weights(folder)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    with pytest.raises(StorageError, match=r"no \*\.safetensors"):
        load_head_weights(folder)
    (folder / "config.json").unlink()
    with pytest.raises(StorageError, match=r"config\.json is missing"):
        read_model_config(folder)


def test_layer_weights_by_their_name_inside_the_layer(tmp_path):
    weights = tensors()
    folder = write(tmp_path / "m", weights=weights, shards=2)
    layer = load_layer_weights(folder, 1)
    assert sorted(layer) == ["input_layernorm.weight", "self_attn.q_proj.weight"]
    assert torch.equal(layer["self_attn.q_proj.weight"], weights["model.layers.1.self_attn.q_proj.weight"])
    with pytest.raises(StorageError, match=r"layers 0\.\.2, there is no layer 3"):
        load_layer_weights(folder, 3)


def test_padded_vocabularies_keep_both_counts(tmp_path):
    identity = target_identity(write(tmp_path / "m", words=30), "tiny", "abc")
    assert (identity.vocab_size, identity.embedding_rows) == (32, ROWS)
    assert (identity.id, identity.revision, identity.embedding_scale, identity.logit_softcap, identity.logit_multiplier) == (
        "tiny",
        "abc",
        1.0,
        None,
        1.0,
    )
    with pytest.raises(StorageError, match=r"tokenizer has 42 ids, the embedding 40 rows"):
        target_identity(write(tmp_path / "m", words=40), "tiny")


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("config_hash", lambda f: write(f, {**CONFIG, "rope_theta": 5.0})),
        ("weights_fingerprint", lambda f: write(f, weights={k: v + (k == "model.norm.weight") for k, v in tensors().items()})),
        ("weights_fingerprint", lambda f: write(f, weights=tensors() | {"extra": torch.ones(1)})),
        ("tokenizer_hash", lambda f: (f / "tokenizer_config.json").write_text(json.dumps({"eos_token": "t2", "chat_template": "hello"}))),
        ("chat_template_hash", lambda f: write(f, template="bye")),
        ("chat_template_hash", lambda f: (f / "chat_template.jinja").write_text("hi")),
    ],
)
def test_identity_changes_with_what_matters(tmp_path, field, change):
    before = target_identity(write(tmp_path / "m"), "tiny")
    change(tmp_path / "m")
    after = target_identity(tmp_path / "m", "tiny")
    assert getattr(after, field) != getattr(before, field)
    assert replace(after, **{field: getattr(before, field)}) == before


def test_identity_ignores_what_does_not_matter(tmp_path):
    before = target_identity(write(tmp_path / "m"), "tiny")
    assert target_identity(write(tmp_path / "m", {**CONFIG, "transformers_version": "9", "_name_or_path": "/x"}), "tiny") == before


def test_granite_scales_are_read(tmp_path):
    config = {**CONFIG, "model_type": "granite", "embedding_multiplier": 12.0, "logits_scaling": 8.0}
    identity = target_identity(write(tmp_path / "m", config, template=None), "granite")
    assert (identity.embedding_scale, identity.logit_multiplier, identity.chat_template_hash) == (12.0, 0.125, "absent")
