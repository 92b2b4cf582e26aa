"""On which CPUs the threads that issue a device's work may be."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

_PCI, _CPUS = Path("/sys/bus/pci/devices"), Path("/sys/devices/system/cpu")
_NVIDIA, _DISPLAY_CLASS = "0x10de", "0x03"


def cpus_for(device: torch.device, rank: int, ranks: int) -> list[int]:
    """CPUs that this process may use, in order of preference: near the device, of no other GPU of the box and, while
    there are enough, of no other rank of the group. The first one is mostly of a core of its own. Empty where there are
    too few CPUs for that.

    rank, ranks: of the group, any of which may share the GPU. Where the system does not tell what is near, ranks are
    spread over all CPUs that the process may use.
    """
    properties: Any = torch.cuda.get_device_properties(device)
    address = ""
    if hasattr(properties, "pci_bus_id"):
        address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    return choose_cpus(os.sched_getaffinity(os.getpid()), address, rank, ranks, _PCI, _CPUS)


def choose_cpus(allowed: set[int], address: str, rank: int, ranks: int, pci: Path, cpu_folder: Path) -> list[int]:
    """address: of the device, as in ``pci``, the folder where the system lists PCI devices; ``cpu_folder``: that of its
    CPUs. Each GPU has a stretch of the cores near it for itself, or of their CPUs where there are fewer cores."""
    local = _read(pci / address / "local_cpulist") if address else ""
    near = allowed & parse_cpu_list(local)
    cpus = near or allowed
    all_gpus = sorted(
        folder.name
        for folder in (pci.iterdir() if pci.is_dir() else ())
        if _read(folder / "vendor") == _NVIDIA and _read(folder / "class").startswith(_DISPLAY_CLASS)
    )
    gpus = [gpu for gpu in all_gpus if not near or _read(pci / gpu / "local_cpulist") == local]
    place, sharers = (gpus.index(address), len(gpus)) if address in gpus else (0, 1)
    cores = _cores(cpus, cpu_folder)
    if len(cores) < sharers:
        cores = [[cpu] for cpu in sorted(cpus)]
    stretch = len(cores) // sharers
    if stretch == 0:
        return []
    own = cores[place * stretch : (place + 1) * stretch]
    # CPUs of one core slow each other down, so a second one of a core comes after all firsts.
    candidates = [core[i] for i in range(max(map(len, own))) for core in own if i < len(core)]
    # Where the box has a GPU for each rank, none shares this one's CPUs.
    takers = 1 if address in gpus and ranks <= len(all_gpus) else ranks
    count = max(1, len(candidates) // takers)
    # One further than the first of all: that CPU often serves the system's interrupts.
    return [candidates[(rank + 1 + takers * i) % len(candidates)] for i in range(count)]


def _cores(cpus: set[int], cpu_folder: Path) -> list[list[int]]:
    """The CPUs of each core, in order; a core each where the system does not tell."""
    cores = {}
    for cpu in cpus:
        siblings = parse_cpu_list(_read(cpu_folder / f"cpu{cpu}" / "topology" / "thread_siblings_list"))
        core = sorted(cpus & siblings) if cpu in siblings else [cpu]
        cores[core[0]] = core
    return [cores[first] for first in sorted(cores)]


def parse_cpu_list(text: str) -> set[int]:
    """ "0-3,8" -> {0, 1, 2, 3, 8}; empty for anything else."""
    cpus: set[int] = set()
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    except ValueError:
        return set()
    return cpus


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
