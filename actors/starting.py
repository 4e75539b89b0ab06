"""Where a run's first weights come from: at random, the target's own layers and logits, or another drafter."""

import torch

from actors.drafter import open_drafter
from actors.head_start import start_head
from actors.layer_start import start_layers
from actors.train_recipe import RANDOM, TARGET_LAYERS, TrainRecipe
from drafters.drafter import Drafter


def start_drafter(drafter: Drafter, recipe: TrainRecipe, device: torch.device) -> None:
    """Give a fresh drafter the weights that the recipe asks for.

    Raises:
        DrafterError: the target's layers or the other drafter's weights do not fit, or this kind of head has no such start.
        StorageError: the other drafter's folder is damaged.
    """
    settings = recipe.settings
    if settings.start == TARGET_LAYERS:
        start_layers(drafter, recipe.model)
    elif settings.start != RANDOM:
        assert recipe.start is not None
        drafter.load_trainable(open_drafter(recipe.start).tensors)
        return  # its head is trained already
    if settings.head_start == "target":
        start_head(drafter, recipe.model, device)
