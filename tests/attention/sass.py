"""Reading disassembled kernels: the tools of the Triton package need no GPU."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path


def tool(name: str) -> str | None:
    """Path of cuobjdump or nvdisasm as Triton brings it, or None."""
    spec = importlib.util.find_spec("triton")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0], "backends", "nvidia", "bin", name)
    return str(path) if path.exists() else None


@dataclass(frozen=True)
class Instruction:
    """predicate: such as ``@!P0``, or empty. opcode: with its modifiers, such as ``LDG.E.128.SYS``."""

    predicate: str
    opcode: str
    operands: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.opcode.split(".")[0]


@dataclass(frozen=True)
class Kernel:
    """A kernel's instructions, and at which of them each label stands."""

    instructions: tuple[Instruction, ...]
    labels: dict[str, int]

    def loop(self, opcode: str) -> tuple[Instruction, ...]:
        """The backward jump's body that holds most of ``opcode``; the shortest among equals."""
        return max(self.loops(), key=lambda body: (sum(i.name == opcode for i in body), -len(body)))

    def loops(self) -> list[tuple[Instruction, ...]]:
        """The bodies of all backward jumps."""
        bodies = []
        for at, instruction in enumerate(self.instructions):
            target = re.search(r"`\((\.L\w+)\)", " ".join(instruction.operands))
            if instruction.name == "BRA" and target and self.labels.get(target[1], at + 1) <= at:
                bodies.append(self.instructions[self.labels[target[1]] : at + 1])
        return bodies


def disassemble(cubin: Path, kernel: str) -> Kernel:
    text = subprocess.run([str(tool("nvdisasm")), "-c", str(cubin)], check=True, capture_output=True, text=True).stdout
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    inside = False
    for line in text.splitlines():
        if line.startswith("\t.section\t"):
            inside = f".text.{kernel}," in line
        elif inside and (label := re.match(r"(\.L\w+):", line)):
            labels[label[1]] = len(instructions)
        elif inside and (found := re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;", line)):
            operands = tuple(operand.strip() for operand in found[3].split(",")) if found[3] else ()
            instructions.append(Instruction(found[1] or "", found[2], operands))
    return Kernel(tuple(instructions), labels)


def resources(cubin: Path) -> dict[str, dict[str, int]]:
    """Of each kernel: REG, STACK, SHARED (static), LOCAL, in bytes and registers a thread."""
    text = subprocess.run(
        [str(tool("cuobjdump")), "-res-usage", str(cubin)], check=True, capture_output=True, text=True
    ).stdout
    found = re.findall(r"Function (\w+):\s*\n\s*(.*)", text)
    return {name: {k: int(v) for k, v in re.findall(r"(\w+):(\d+)", usage)} for name, usage in found}


def mix(instructions: tuple[Instruction, ...]) -> str:
    """Names with their counts, most frequent first."""
    return ", ".join(f"{name} {count}" for name, count in Counter(i.name for i in instructions).most_common())
