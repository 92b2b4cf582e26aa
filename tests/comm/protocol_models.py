"""The protocol's schedules as models for the explorer.

The steps of :mod:`tpoverlap.comm.protocol`, what each does to words, slots and the caller's buffers, and the ways in
which providers run them. A slot holds whole operations one after the other: the bytes of one operation's parts overlap
all parts of another, since sizes differ. Only a mailbox's pieces keep their places.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from explorer_model import Access, Model, Point, Step, Wait
from failure_models import FAILED, FAILED_AGAIN, RESET, Failing

from tpoverlap.comm import protocol
from tpoverlap.comm.protocol import EMPTY, FULL, Kind
from tpoverlap.comm.words import MASK, reached

Steps = tuple[protocol.Step, ...]
BELOW_WRAP = MASK - 1


@dataclass(frozen=True)
class Operation:
    """``schedule`` is one of the protocol's functions, of (rank, world size, pieces)."""

    schedule: Callable[[int, int, int], Steps]
    num_pieces: int = 2
    geometry: Hashable = None
    """Mailbox: operations of the same geometry put their pieces at the same places of the slot."""


@dataclass(frozen=True)
class Run:
    """``operations`` one after the other, on every rank.

    lanes: up and down run concurrently, each in order over all operations, beside the caller, as copy engines do; else
    one process a rank runs all steps in the order of the lists, as on CPU (or on a device that serializes streams).
    num_buffers: how many pairs of input and output the caller uses in turn, each as soon as its operation has ended.
    after_reset: the operations that follow where ``failing`` resets.

    The rest plants faults. edit: changes the list of (rank, index of the operation). waits_for_slots: how many slots
    writers believe that there are. joins_uploads: whether an operation ends for its caller only after its uploads.
    """

    world_size: int
    operations: tuple[Operation, ...]
    lanes: bool = True
    num_slots: int = 2
    num_buffers: int = 2
    first_number: int = BELOW_WRAP
    failing: Failing | None = None
    after_reset: tuple[Operation, ...] = ()
    fuse_waits: bool = True
    edit: Callable[[int, int, Steps], Steps] = lambda rank, n, steps: steps
    compare: Callable[[int, int], bool] = reached
    waits_for_slots: int | None = None
    joins_uploads: bool = True
    mailbox_word: Callable[[int, int, int], str] = lambda writer, reader, piece: f"box {writer}>{reader}.{piece}"

    def process(self, rank: int, lane: str) -> str:
        return f"rank {rank} {lane}" if self.lanes else f"rank {rank}"

    def model(self) -> Model:
        assert not (self.lanes and self.failing and self.failing.raises), "only a thread that runs all steps raises"
        ranks = [_Rank(self, rank) for rank in range(self.world_size)]
        processes = {name: steps for rank in ranks for name, steps in rank.processes.items()}
        words = {word: value for rank in ranks for word, value in rank.own_words.items()}
        if not self.failing:
            return Model(processes, words, fuse_waits=self.fuse_waits)
        return self.failing.model(processes, words, [rank.name("up") for rank in ranks])


def _has_state(value: int, target: int) -> bool:
    """A mailbox wait: the bitwise AND that stream memory operations offer."""
    return value & target != 0


@dataclass
class _Rank:
    """The processes of one rank, built operation by operation."""

    run: Run
    rank: int
    processes: dict[str, list[Step]] = field(default_factory=dict)
    own_words: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        run = self.run
        self.processes = {self.name(lane): [] for lane in ("up", "down", "caller")}
        if any(op.schedule is protocol.mailbox for op in run.operations):
            pieces = max(op.num_pieces for op in run.operations)
            boxes = [run.mailbox_word(self.rank, q, p) for q in self._peers for p in range(pieces)]
            self.own_words = dict.fromkeys(boxes, EMPTY)
        if any(op.schedule is not protocol.mailbox for op in run.operations):
            self.own_words |= {f"{word} {self.rank}": run.first_number for word in ("published", "consumed")}
        self._operations(run.operations, first_index=0)
        if run.failing:
            self._end_of_operations(FAILED)
            if run.failing.resets:
                self._reset(run.failing)
                self._operations(run.after_reset, first_index=len(run.operations))
                self._end_of_operations(FAILED_AGAIN)

    def name(self, lane: str) -> str:
        return self.run.process(self.rank, lane)

    @property
    def _peers(self) -> list[int]:
        return [q for q in range(self.run.world_size) if q != self.rank]

    def _add(self, lane: str, step: Step) -> None:
        self.processes[self.name(lane)].append(step)

    def _points(self, lane: str, *others: Point) -> tuple[Point, ...]:
        """Those points, unless the order of the process itself implies them."""
        return tuple((self.name(other), mark) for other, mark in others if self.name(other) != self.name(lane))

    # Operations

    def _operations(self, operations: tuple[Operation, ...], first_index: int) -> None:
        number = base = self.run.first_number
        self._joins: dict[int, tuple[Point, ...]] = {}
        for n, operation in enumerate(operations, start=first_index):
            number = (number + 1) & MASK
            schedule = operation.schedule(self.rank, self.run.world_size, operation.num_pieces)
            self._caller_turns_over(n)
            self._operation(n, number, base, operation, self.run.edit(self.rank, n, schedule))
            base = (base + protocol.pieces_published(schedule)) & MASK

    def _caller_turns_over(self, n: int) -> None:
        """The caller reads the output and overwrites the buffers that operation n shares with an ended one."""
        places = [f"{kind} buffer {n % self.run.num_buffers} of rank {self.rank}" for kind in ("input", "output")]
        fresh = f"the caller's data for operation {n}"
        touches = [Access(place, ("caller", n), "", (n, 0), True, fresh) for place in places]
        ended = self._points("caller", *self._joins.get(n - self.run.num_buffers, ()))
        self._copy("caller", f"the caller's preparation of operation {n}", touches, ended, mark=("prepared", n))

    def _operation(self, n: int, number: int, base: int, operation: Operation, steps: Steps) -> None:
        entered: set[str] = set()
        for k, step in enumerate(steps):
            behind = self._points(step.lane, *((steps[other].lane, (n, other)) for other in step.after))
            if step.lane not in entered:
                behind += self._points(step.lane, ("caller", ("prepared", n)))
                entered.add(step.lane)
            self._protocol_step(n, number, base, operation, step, behind, mark=(n, k))
        last = [("down", max(k for k, step in enumerate(steps) if step.lane == "down"))]
        uploads = [k for k, step in enumerate(steps) if step.kind in (Kind.UPLOAD, Kind.UPLOAD_RESULT)]
        if self.run.joins_uploads:
            last.append(("up", max(uploads)))
        self._joins[n] = tuple((lane, (n, k)) for lane, k in last)

    def _protocol_step(
        self,
        n: int,
        number: int,
        base: int,
        operation: Operation,
        step: protocol.Step,
        behind: tuple[Point, ...],
        mark: Hashable,
    ) -> None:
        run, lane, piece = self.run, step.lane, step.piece
        if step.kind in _COPIES:
            what = f"{step.kind.name} piece {piece} of operation {n}"
            self._copy(lane, what, self._touches(n, number, operation, step), behind, mark)
            return
        wait: Wait | None = None
        store: tuple[str, int] | None = None
        match step.kind:
            case Kind.WAIT_CONSUMED:
                slots = run.waits_for_slots or run.num_slots
                wait = Wait(f"consumed {step.rank}", (number - slots) & MASK, run.compare)
            case Kind.WAIT_PUBLISHED:
                wait = Wait(f"published {step.rank}", (base + step.count) & MASK, run.compare)
            case Kind.PUBLISH:
                store = (f"published {self.rank}", (base + step.count) & MASK)
            case Kind.CONSUME:
                store = (f"consumed {self.rank}", number)
            case Kind.WAIT_EMPTY:
                wait = Wait(run.mailbox_word(self.rank, step.rank, piece), EMPTY, _has_state)
            case Kind.FILL:
                store = (run.mailbox_word(self.rank, step.rank, piece), FULL)
            case Kind.WAIT_FULL:
                wait = Wait(run.mailbox_word(step.rank, self.rank, piece), FULL, _has_state)
            case Kind.DRAIN:
                store = (run.mailbox_word(step.rank, self.rank, piece), EMPTY)
        if wait:
            text = f"{step.kind.name} operation {n}: until {wait.word} has come to {wait.target}"
            self._add(lane, Step(text, (wait,), behind, escape=self._escape(n)))
        else:
            assert store is not None
            text = f"{step.kind.name} operation {n}: {store[0]} = {store[1]}"
            self._add(lane, Step(text, behind=behind, stores=(store,), mark=mark))

    def _copy(self, lane: str, what: str, touches: list[Access], behind: tuple[Point, ...], mark: Hashable) -> None:
        lenient = self.run.failing is not None and not self.run.failing.raises
        self._add(lane, Step(f"begins {what}", behind=behind, begins=tuple(touches), lenient=lenient))
        self._add(lane, Step(f"ends {what}", ends=tuple(touches), mark=mark, lenient=lenient))

    def _touches(self, n: int, number: int, operation: Operation, step: protocol.Step) -> list[Access]:
        """What one copying step reads and writes. Parts of a slot are (shard, piece), shard -1 where there are none."""
        me, peers, piece = self.rank, self._peers, step.piece
        sharded = any(s.kind is Kind.REDUCE for s in operation.schedule(me, self.run.world_size, operation.num_pieces))

        def slot(rank: int, shard: int, writes: bool) -> Access:
            boxed = operation.schedule is protocol.mailbox
            place = "mailbox slot" if boxed else f"slot {number % self.run.num_slots}"
            text = f"operation {n}, piece {piece} of rank {rank}" + (f", shard {shard}" if shard >= 0 else "")
            layout = operation.geometry if boxed else n
            return Access(f"{place} of rank {rank}", layout, (shard, piece), (n, phase), writes, text)

        def buffer(kind: str, part: str, writes: bool) -> Access:
            memory = f"{kind} buffer {n % self.run.num_buffers} of rank {me}"
            return Access(memory, n, (part, piece), (n, phase), writes, f"the {kind} of operation {n}, piece {piece}")

        phase = _COPIES[step.kind]
        match step.kind:
            case Kind.UPLOAD:
                shards = peers if sharded else [-1]
                return [buffer("input", "", False), *(slot(me, shard, True) for shard in shards)]
            case Kind.COLLECT:
                own = [buffer("input", "", False), buffer("output", "", True)]
                return [*own, *(slot(q, -1, False) for q in peers)]
            case Kind.REDUCE:
                own = [buffer("input", "", False), buffer("output", "own shard", True)]
                return [*own, *(slot(q, me, False) for q in peers)]
            case Kind.UPLOAD_RESULT:
                return [buffer("output", "own shard", False), slot(me, me, True)]
            case _:
                return [buffer("output", "other shards", True), *(slot(q, q, False) for q in peers)]

    # Failure

    def _escape(self, n: int) -> Hashable:
        if not (self.run.failing and self.run.failing.raises):
            return None
        return FAILED if n < len(self.run.operations) else FAILED_AGAIN

    def _end_of_operations(self, mark: Hashable) -> None:
        for lane in ("up", "down", "caller") if self.run.lanes else ("up",):
            self._add(lane, Step("has issued everything", mark=mark))

    def _reset(self, failing: Failing) -> None:
        leaders = [self.run.process(q, "up") for q in range(self.run.world_size)]
        drained = self._points("up", ("down", FAILED), ("caller", FAILED))
        self.processes[self.name("up")] += failing.reset(self.rank, leaders, drained, self.own_words)
        for lane in ("down", "caller") if self.run.lanes else ():
            self._add(lane, Step("goes on after the reset", behind=((self.name("up"), RESET),)))


_COPIES = {Kind.UPLOAD: 1, Kind.COLLECT: 2, Kind.REDUCE: 2, Kind.UPLOAD_RESULT: 3, Kind.COLLECT_RESULT: 4}
"""The steps that copy, with the place in an operation at which they touch memory."""
