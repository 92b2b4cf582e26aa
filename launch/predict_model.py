"""How long tensor-parallel prefill takes: a few kernels, three resources, and the order in which pieces use them.

A chunk of a prompt runs through the layers, each a mixer (attention and its projections) and an MLP, with an all-reduce
after each. Run whole, that is the sum of all parts. In pieces, compute and link are resources that serve first come,
first served, and the host, which issues both, is a third:
:func:`tpoverlap.microbatch.bound.pieces_time`, with each piece's own times.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from predict_tables import KERNELS, Curve, DeviceTables, Kernel, Transport, WaveAttention

from tpoverlap.errors import ConfigError
from tpoverlap.microbatch.bound import Segment, pieces_time
from tpoverlap.microbatch.split import split_tokens

VALUE_BYTES = 2  # of a hidden state's value, FP16 or BF16


@dataclass(frozen=True)
class ModelShape:
    """A dense decoder. attention_every: full attention in every such layer (0: in none), a token mixer with the same
    projections and no quadratic part in the others. gated: the mixer has a gate as wide as its queries."""

    layers: int
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    attention_every: int = 1
    gated: bool = False

    @property
    def mixer_weights(self) -> int:
        """Weights of one layer's mixer projections."""
        queries = self.q_heads * self.head_dim
        return self.hidden * ((3 if self.gated else 2) * queries + 2 * self.kv_heads * self.head_dim)

    @property
    def mlp_weights(self) -> int:
        return 3 * self.hidden * self.intermediate

    def has_attention(self, layer: int) -> bool:
        return self.attention_every > 0 and layer % self.attention_every == self.attention_every - 1


SHAPES = {
    "qwen3.8-27b": ModelShape(64, 5120, 24, 4, 256, 17408, attention_every=4, gated=True),
    "qwen3-32b": ModelShape(64, 5120, 64, 8, 128, 25600),
    "llama-70b": ModelShape(80, 8192, 64, 8, 128, 28672),
    "tiny": ModelShape(4, 64, 4, 2, 64, 128, attention_every=2, gated=True),
}


@dataclass(frozen=True)
class Prediction:
    """Seconds. compute_s, communication_s, issue_s: of the same pieces, each resource (device, link, host) alone and
    undisturbed. limit_s: the busiest of them, chunk by chunk, which no order of the pieces can beat."""

    seconds: float
    compute_s: float
    communication_s: float
    issue_s: float
    limit_s: float

    @classmethod
    def sum(cls, parts: Iterable[Prediction]) -> Prediction:
        return cls(*(sum(column) for column in zip(*map(_fields, parts), strict=True)))


@dataclass(frozen=True)
class BestCut:
    """cuts: first tokens of the pieces after the first; empty where a batch is best run whole."""

    cuts: tuple[int, ...]
    seconds: float


class Predictor:
    """Predicts one model on one set of tables, split over ``tp`` ranks.

    The tables are of one model and number of ranks; others are derived: projections and dequantization by the weights a
    rank holds, attention by its query heads and head dimension, all-reduces by 2 (n - 1) / n, which is what every rank
    sends and receives, for each payload byte, in ring and two-shot all-reduces and in an exchange of two.
    Raises ConfigError for a model of the tables that is not known, and a number of ranks that does not fit the heads.
    """

    def __init__(self, shape: ModelShape, tables: DeviceTables, tp: int = 2) -> None:
        if tables.shape not in SHAPES:
            raise ConfigError(f"the tables are of shape {tables.shape!r}, known are {', '.join(SHAPES)}")
        of_tables = SHAPES[tables.shape]
        if tp < 2 or shape.q_heads % tp or max(shape.kv_heads, tp) % min(shape.kv_heads, tp):
            raise ConfigError(
                f"{tp} ranks do not fit {shape.q_heads} query and {shape.kv_heads} KV heads: give a number from 2 on "
                "that divides the query heads, and of which the KV heads are a multiple or a divisor"
            )
        self._shape, self._tables, self._tp = shape, tables, tp
        self._mixer_scale = shape.mixer_weights / tp / (of_tables.mixer_weights / tables.ranks)
        self._mlp_scale = shape.mlp_weights / tp / (of_tables.mlp_weights / tables.ranks)
        self._width_scale = shape.head_dim / of_tables.head_dim
        self._heads_scale = shape.q_heads / tp / (of_tables.q_heads / tables.ranks)
        self._bytes_scale = _sent(tp) / _sent(tables.ranks)

    def whole(self, transport: str, context: int, tokens: int) -> Prediction:
        """A batch of one request's ``tokens`` after ``context`` others, run as it is."""
        return self.split(transport, context, tokens, ())

    def split(self, transport: str, context: int, tokens: int, cuts: Sequence[int]) -> Prediction:
        """The same in pieces that begin at the cuts, first come, first served. Cuts outside the batch do not count."""
        link = self._link(transport)
        pieces = [
            (context + piece.token_range[0], piece.token_range[1] - piece.token_range[0])
            for piece in split_tokens([0, tokens], [context + tokens], cut=cuts, num_pieces=len(cuts) + 1)
        ]
        overlaps = len(pieces) > 1
        plain, attending, mlp = (
            [self._segment(link, part, *piece, first=k == 0, overlaps=overlaps) for k, piece in enumerate(pieces)]
            for part in ("mixer", "attention", "mlp")
        )
        attends = [self._shape.has_attention(layer) for layer in range(self._shape.layers)]
        rows = itertools.chain.from_iterable((attending if full else plain, mlp) for full in attends)
        outside_s = self._tables.per_chunk
        seconds = outside_s + pieces_time(rows, self._tables.hand_over if overlaps else 0.0)
        occurrences = ((plain, attends.count(False)), (attending, attends.count(True)), (mlp, len(attends)))
        compute_s = outside_s + sum(count * part.compute_s for row, count in occurrences for part in row)
        communication_s = sum(count * part.communication_s for row, count in occurrences for part in row)
        issue_s = sum(count * part.issue_s for row, count in occurrences for part in row)
        on_device_s = max(compute_s, communication_s) if overlaps else compute_s + communication_s
        return Prediction(seconds, compute_s, communication_s, issue_s, max(on_device_s, issue_s))

    def prefill(self, transport: str, tokens: int, chunk: int, num_pieces: int = 1) -> Prediction:
        """A prompt in chunks, each in equal pieces (1: whole). Chunks follow each other without overlap."""
        of_chunks = [
            self.split(transport, context, count, equal_cuts(count, num_pieces))
            for context, count in chunks(tokens, chunk)
        ]
        logits_s = self._tables.per_prompt
        return Prediction.sum([*of_chunks, Prediction(logits_s, logits_s, 0.0, 0.0, logits_s)])

    def best_cut(self, transport: str, context: int, tokens: int, cut_multiple: int = 128) -> BestCut:
        """The cuts into 1 to 4 pieces at multiples of ``cut_multiple`` that are predicted to be fastest.

        From equal pieces on, one cut after the other moves to its best place until none does: a local optimum.
        """
        places = range(cut_multiple, tokens, cut_multiple)
        found = [BestCut((), self.whole(transport, context, tokens).seconds)]
        for count in range(2, min(4, len(places) + 1) + 1):
            cuts = [places[round(len(places) * k / count - 0.5)] for k in range(1, count)]
            best = BestCut(tuple(cuts), self.split(transport, context, tokens, cuts).seconds)
            moved = True
            while moved:
                moved = False
                for at in range(count - 1):
                    for place in places:
                        cuts = [*best.cuts]
                        cuts[at] = place
                        if cuts != sorted(set(cuts)):
                            continue
                        tried = BestCut(tuple(cuts), self.split(transport, context, tokens, cuts).seconds)
                        if tried.seconds < best.seconds:
                            best, moved = tried, True
            found.append(best)
        return min(found, key=lambda one: one.seconds)

    def min_tokens(self, transport: str, chunk: int, cut_multiple: int = 128) -> int | None:
        """The fewest tokens, a multiple of ``cut_multiple``, from which on up to a chunk two equal pieces of a batch at
        the start of a prompt are faster than the batch run whole. None: not even the chunk is."""
        least = None
        for tokens in range(chunk // cut_multiple * cut_multiple, 0, -cut_multiple):
            whole = self.whole(transport, 0, tokens).seconds
            if tokens < 2 or self.split(transport, 0, tokens, equal_cuts(tokens, 2)).seconds >= whole:
                break
            least = tokens
        return least

    def attention_s(self, context: int, tokens: int) -> float:
        """Of one layer on one rank, alone."""
        attention = self._tables.attention
        if not isinstance(attention, WaveAttention):
            return attention.at(tokens, context) * self._heads_scale * self._width_scale
        group = self._shape.q_heads // self._shape.kv_heads
        kv_heads = self._shape.kv_heads / self._tp
        # A KV head that several ranks share serves each rank a part of its group.
        blocks = -(-tokens * group * min(1.0, kv_heads) // attention.rows) * max(1.0, kv_heads)
        return attention.waves(round(blocks)) * attention.seconds_per_key * self._width_scale * (context + tokens / 2)

    def _link(self, transport: str) -> Transport:
        if transport not in self._tables.transports:
            known = ", ".join(self._tables.transports)
            raise ConfigError(f"the tables {self._tables.name} have no transport {transport!r}: give one of {known}")
        return self._tables.transports[transport]

    def _segment(
        self, link: Transport, part: str, context: int, tokens: int, *, first: bool, overlaps: bool
    ) -> Segment:
        """part: "mixer", "attention" (a mixer with it) or "mlp"."""
        scale, curve = (self._mlp_scale, self._tables.mlp) if part == "mlp" else (self._mixer_scale, self._tables.mixer)
        times: dict[Kernel, float] = dict.fromkeys(KERNELS, 0.0)
        times["linear"] = scale * curve.at(tokens)
        dequantization = self._tables.dequantization
        if dequantization is not None and (first or dequantization.per == "piece"):
            times["dequantization"] = scale * (dequantization.mlp if part == "mlp" else dequantization.mixer)
        if part == "attention":
            times["attention"] = self.attention_s(context, tokens)
        compute_s = sum(times.values())
        slowdown = sum(times[kernel] * link.slowdown[kernel] for kernel in KERNELS) / compute_s
        communication_s = link.all_reduce.at(tokens * self._shape.hidden * VALUE_BYTES) * self._bytes_scale
        communication_s *= link.beside_compute if overlaps else 1.0
        host = self._tables.host
        issue_s = 0.0 if host is None else vars(host)[part] + link.issue
        return Segment(compute_s, communication_s, slowdown, issue_s)


def chunks(tokens: int, chunk: int) -> Iterator[tuple[int, int]]:
    """(tokens before it, its tokens) of each chunk of a prompt."""
    for context in range(0, tokens, chunk):
        yield context, min(chunk, tokens - context)


def equal_cuts(tokens: int, num_pieces: int) -> tuple[int, ...]:
    """First tokens of the pieces after the first, the longer pieces first; fewer where there are not as many tokens."""
    borders = (-(-tokens * k // num_pieces) for k in range(1, num_pieces))
    return tuple(cut for cut, _ in itertools.groupby(borders) if 0 < cut < tokens)


def at_speed(gb_per_s: float) -> Curve:
    """All-reduces of a link that moves so many payload bytes a second."""
    return Curve(((gb_per_s * 1e9, 1.0),))


def _sent(ranks: int) -> float:
    return 2 * (ranks - 1) / ranks


def _fields(prediction: Prediction) -> tuple[float, ...]:
    return tuple(vars(prediction).values())
