"""The engine that the settings name."""

from actors.engines.base import EngineSettings, HiddenStateEngine


def make_engine(settings: EngineSettings) -> HiddenStateEngine:
    """Build the engine that `settings.engine` names, inside the process that will use it."""
    if settings.engine == "hf":
        from actors.engines.hf import HfEngine

        return HfEngine(settings)
    from actors.engines.vllm import VllmPrefillEngine

    return VllmPrefillEngine(settings)
