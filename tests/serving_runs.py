"""A tiny target with held-out prompts and an untrained drafter beside it: what the jobs around serving start from."""

from pathlib import Path

import torch
from pipeline_runs import Workshop, write_rows
from tiny_models import write_tiny_model

from actors.drafter import build_drafter
from drafters.config import config_from_target
from pipelines.target import default_layer_ids
from storage.checkpoint import DrafterFiles, save_drafter
from storage.contract import Capture, Contract, DraftLayout
from storage.object_store import ObjectStore, StorageSettings
from storage.target_files import read_model_config, target_identity

BLOCK, MASK = 3, 318
DOMAINS = ("chat", "math")
ENGINE = ["cluster.cpus=1", "run=first", "engine.dtype=float32", "engine.threads=1"]


class ServingShop(Workshop):
    """Overrides without those of a stage of the training chain."""

    def overrides(self, job: str, *more: str, target: str = "tiny llama") -> list[str]:
        common = super().overrides("prepare", target=target)
        return [*common, *ENGINE, *more]

    @property
    def drafter(self) -> Path:
        return self.stored / "runs" / "first" / "drafter"


def make_shop(folder: Path, prompts: int = 6) -> ServingShop:
    """Model, held-out prompts as `prepare` reads them, and the drafter."""
    shop = ServingShop(folder)
    model = write_tiny_model(folder / "tiny llama", "llama")
    write_rows(folder / "prompts.jsonl", [{"prompt": f"What is {n}?"} for n in range(4)])
    write_rows(folder / "heldout.jsonl", [{"prompt": f"Name {n} colours.", "domain": DOMAINS[n % 2]} for n in range(prompts)])
    write_drafter(shop, model)
    return shop


def write_drafter(shop: ServingShop, model: Path, **options: object) -> None:
    """Random weights, wide enough that confidences differ."""
    config_file = read_model_config(model)
    layers = default_layer_ids(int(config_file["num_hidden_layers"]))
    values = {"block_length": BLOCK, "mask_token_id": MASK, "num_layers": 1, "head": "markov", "head_rank": 8, **options}
    config = config_from_target(config_file, len(layers), **values)
    torch.manual_seed(0)
    drafter = build_drafter(str(model), config, "float32")
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=0.1)
    contract = Contract(target_identity(model, str(model)), Capture(layers, 128, "raw"))
    layout = DraftLayout("dspark", BLOCK, MASK)
    save_drafter(
        ObjectStore(StorageSettings(str(shop.drafter))), DrafterFiles(drafter.trainable_state(), config.to_dict(), contract, layout)
    )
