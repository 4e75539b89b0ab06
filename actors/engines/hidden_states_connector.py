"""vLLM KV connector that hands a request's hidden states over, on the CPU as well as on a GPU.

vLLM loads this module by path inside its engine process. On a GPU the parent class does the whole work (asynchronous copy, then a
safetensors file). On the CPU the parent fails, since it pins memory for CUDA; there the states are copied straight out of the cache
and, engine and caller being one process, handed over through `TAKEN` without touching a disk.
"""

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
)

# Key (the request's `hidden_states_path`) -> (token ids [T], hidden states [T, layers, H]); the engine takes each out as it arrives.
TAKEN: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}


class _Copied:
    """Stands where the parent keeps a CUDA event: a CPU copy is complete when it returns."""

    def query(self) -> bool:
        return True


class HiddenStatesConnector(ExampleHiddenStatesConnector):
    """Captures per request: the request's own blocks, its own token count, so that no other request's states can slip in."""

    def wait_for_save(self) -> None:
        # The parent creates a lock file for every request here; in one process there is nobody to wait on it.
        if self._kv_cache is None or self._kv_cache.is_cuda:
            super().wait_for_save()

    def _submit_async_write(self, pending: PendingSave) -> None:
        if self._kv_cache is None or self._kv_cache.is_cuda:
            super()._submit_async_write(pending)
            return
        # [blocks, positions, layers, H] is how the cache lies in memory: whole blocks are copied, once.
        blocks = self._kv_cache.transpose(1, 2).index_select(0, torch.tensor(pending.block_ids))
        TAKEN[pending.filename] = (pending.token_ids.clone(), blocks.flatten(0, 1)[: pending.token_ids.shape[0]])
        done: Any = _Copied()
        self._req_copy_events[pending.req_id] = done
