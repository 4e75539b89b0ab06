"""Starting Ray for a job, or joining a running cluster."""

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

from actors.errors import ActorError


@dataclass(frozen=True)
class ClusterSettings:
    """`address` is `local` (start Ray for this job), `auto` or a Ray address; `cpus` limits a local start."""

    address: str = "local"
    cpus: int | None = None


# For processes that compute on the CPU. OpenMP threads that spin for long while they wait slow a step several times over as soon as
# anything else runs on the same cores. Large pages for malloc: a step allocates and frees buffers of tens of MB, and without them a
# tenth of its time goes into page faults. oneDNN keeps the kernels of the last 1,024 shapes that it met, of some 10 MB each in training,
# where no step has the shapes of another: 10 GB after some hundred steps. The last 64 hold the shapes of a step.
CPU_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "20000",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
}


@contextmanager
def cluster(settings: ClusterSettings, environment: Mapping[str, str] | None = None) -> Iterator[None]:
    """A Ray connection for the time of the block; `environment` is that of all its workers."""
    local = settings.address == "local"
    try:
        ray.init(
            address=settings.address,
            num_cpus=settings.cpus if local else None,
            include_dashboard=False if local else None,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env={"env_vars": dict(environment)} if environment else None,
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ActorError(
            f"cannot reach Ray at {settings.address!r}: {error}. Start it with `ray start --head`, or use `cluster=local`."
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def cluster_room(settings: ClusterSettings) -> tuple[int, int]:
    """(CPU cores, GPUs) of all nodes of a cluster that runs."""
    if ray.is_initialized():
        found = ray.cluster_resources()
    else:
        with cluster(settings):
            found = ray.cluster_resources()
    return int(found.get("CPU", 0)), int(found.get("GPU", 0))


def original_error(error: BaseException) -> BaseException:
    """The error that an actor raised, out of Ray's wrapping."""
    while isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        error = error.cause
    return error


def death_reason(error: RayActorError) -> str:
    """Why an actor died, in one line: what its constructor raised, else what Ray says first."""
    if isinstance(error, ActorUnavailableError):
        return "nothing answers there any more: its node may be gone"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # Of a constructor's traceback the last line tells, after the error's class.
    return re.sub(r"^[\w.]+: ", "", lines[-1]) if error.actor_init_failed else lines[0]
