"""The scheduler: admits requests into slots, computes prompts, draws one token for every running sequence per step.

Invariants: a token is drawn by the current weights, from keys and values that they alone have computed; with `keep`,
those of a sequence that was running when they came stay as they were. A row is drawn from only when all its tokens
but the last are cached. Tokens leave through the outbox in order, each chunk of one version. A step either succeeds or
raises; the caller then calls `fail`, which answers every request.

The core knows nothing of asyncio: `submit` and `abort` may be called from another thread while `step` runs, everything
else between two steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from rillflow.engine.embedded.cache import Batch, make_cache
from rillflow.engine.embedded.forward import Reading, make_forward
from rillflow.engine.embedded.sampling import Array, Grammars, Matcher, draw
from rillflow.engine.embedded.slots import MIN_SHARED, Counts, Match, Outbox, Slots, Ticket
from rillflow.engine.embedded.weights import WeightSlots, Write
from rillflow.engine.experts import Recorder, pack
from rillflow.errors import EngineError, WeightsError
from rillflow.types import Chunk, EngineStats, FinishReason

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rillflow.contracts import Patch, Tensors

# Tokens of prompts computed per step: enough to keep the device busy, few enough that running sequences go on.
_PREFILL_TOKENS = {"cpu": 1024, "cuda": 8192}


class Core:
    def __init__(
        self,
        model: PreTrainedModel,
        version: int,
        slots: int,
        context: int,
        *,
        exact: bool,
        keep: bool,
        grammars: Grammars,
        record: bool = False,
    ) -> None:
        """With `record`, the last chunk of an answer has the experts that the model chose for each token."""
        self.version = version
        self.outbox = Outbox()
        model.train(False)
        self._exact = exact
        self._keep = keep
        self._grammars = grammars
        self._recorder = Recorder(model) if record else None
        self._slots = Slots(slots, context, self._recorder.width if self._recorder is not None else 0)
        self._cache = make_cache(model, slots, context)
        self._forward = make_forward(model, self._cache, lean=not exact and not record)
        self._model = model
        self._readings: dict[Ticket, Reading] = {}  # of the sequences that run, in exact mode
        self._weights = WeightSlots(model)
        self._seated: list[Ticket | None] = [None] * slots
        self._waiting: deque[Ticket] = deque()
        self._aborted: deque[Ticket] = deque()
        self._budget = _PREFILL_TOKENS[self._cache.device.type]
        self._counts = Counts()
        self._owed: dict[Ticket, int] = {}  # lengths at the last load of the sequences that are computed again
        self._stained = False  # a failed step may have left values in the cache that are not finite

    # ------------------------------------------------------------ requests

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._aborted or self._slots.active.any())

    def submit(self, ticket: Ticket) -> None:
        self._waiting.append(ticket)

    def abort(self, ticket: Ticket) -> None:
        self._aborted.append(ticket)

    def fail(self) -> list[Ticket]:
        """Give up every request, after a step raised; the engine is empty and usable afterwards."""
        lost = [ticket for ticket in self._seated if ticket is not None] + list(self._waiting)
        for ticket in lost:
            ticket.ended = True
        self._waiting.clear()
        for slot in np.flatnonzero(self._slots.active):
            self._slots.release(int(slot))
        self._seated = [None] * self._slots.count
        self._slots.forget()
        self._readings.clear()
        self._stained = True
        return lost

    def stats(self) -> EngineStats:
        counts = self._counts
        return EngineStats(
            version=self.version,
            running=int(self._slots.active.sum()),
            waiting=len(self._waiting),
            slots=self._slots.count,
            generated_tokens=counts.generated,
            prefilled_tokens=counts.prefilled,
            reused_tokens=counts.reused,
            steps=counts.steps,
            loads=counts.loads,
        )

    # ------------------------------------------------------------ weights

    def load(self, tensors: Tensors, version: int) -> None:
        """Take new weights between two tokens; no running sequence is dropped. Either they are computed again under the
        new weights, or they keep what they have cached."""
        self._take(partial(self._weights.copy, tensors), version)

    def prepare(self, patch: Patch) -> list[Write]:
        """Return the writes that `patch` takes. May be called from another thread while `step` runs."""
        return self._weights.prepare(patch)

    def patch(self, writes: Sequence[Write], base: int, version: int) -> None:
        """Take new weights, as `load` does, given those that differ from version `base`."""
        if base != self.version:
            raise WeightsError(
                f"a patch of version {base} does not fit version {self.version}, which is served",
                "load the whole version",
            )
        self._take(partial(self._weights.write, writes), version)

    def _take(self, change: Callable[[], None], version: int) -> None:
        self.flush()  # tokens that are not sent yet belong to the old version
        change()
        self._readings.clear()
        self._forward.refresh()
        self.version = version
        self._counts.loads += 1
        self._mark_seams()
        if self._keep:
            self._slots.outdate()
        else:
            self._compute_again()

    def _compute_again(self) -> None:
        """Forget everything cached: running sequences are computed again from their ids."""
        self._owed = {ticket: int(self._slots.length[ticket.slot]) for ticket in self._seated if ticket is not None}
        self._slots.forget()
        self._stained = True
        if not self._exact:
            self._share_again()

    @torch.inference_mode()
    def scores(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the log-probs of each prompt's tokens but the first, under the weights that are served. All prompts
        have the same length. Running and cached sequences are not affected."""
        ids_RT = torch.tensor(prompts, device=self._cache.device)
        logprob_RTV = self._forward.logits(ids_RT)[:, :-1].float().log_softmax(-1)
        scores: list[list[float]] = logprob_RTV.gather(-1, ids_RT[:, 1:, None])[:, :, 0].tolist()
        return scores

    def free(self) -> None:
        """Release the memory of the cache; the next step allocates it again and computes running sequences again."""
        self._readings.clear()
        self._cache.free()
        self._compute_again()

    @property
    def cache_bytes(self) -> int:
        """Memory of the cache that is allocated now."""
        return self._cache.bytes

    @property
    def owes(self) -> bool:
        """Return whether a sequence that is computed again after the last load has had no token since."""
        self._owed = {
            ticket: length
            for ticket, length in self._owed.items()
            if not ticket.ended and self._slots.length[ticket.slot] <= length
        }
        return bool(self._owed)

    def _mark_seams(self) -> None:
        for ticket in self._seated:
            if ticket is not None and self._slots.length[ticket.slot] > len(ticket.request.tokens):
                ticket.seam = "weights"

    def _share_again(self) -> None:
        """Let running sequences, which are computed again after a load, share their common prefixes."""
        slots = self._slots
        for slot in np.flatnonzero(slots.active):
            prefix = slots.tokens[slot, : slots.length[slot] - 1]
            self._follow(int(slot), slots.match(prefix, np.arange(slots.count) < slot))

    # ------------------------------------------------------------ one step

    @torch.inference_mode()
    def step(self) -> None:
        """Admit, compute prompts up to the budget, then draw one token for every row that is ready."""
        self._counts.steps += 1
        if self._stained:
            self._cache.clear()
            self._stained = False
        self._reap()
        self._hand_over()
        self._admit()
        if self._exact:
            self._step_exact()
            return
        self._compact()
        self._prefill()
        self._hand_over()
        self._decode()

    def flush(self) -> None:
        """Put all tokens that callers do not have yet into the outbox."""
        slots = self._slots
        for slot in np.flatnonzero(slots.active & (slots.length > slots.sent)):
            self._send(int(slot), None)

    def _send(self, slot: int, finish: FinishReason | None) -> None:
        slots, ticket = self._slots, self._seated[slot]
        if ticket is None:
            return
        part = slice(int(slots.sent[slot]), int(slots.length[slot]))
        slots.sent[slot] = part.stop
        chunk = Chunk(
            tokens=slots.tokens[slot, part].tolist(),
            logprobs=slots.logprobs[slot, part].tolist(),
            raw_logprobs=slots.raw_logprobs[slot, part].tolist(),
            version=self.version,
            finish=finish,
            seam=ticket.seam if part.start < part.stop else "",
            experts=self._experts(slot) if finish in ("stop", "length") else b"",
        )
        if chunk.tokens:
            ticket.seam = ""
        self.outbox.chunks.append((ticket, chunk))

    def _experts(self, slot: int) -> bytes:
        """Return the recorded choices of all tokens of a sequence but the last, which no forward pass has read."""
        if self._recorder is None:
            return b""
        return pack(self._slots.experts[slot, : self._slots.length[slot] - 1])

    def _finish(self, slot: int, reason: FinishReason) -> None:
        self._send(slot, reason)
        ticket = self._seated[slot]
        if ticket is not None:
            ticket.ended = True
        self._seated[slot] = None
        self._slots.release(slot)

    def _reap(self) -> None:
        while self._aborted:
            ticket = self._aborted.popleft()
            if ticket.ended:
                continue
            if ticket.slot >= 0:
                self._finish(ticket.slot, "abort")
            else:
                self._waiting.remove(ticket)
                ticket.ended = True
                empty = Chunk(tokens=[], logprobs=[], raw_logprobs=[], version=self.version, finish="abort")
                self.outbox.chunks.append((ticket, empty))

    # ------------------------------------------------------------ admission and prefixes

    def _admit(self) -> None:
        free = self._slots.count - int(self._slots.active.sum())
        while self._waiting and free:
            self._seat(self._waiting[0])
            self._waiting.popleft()  # only now: had seating it failed, `fail` would still find it and answer it
            free -= 1

    def _seat(self, ticket: Ticket) -> None:
        slots, tokens = self._slots, ticket.request.tokens
        best = Match(-1, 0) if self._exact else slots.match(np.asarray(tokens[:-1], np.int32), slots.everyone)
        slot = self._choose(best)
        cached = best.shared if slot == best.slot else 0
        slots.occupy(slot, tokens, ticket.request.sampling, ticket.seed, cached)
        ticket.slot = slot
        self._seated[slot] = ticket
        if ticket.matcher is not None:
            slots.constrained[slot] = True
            self._grammars.ask([ticket.matcher])
        self._counts.reused += cached
        if slot != best.slot:
            self._follow(slot, best)

    def _choose(self, best: Match) -> int:
        """Return a slot for a new sequence: that of the resident sequence it continues, else the oldest one."""
        slots = self._slots
        continues = best.shared * 2 >= slots.cached[best.slot]
        if best.shared and not slots.active[best.slot] and continues:
            return best.slot
        return slots.vacant(keep=best.slot if best.shared >= MIN_SHARED else -1)

    def _follow(self, slot: int, best: Match) -> None:
        """Take the prefix from the slot that has most of it, or will have it."""
        if best.shared >= MIN_SHARED:
            self._slots.leader[slot], self._slots.shared[slot] = best
            self._hand_over_to(slot)

    def _hand_over(self) -> None:
        for slot in np.flatnonzero(self._slots.leader >= 0):
            self._hand_over_to(int(slot))

    def _hand_over_to(self, slot: int) -> None:
        """Copy the shared prefix once the leader has it, or whatever it had when it ended."""
        slots = self._slots
        leader, shared = int(slots.leader[slot]), int(slots.shared[slot])
        ready = int(slots.cached[leader])
        if ready < shared and slots.active[leader]:
            return
        slots.leader[slot] = -1
        count = min(ready, shared)
        if count > slots.cached[slot]:
            self._counts.reused += count - int(slots.cached[slot])
            self._cache.copy(leader, slot, count)
            slots.experts[slot, :count] = slots.experts[leader, :count]
            slots.cached[slot] = count

    def _compact(self) -> None:
        """Move the highest sequences into holes below, so that decoding reads a dense run of slots."""
        slots = self._slots
        span = slots.span()
        holes = np.flatnonzero(~slots.active[:span]).tolist()
        if len(holes) <= span // 16:
            return
        for hole in holes:
            top = slots.span() - 1
            if top <= hole:
                return
            self._move_down(top, hole)

    def _move_down(self, top: int, hole: int) -> None:
        slots, ticket = self._slots, self._seated[top]
        if slots.cached[hole]:
            self._cache.swap(hole, top, int(max(slots.cached[hole], slots.cached[top])))
        else:
            self._cache.copy(top, hole, int(slots.cached[top]))
        slots.swap(hole, top)
        self._seated[hole], self._seated[top] = ticket, None
        if ticket is not None:
            ticket.slot = hole

    # ------------------------------------------------------------ forwards

    def _prefill(self) -> None:
        """Compute prompts (and, after a load, whole sequences), the longest first, bounded by the budget."""
        slots = self._slots
        missing = np.where(slots.active & (slots.leader < 0), slots.length - slots.cached, 0)
        rows = np.flatnonzero(missing > 1)
        if not rows.size:
            return
        rows = rows[np.argsort(-missing[rows], kind="stable")]
        width = min(int(missing[rows[0]]), self._budget)
        rows = rows[: max(1, self._budget // width)]
        self._prefill_rows(rows, np.minimum(missing[rows], width))

    def _prefill_rows(self, rows: Array, counts: Array) -> None:
        slots = self._slots
        starts = slots.cached[rows]
        columns = np.minimum(starts[:, None] + np.arange(int(counts.max())), slots.context - 1)
        ids = np.maximum(slots.tokens[rows[:, None], columns], 0)  # padding may read an unused column
        logits = self._forward(self._cache.prefill_batch(rows, ids, starts, counts))
        if self._recorder is not None:
            row_N, step_N = np.nonzero(np.arange(ids.shape[1]) < counts[:, None])
            chosen_NW = self._recorder.last()[row_N * ids.shape[1] + step_N]
            slots.experts[rows[row_N], starts[row_N] + step_N] = chosen_NW
        slots.cached[rows] = starts + counts
        self._counts.prefilled += int(counts.sum())
        whole = slots.cached[rows] == slots.length[rows]
        if whole.any():
            self._draw(rows[whole], logits if whole.all() else logits[torch.from_numpy(whole)])

    def _decode(self) -> None:
        """One token for every ready row. Rows in between that are not ready compute along and change nothing."""
        slots = self._slots
        ready = slots.active & (slots.length - slots.cached == 1)
        rows = np.flatnonzero(ready)
        if not rows.size:
            return
        count = self._cache.rows(int(rows[-1]) + 1)
        logits = self._forward(self._decode_batch(ready[:count]))
        if self._recorder is not None:
            slots.experts[rows, slots.cached[rows]] = self._recorder.last()[rows]
        slots.cached[rows] += 1
        self._draw(rows, logits if len(rows) == count else logits[torch.from_numpy(rows)])

    def _decode_batch(self, ready: Array) -> Batch:
        slots = self._slots
        positions = np.where(ready, slots.cached[: len(ready)], 0)
        ids = np.maximum(slots.tokens[np.arange(len(ready)), positions], 0)
        return self._cache.decode_batch(ids, positions, ready)

    def _step_exact(self) -> None:
        """Advance one sequence at a time, read as the trainer reads it: no result depends on other sequences, and both
        get the same bits."""
        slots = self._slots
        self._readings = {ticket: reading for ticket, reading in self._readings.items() if not ticket.ended}
        for slot in np.flatnonzero(slots.active):
            ticket = self._seated[slot]
            assert ticket is not None, "an active slot belongs to a request"
            reading = self._readings.setdefault(ticket, Reading(self._model))
            missing = int(slots.length[slot] - slots.cached[slot])
            self._counts.prefilled += missing if missing > 1 else 0
            tokens = torch.from_numpy(slots.tokens[slot, : slots.length[slot]].astype(np.int64))
            logits = reading(tokens.to(self._cache.device))
            slots.cached[slot] = slots.length[slot]
            self._draw(np.asarray([slot]), logits)

    def _draw(self, rows: Array, logits: torch.Tensor) -> None:
        slots = self._slots
        matched = self._matched(rows)
        drawn = draw(logits, slots.settings(rows), self._grammars.allowed(matched, logits) if matched else None)
        if not np.isfinite(drawn.raw_logprobs).all():
            raise EngineError(f"the logits of version {self.version} are not finite", "load weights that are finite")
        stopped = slots.append(rows, drawn.tokens, drawn.logprobs, drawn.raw_logprobs)
        self._counts.generated += len(rows)
        ended = stopped | (slots.length[rows] >= slots.limit[rows])
        if matched:
            self._grammars.advance(matched, drawn.tokens, stopped, ended)
        for index in np.flatnonzero(ended):
            self._finish(int(rows[index]), "stop" if stopped[index] else "length")

    def _matched(self, rows: Array) -> list[tuple[int, Matcher]]:
        """Return the places among `rows` that are under a grammar."""
        if not self._slots.constrained.any():
            return []
        places = np.flatnonzero(self._slots.constrained[rows])
        tickets = [(int(place), self._seated[rows[place]]) for place in places]
        return [
            (place, ticket.matcher) for place, ticket in tickets if ticket is not None and ticket.matcher is not None
        ]
