"""From a run's checkpoints to the drafter that it leaves."""

from collections.abc import Callable

from actors import checkpointing
from actors.errors import ActorError
from actors.train_recipe import TrainRecipe
from storage.checkpoint import DrafterFiles, save_drafter
from storage.contract import DraftLayout
from storage.errors import StorageError, StorageUnavailable
from storage.object_store import ObjectStore

DRAFTER = "drafter"
"""Name of the drafter's folder in a run's."""


def export(recipe: TrainRecipe, tell: Callable[[str], None]) -> tuple[ObjectStore, int]:
    """Write the drafter as a plain folder of the run (weights, config, contract); where, and the step that its weights are of."""
    saved, destination = chosen(recipe, tell), recipe.run.child(DRAFTER)
    save_drafter(
        destination,
        DrafterFiles(
            tensors=saved.exported,
            config=recipe.drafter.to_dict(),
            contract=recipe.drafter_contract,
            layout=DraftLayout(recipe.drafter.layout, recipe.drafter.block_length, recipe.drafter.mask_token_id),  # type: ignore[arg-type]
        ),
    )
    return destination, saved.standing.step


def chosen(recipe: TrainRecipe, tell: Callable[[str], None]) -> checkpointing.Saved:
    """The checkpoint to export: the best or the last one; the last where there is no intact best one.

    Raises:
        ActorError, StorageError: there is none.
    """
    try:
        best = checkpointing.load(recipe.run, "best") if recipe.settings.export == "best" else None
    except StorageUnavailable:
        raise
    except StorageError as error:
        tell(f"{error}: the last checkpoint is exported")
        best = None
    saved = best or checkpointing.load(recipe.run)
    if saved is None:
        raise ActorError(f"{recipe.run.settings.root} holds no checkpoint to export")
    return saved
