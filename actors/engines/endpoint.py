"""Answers from an OpenAI-compatible server that returns token ids, as vLLM's does.

Prompts go to `/completions` as token ids. What comes back must be token ids too: the text of an answer, tokenized again, is often not
what the target produced. Requests are repeated with growing pauses where that may help: 429, 5xx, time-outs, cut connections.
"""

import asyncio
import os
import queue
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from actors.engines.base import Answer, AnswerSettings, finished_answer
from actors.errors import ActorError, EngineLost
from corpus.answers import FAILED

KEY_VARIABLE = "OPENAI_API_KEY"


@dataclass(frozen=True)
class EndpointSettings:
    """A server and how to use it. `url` is the API's base, as in http://host:8000/v1; the key comes from the environment alone."""

    url: str
    max_length: int  # tokens of prompt and answer together
    model: str | None = None  # the name it is served under; None: the only one
    in_flight: int = 64  # requests at a time
    retries: int = 8  # of one request, with pauses of 0.5 s doubling up to 8 s, or as long as the server asks for
    timeout_seconds: float = 600  # of one request


class _Refused(ActorError):
    """The server found fault with one request."""


class EndpointAnswerEngine:
    """One server; see `AnswerEngine`."""

    def __init__(self, settings: EndpointSettings, answers: AnswerSettings, probe: Sequence[int]) -> None:
        """Make sure that the server is there and returns token ids.

        Args:
            probe: token ids of some short prompt.

        Raises:
            EngineLost: it cannot be reached.
            ActorError: it refuses us, serves another model or shorter rows, or returns no token ids.
        """
        from openai import AsyncOpenAI

        self.settings, self.max_length, self._sampling = settings, settings.max_length, answers
        self._client = AsyncOpenAI(
            base_url=settings.url,
            api_key=os.environ.get(KEY_VARIABLE) or "none",
            max_retries=settings.retries,
            timeout=settings.timeout_seconds,
        )
        self._free = asyncio.Semaphore(settings.in_flight)
        self._running: dict[int, Future[Answer]] = {}
        self._finished: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._lost: EngineLost | None = None
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True, name=f"requests to {settings.url}").start()
        try:
            self.model = self._in_loop(self._find_model()).result()
            answer = self._in_loop(self._complete(list(probe), 1, self._client.with_options(max_retries=1))).result()
        except BaseException:
            self.close()
            raise
        if answer.error:
            raise ActorError(f"{settings.url} cannot answer a simple prompt: {answer.error}")
        self.name = f"{self.model} at {settings.url}"

    def ask(self, key: int, prompt: Sequence[int]) -> None:
        room = min(self._sampling.max_new_tokens, self.max_length - len(prompt))
        future = self._running[key] = self._in_loop(self._answer(list(prompt), room))
        future.add_done_callback(lambda _: self._finished.put(key))

    def answers(self) -> Iterator[tuple[int, Answer]]:
        while self._running:
            key = self._finished.get()
            future = self._running.pop(key)
            try:
                answer = future.result()
            except EngineLost as lost:
                # What is under way may still come; what waits is not sent any more.
                self._lost = lost
            else:
                yield key, answer
        if self._lost:
            raise self._lost

    def close(self) -> None:
        def stop() -> None:
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._loop.call_soon(self._loop.stop)

        self._loop.call_soon_threadsafe(stop)

    def _in_loop(self, work: Any) -> "Future[Any]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _answer(self, prompt: list[int], room: int) -> Answer:
        async with self._free:
            if self._lost:
                raise self._lost
            return await self._complete(prompt, room, self._client)

    async def _find_model(self) -> str:
        """The name to ask for, as the server knows it."""
        url, wanted = self.settings.url, self.settings.model
        reply = await self._request(self._client.with_options(max_retries=1).get("/models", cast_to=object))
        served = {
            str(m["id"]): m for m in (reply.get("data") if isinstance(reply, dict) else None) or [] if isinstance(m, dict) and "id" in m
        }
        if not served:
            raise ActorError(f"{url}/models names no model. Give the API's base, as in http://host:8000/v1.")
        if wanted not in served and (wanted or len(served) > 1):
            asked = f", not {wanted!r}" if wanted else ""
            raise ActorError(f"{url} serves {', '.join(sorted(served))}{asked}: choose with generator.endpoint_model=NAME.")
        name = wanted or next(iter(served))
        limit = served[name].get("max_model_len")
        if isinstance(limit, int) and limit < self.max_length:
            raise ActorError(
                f"{url} takes rows of {limit} tokens (its max_model_len), generator.max_length={self.max_length} asks for more. "
                f"Set generator.max_length={limit}, or restart the server with --max-model-len {self.max_length}."
            )
        return name

    async def _complete(self, prompt: list[int], room: int, client: Any) -> Answer:
        sampling = self._sampling
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": room,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "stop_token_ids": sorted(sampling.stop_token_ids),
            # Said, since a server fills in what its model's generation config recommends.
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "return_token_ids": True,
        }
        try:
            reply = await self._request(client.post("/completions", body=body, cast_to=object))
        except _Refused as refused:
            return Answer([], FAILED, str(refused))
        return self._read(reply, prompt)

    def _read(self, reply: Any, prompt: list[int]) -> Answer:
        url = self.settings.url
        try:
            choice = reply["choices"][0]
            ids, consumed, reason = choice.get("token_ids"), choice.get("prompt_token_ids"), choice["finish_reason"]
        except (KeyError, IndexError, TypeError, AttributeError):
            raise EngineLost(f"{url} answers with something else than a completion: {str(reply)[:200]!r}") from None
        if not isinstance(ids, list) or not all(isinstance(token, int) for token in ids):
            raise ActorError(
                f"{url} returns no token ids (`token_ids` of a choice), only text, and text tokenized again is often not what the target "
                "produced. Serve the target with vLLM (0.10.2 or newer), which honours `return_token_ids`."
            )
        if consumed is not None and consumed != prompt:
            raise ActorError(
                f"{url} read other tokens than it was given ({len(consumed)}, given {len(prompt)}): its answers are not to be trusted."
            )
        return finished_answer(ids, str(reason))

    async def _request(self, sent: Any) -> Any:
        """The parsed reply; what the client could not mend by repeating becomes EngineLost or a mistake that a person can mend."""
        from openai import APIConnectionError, APIError, APIStatusError, AuthenticationError, NotFoundError, PermissionDeniedError

        url = self.settings.url
        try:
            return await sent
        except (AuthenticationError, PermissionDeniedError) as error:
            key = f"the key in {KEY_VARIABLE}" if os.environ.get(KEY_VARIABLE) else f"requests without a key: set {KEY_VARIABLE}"
            raise ActorError(f"{url} refuses {key} ({error.status_code}).") from error
        except NotFoundError as error:
            raise ActorError(
                f"{url} has no such address or model ({_first_line(error)}). Give the API's base, as in http://host:8000/v1."
            ) from error
        except APIStatusError as error:
            if error.status_code < 500 and error.status_code not in (408, 409, 429):
                raise _Refused(f"{url} refuses a request ({error.status_code}): {_first_line(error)}") from error
            raise EngineLost(f"{url} answered {error.status_code} again and again: {_first_line(error)}") from error
        except APIConnectionError as error:
            raise EngineLost(f"{url} cannot be reached: {type(error.__cause__ or error).__name__}, {error.__cause__ or error}") from error
        except (APIError, ValueError) as error:
            raise EngineLost(f"{url} answers with something else than JSON: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
