"""The main job: tensor-parallel prefill of a text, its chunks in overlapping pieces, then greedy generation.

    torchrun --standalone --nproc-per-node 2 launch/prefill.py

On CPU tensors unless there is a GPU for each rank. ``--help`` lists the options.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack

from job_machine import choose_device, set_threads
from job_world import JobError, World
from prefill_check import check_against_transformers, check_agreement, check_numbers
from prefill_options import Options, parse_options
from prefill_passes import generate, prefill
from prefill_report import collect, report
from prefill_setup import allocate_cache, load_model, make_pass, read_request

from tpoverlap.comm import GroupCoordinator
from tpoverlap.config import HostReduceConfig
from tpoverlap.errors import TpOverlapError


def main() -> int:
    """Runs this rank's part of the job; returns its exit status."""
    options = parse_options()
    # Models are read from disk only, and what transformers would warn about is checked here.
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    rank = os.environ.get("RANK", "0")
    try:
        with ExitStack() as stack:
            world = World.join()
            stack.callback(world.leave)
            run(options, world, stack)
    except (TpOverlapError, OSError) as error:
        if not isinstance(error, JobError) or str(error.reporter) == rank:
            print(f"prefill: rank {rank}: {error}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        if rank == "0":
            print("prefill: interrupted", file=sys.stderr, flush=True)
        return 130
    return 0


def run(options: Options, world: World, stack: ExitStack) -> None:
    device = world.on_each(lambda: choose_device(options.device, world))
    set_threads(options.threads, world)
    found = world.on_first(lambda: read_request(options, world, device))
    request = world.share(None if found is None else found.request)

    config = HostReduceConfig(timeout_s=options.timeout_s)
    link = options.emulate_link_gbps
    group = GroupCoordinator(range(world.size), world.local_rank, device, config, emulate_link_gbps=link)
    stack.callback(group.destroy)
    model = world.on_each(lambda: load_model(options, request, group, device))
    tables = world.on_each(lambda: allocate_cache(options, request, model))

    if options.check:
        world.say(check_against_transformers(world, model, tables, request, options.weights))
    passes = [make_pass(name, options, request, group, model, tables) for name in options.passes]
    for one in passes:
        stack.callback(one.executor.close)
        one.warm_up(min(options.overlap_min_tokens, options.chunk), decodes=options.generate > 1)
    gap = prefill(passes, model, request.prompt, options.chunk)
    generate(passes, options.generate)
    reports = [collect(world, one) for one in passes]
    world.on_first(lambda: report(options, world, found, reports, group.served))
    check_numbers(world, passes)
    if len(passes) > 1:
        world.say(check_agreement(world, passes, gap, model.dtype))


if __name__ == "__main__":
    sys.exit(main())
