"""calibration.json: the temperatures beside a drafter's checkpoint, and what they were fitted to (part of the contract)."""

import json
from dataclasses import asdict, dataclass

from storage.checkpoint import DrafterFiles
from storage.contract import TargetIdentity, record_from_json, require_match
from storage.errors import StorageError
from storage.object_store import ObjectStore

CALIBRATION_KEY = "calibration.json"


@dataclass(frozen=True)
class CalibrationIdentity:
    """What temperatures hold for.

    Attributes:
        drafter: SHA-256 of the drafter's weights file.
        temperature: of sampling, in target and drafter.
    """

    target: TargetIdentity
    drafter: str
    block_length: int
    temperature: float


@dataclass(frozen=True)
class ShorterBlocks:
    """What became of blocks made with fewer slots than the drafter was trained for.

    Attributes:
        length: draft tokens a block, w.
        rounds: of such blocks.
        acceptance: [w] share of rounds in which the first k draft tokens were all accepted.
        whole: [w] the same of whole blocks on the same prompts.
        ece: mean over positions of the survival's calibration error, with the temperatures of whole blocks.
    """

    length: int
    rounds: int
    acceptance: tuple[float, ...]
    whole: tuple[float, ...]
    ece: float

    @property
    def ratios(self) -> tuple[float, ...]:
        """Survival of such blocks over that of whole ones."""
        return tuple(short / whole if whole else 1.0 for short, whole in zip(self.acceptance, self.whole, strict=True))


@dataclass(frozen=True)
class CalibrationRecord:
    """Temperatures T_1..T_g, what they hold for, and how good they are.

    Attributes:
        corpus: whose held-out prompts were decoded.
        rounds: that they were fitted to.
        ece_before, ece_after: means over positions on the rounds set aside for measuring.
        noise_floor: a perfect calibrator's ECE there.
        acceptance: share of rounds in which the first k draft tokens were all accepted.
        shorter: blocks of other lengths, as far as measured.
    """

    identity: CalibrationIdentity
    corpus: str
    rounds: int
    temperatures: tuple[float, ...]
    ece_before: float
    ece_after: float
    noise_floor: float
    acceptance: tuple[float, ...]
    shorter: tuple[ShorterBlocks, ...]


def drafter_hash(drafter: ObjectStore) -> str:
    """SHA-256 of a drafter's weights, as its contract.json says (and `load_drafter` checks).

    Raises:
        StorageError: the folder holds no finished drafter.
    """
    try:
        return str(json.loads(drafter.get("contract.json"))["weights_sha256"])
    except (FileNotFoundError, ValueError, KeyError) as error:
        raise StorageError(f"{drafter.settings.root} holds no finished drafter: its contract.json is missing or damaged") from error


def calibration_identity(drafter: ObjectStore, files: DrafterFiles, temperature: float) -> CalibrationIdentity:
    """What temperatures of this drafter hold for at a sampling temperature."""
    return CalibrationIdentity(files.contract.target, drafter_hash(drafter), files.layout.block_length, float(temperature))


def save_calibration(drafter: ObjectStore, record: CalibrationRecord) -> None:
    """Write calibration.json beside the drafter's weights."""
    drafter.put(CALIBRATION_KEY, (json.dumps(asdict(record), indent=1) + "\n").encode())


def load_calibration(drafter: ObjectStore, expected: CalibrationIdentity) -> CalibrationRecord:
    """Read calibration.json.

    Raises:
        StorageError: there is none, or it is damaged.
        ContractMismatch: it was fitted to another target, drafter or sampling temperature.
    """
    where = drafter.url(CALIBRATION_KEY)
    try:
        text = drafter.get(CALIBRATION_KEY)
    except FileNotFoundError:
        raise StorageError(f"{where} does not exist. Fit one with `python -m pipelines.calibrate` and this run's name.") from None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise StorageError(f"{where} is not readable JSON ({error}): it is torn or damaged") from error
    record = record_from_json(CalibrationRecord, value, where)
    require_match(expected, record.identity, where, "Fit it again with `python -m pipelines.calibrate`")
    if len(record.temperatures) != expected.block_length:
        raise StorageError(f"{where} has {len(record.temperatures)} temperatures for a block of {expected.block_length}")
    return record
