"""Lossless batched speculative decoding; plain decoding is the same loop without a drafter."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from decoding.errors import DecodingError
from decoding.laps import Laps
from decoding.policies import Policy, RoundOutcome
from decoding.propose import DraftBlock, propose
from decoding.sampling import Draw, RandomStreams, sample
from decoding.settings import Generation, Round, SamplingSettings, Seconds
from decoding.target import TransformersTarget
from decoding.verify import Verdict, verify_greedy, verify_sampled
from drafters.drafter import Drafter

PREFILL_TOKENS = 4096
"""Padded prompt tokens in one prefill pass, so that masks and features stay small however long the prompts are."""
MOST_BEHIND = 32
"""Rounds without a draft after which the drafter's context is brought up to date all the same, so that their features stay few."""


@torch.inference_mode()
def speculative_decode(
    target: TransformersTarget,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    settings: SamplingSettings,
    request_ids: Sequence[int] | None = None,
    batch_size: int = 32,
    policy: Policy | None = None,
) -> list[Generation]:
    """Continue prompts with the target's own distribution, drafting ahead where there is a drafter.

    Args:
        target: with the drafter's captured layers.
        drafter: None decodes plainly, one token a round.
        prompts: token ids, none empty; of any lengths.
        settings: for all requests.
        request_ids: what the random draws of each request are keyed by, beside the seed. Give stable ids where prompts are sharded or
            batched in changing ways, and a request's output stays the same; default: the index in `prompts`.
        batch_size: requests decoded together at most.
        policy: how many tokens to draft and to have verified; default: whole blocks.

    Returns:
        One generation per prompt, in order.

    Raises:
        DecodingError: for empty prompts, ids outside the vocabulary, requests longer than the model's window, or a drafter of another
            target.
    """
    ids = list(range(len(prompts))) if request_ids is None else list(request_ids)
    _check(target, drafter, prompts, settings, ids)
    policy = policy or Policy()
    if drafter is not None and policy.needs_confidence and drafter.confidence is None:
        raise DecodingError(f"Policy {policy.name!r} reads confidences, and this drafter has no confidence head. Use a static length.")
    if batch_size < 1:
        raise DecodingError(f"batch_size={batch_size} decodes nothing. Use at least 1.")
    generations: list[Generation] = []
    for start in range(0, len(prompts), batch_size):
        part = slice(start, start + batch_size)
        generations += _Batch(target, drafter, prompts[part], settings, ids[part], policy).run()
    return generations


class _Batch:
    """Requests decoded together. Slot b of every tensor is request `requests[b]`; slots close up as requests finish.

    Those with the longest prompts come first: attention goes by neighbours of about one length, and what closes up comes from behind, so
    that nobody's neighbours get longer.
    """

    def __init__(
        self,
        target: TransformersTarget,
        drafter: Drafter | None,
        prompts: Sequence[Sequence[int]],
        settings: SamplingSettings,
        ids: Sequence[int],
        policy: Policy,
    ) -> None:
        count, block = len(prompts), drafter.config.block_length if drafter else 0
        room = max(len(prompt) for prompt in prompts) + settings.max_new_tokens + block
        # The host's side: who sits in which slot, how many tokens each may still get, and what happened.
        self.requests = np.argsort([-len(prompt) for prompt in prompts], kind="stable")
        self.remaining = np.full(count, settings.max_new_tokens)
        self.target, self.drafter, self.settings, self.prompts, self.policy = target, drafter, settings, prompts, policy
        self.device, self.block = target.device, block
        self.cache = target.new_cache(count, room)
        self.context = drafter.new_cache(count, room) if drafter else None
        self.behind: list[tuple[Tensor, Tensor, Tensor]] = []  # features, counts and tokens that the context lacks so far
        self.streams = RandomStreams(settings.seed, [ids[request] for request in self.requests], self.device)
        self.stop_ids = torch.tensor(settings.stop_ids, dtype=torch.int64, device=self.device)
        self.output = torch.zeros(count, settings.max_new_tokens + block + 1, dtype=torch.int64, device=self.device)
        self.anchor = torch.zeros(count, dtype=torch.int64, device=self.device)
        self.produced = torch.zeros(count, dtype=torch.int64, device=self.device)
        self.seconds = np.zeros((count, 5))  # see `Seconds`
        self.laps = Laps(self.device)
        # Requests, [B, 3] verified/accepted/committed, and of the block its tokens and confidence (distributions would fill the memory).
        self.log: list[tuple[np.ndarray, np.ndarray, Tensor | None, Tensor | None]] = []
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.stopped = np.zeros(count, dtype=bool)

    def run(self) -> list[Generation]:
        self.policy.begin()
        start = self.laps.now()
        self._prefill()
        self.seconds[:, [0, 4]] += (self.laps.now() - start) / len(self.prompts)
        while len(self.requests):
            self._round()
        rounds = self._rounds()
        return [
            Generation(tokens, rounds[i], "stop" if self.stopped[i] else "length", Seconds(*self.seconds[i].tolist()))
            for i, tokens in enumerate(self.tokens)
        ]

    def _prefill(self) -> None:
        """Run the prompts through target and drafter context, and draw each request's first token."""
        prompts = [torch.tensor(list(self.prompts[request])) for request in self.requests]
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        padded = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True).to(self.device)
        step = max(1, PREFILL_TOKENS // len(prompts))
        last = torch.zeros((), device=self.device)
        for begin in range(0, padded.shape[1], step):
            chunk = padded[:, begin : begin + step]
            counts = (lengths - begin).clamp(0, chunk.shape[1])
            states = self.target.forward(self.cache, chunk, counts, capture=self.drafter is not None)
            self._commit(states.features, counts, chunk)
            self._extend()
            hidden = states.hidden[torch.arange(len(counts), device=self.device), (counts - 1).clamp(min=0)]
            last = torch.where((lengths > begin)[:, None], hidden, last)  # in the end, that of each prompt's last piece
        logits = self.target.logits(last)
        if self.settings.greedy:
            first = logits.argmax(-1)
        else:
            first = sample(self.settings.probs(logits), self.streams.uniform(Draw.FINAL, 1)[:, 0])
        self.anchor = first
        self.output[:, 0] = first
        self.produced += 1
        self.remaining -= 1
        stopped = torch.isin(first, self.stop_ids).cpu().numpy()
        self._leave(stopped, stopped | (self.remaining == 0))

    def _round(self) -> None:
        """Draft, choose what to verify, verify, commit."""
        start = self.laps.restart()
        self.streams.next_round()
        requests = self.requests
        # A request that may still get m tokens has m - 1 drafts verified at most: the round's last token is the target's own.
        drafted = self.policy.plan(requests, np.minimum(self.remaining - 1, self.block))
        self.laps.lap("other")
        block = self._propose(drafted)
        drafted_at = self.laps.lap("other")

        confidence = None if block is None or block.confidence is None else block.confidence.cpu().numpy()
        lengths = self.policy.lengths(requests, drafted, confidence)
        width, counts = int(lengths.max()), torch.from_numpy(lengths).to(self.device)

        positions = self.cache.lengths
        tokens = self.anchor[:, None] if block is None else torch.cat([self.anchor[:, None], block.tokens[:, :width]], dim=1)
        self.laps.lap("other")
        states = self.target.forward(self.cache, tokens, counts + 1, capture=self.drafter is not None)
        columns = torch.arange(width + 1, device=self.device)
        uniform = int(lengths.min()) == width
        hidden = states.hidden.flatten(0, 1) if uniform else states.hidden[columns <= counts[:, None]]
        logits = self.target.logits(hidden)
        self.laps.lap("verify")
        verdict = self._verify(block, counts, logits)

        # [B, w + 1] the round's tokens: accepted drafts, then the target's own; cut after the first stop token.
        emitted = tokens.roll(-1, dims=1).scatter(1, verdict.accepted[:, None], verdict.token[:, None])
        stops = torch.isin(emitted, self.stop_ids) & (columns <= verdict.accepted[:, None])
        committed = torch.where(stops.any(1), stops.int().argmax(1), verdict.accepted) + 1
        self.output.scatter_(1, self.produced[:, None] + columns, emitted)
        self.produced += committed
        self.cache.truncate(positions + committed)
        self.anchor = verdict.token
        report = torch.stack([torch.minimum(verdict.accepted, committed), committed, stops.any(1).long()]).cpu().numpy()

        accepted, kept, stopped = report[0], report[1], report[2].astype(bool)
        kept_of_block = (None, None) if block is None else (block.tokens, block.confidence)
        self.log.append((requests, np.stack([lengths, accepted, kept], axis=1), *kept_of_block))
        self.remaining = self.remaining - kept
        self._commit(states.features, committed, tokens)
        self._leave(stopped, stopped | (self.remaining == 0))
        end = self.laps.lap("other")
        self.policy.observe(RoundOutcome(requests, drafted, lengths, accepted, confidence, end - start, drafted_at - start))
        parts = self.laps.seconds
        spent = np.array([0.0, parts["draft"], parts["head"], parts["verify"], self.laps.lap("other") - start])
        self.seconds[requests] += spent / len(requests)

    def _propose(self, drafted: np.ndarray) -> DraftBlock | None:
        """Draft for the requests that the policy drafts for."""
        width = int(drafted.max())
        if self.drafter is None or self.context is None or width == 0:
            return None
        self._extend()
        context, anchor, positions, streams = self.context, self.anchor, self.cache.lengths, self.streams
        # A request near its end has no room for a draft, but taking it out costs more than drafting for it.
        some = np.flatnonzero(drafted) if (drafted[self.remaining > 1] == 0).any() else None
        if some is not None:
            rows = torch.from_numpy(some).to(self.device)
            context, anchor, positions, streams = context.part(rows), anchor[rows], positions[rows], streams.part(rows)
        lengths = None
        if self.policy.shortens:
            lengths = torch.from_numpy((drafted if some is None else drafted[some]).clip(1)).to(self.device)
        block = propose(self.drafter, context, anchor, positions, width, self.settings, streams, lengths, self.laps)
        return block if some is None else block.spread(rows, len(drafted))

    def _verify(self, block: DraftBlock | None, counts: Tensor, logits: Tensor) -> Verdict:
        if self.settings.greedy:
            drafts = torch.empty(len(counts), 0, dtype=torch.int64, device=self.device) if block is None else block.tokens
            return verify_greedy(drafts, counts, logits.argmax(-1))
        probs = self.settings.probs(logits)
        final = self.streams.uniform(Draw.FINAL, 1)[:, 0]
        if block is None or block.probs is None:
            return Verdict(counts, sample(probs, final))
        return verify_sampled(block.tokens, counts, block.probs, probs, self.streams.uniform(Draw.ACCEPT, block.tokens.shape[1]), final)

    def _commit(self, features: Tensor | None, counts: Tensor, tokens: Tensor) -> None:
        """Newly committed positions, whose features the drafter's context will want; the anchor has not been through the target yet."""
        if features is not None:
            self.behind.append((features, counts, tokens))
        if len(self.behind) > MOST_BEHIND:
            self._extend()

    def _extend(self) -> None:
        """Bring the drafter's context up to date. Rounds without a draft have no use for that, and all at once it costs less."""
        if self.drafter is None or self.context is None or not self.behind:
            return
        features, counts, tokens = self.behind[0]
        if len(self.behind) > 1:
            features, tokens = (torch.cat([part[i] for part in self.behind], dim=1) for i in (0, 2))
            given = torch.cat([torch.arange(part[2].shape[1], device=self.device) < part[1][:, None] for part in self.behind], dim=1)
            counts = given.sum(1)
            # Each request's own ones first, in their order.
            order = (~given).byte().argsort(dim=1, stable=True)[:, : int(counts.max())]
            features, tokens = features.take_along_dim(order[..., None], 1), tokens.take_along_dim(order, 1)
        self.behind.clear()
        self.drafter.extend_context(self.context, features, counts, tokens)

    def _leave(self, stopped: np.ndarray, finished: np.ndarray) -> None:
        """Take finished requests out of the batch."""
        if not finished.any():
            return
        gone = np.flatnonzero(finished)
        lengths = self.produced.tolist()
        for slot in gone:
            self.tokens[self.requests[slot]] = self.output[slot, : lengths[slot]].tolist()
        self.stopped[self.requests[stopped]] = True
        # Those in the last slots move into the freed ones, so that few rows of the caches are copied.
        room = len(finished) - len(gone)
        order = np.arange(room)
        order[finished[:room]] = room + np.flatnonzero(~finished[room:])
        stay = torch.from_numpy(order).to(self.device)
        self.requests, self.remaining = self.requests[order], self.remaining[order]
        self.anchor, self.produced, self.output = self.anchor[stay], self.produced[stay], self.output[stay]
        self.streams.select(stay)
        self.behind = [(features[stay], counts[stay], tokens[stay]) for features, counts, tokens in self.behind]
        if room:
            self.cache.select(order.tolist())
            if self.context is not None:
                self.context.select(order.tolist())

    def _rounds(self) -> list[list[Round]]:
        """Sort the log by request."""
        rounds: list[list[Round]] = [[] for _ in self.prompts]
        for requests, numbers, tokens, confidence in self.log:
            drafts = [] if tokens is None else tokens.tolist()
            sure = [] if confidence is None else confidence.tolist()
            for slot, (request, (drafted, accepted, committed)) in enumerate(zip(requests.tolist(), numbers.tolist(), strict=True)):
                certainty = tuple(sure[slot][:drafted]) if sure else ()
                draft = tuple(drafts[slot][:drafted]) if drafts else ()
                rounds[request].append(Round(drafted, accepted, committed, certainty, draft))
        return rounds


def _check(
    target: TransformersTarget,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    settings: SamplingSettings,
    ids: Sequence[int],
) -> None:
    if len(ids) != len(prompts):
        raise DecodingError(f"{len(ids)} request ids were given for {len(prompts)} prompts.")
    if drafter is not None:
        _check_drafter(target, drafter)
    for index, prompt in enumerate(prompts):
        if not len(prompt):
            raise DecodingError(f"Prompt {index} is empty. A request needs at least one token.")
        if min(prompt) < 0 or max(prompt) >= target.vocab_size:
            raise DecodingError(f"Prompt {index} has token ids outside 0..{target.vocab_size - 1}: it was made with another tokenizer.")
        if len(prompt) + settings.max_new_tokens > target.max_positions:
            raise DecodingError(
                f"Prompt {index} has {len(prompt)} tokens; with max_new_tokens={settings.max_new_tokens} it exceeds the target's "
                f"{target.max_positions} positions. Lower max_new_tokens or drop the prompt."
            )


def _check_drafter(target: TransformersTarget, drafter: Drafter) -> None:
    ours = {"hidden_size": target.config.hidden_size, "vocab_size": target.vocab_size, "captured_layers": target.captured_states}
    for name, own in ours.items():
        theirs = getattr(drafter.config, name)
        if own != theirs:
            raise DecodingError(
                f"The drafter was made for {name}={theirs}, the target has {own}. Use the target that the drafter was trained on."
            )
