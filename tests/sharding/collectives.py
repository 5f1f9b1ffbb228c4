"""Reads the text of a compiled program: which collectives it has, of what size, in what chain."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

COLLECTIVE = re.compile(
    r"(all-reduce|all-gather|all-to-all|ragged-all-to-all|reduce-scatter|collective-permute|collective-broadcast)"
    r"(-start)?$"
)
UNKNOWN = 1000
"""Turns of a loop whose trip count the compiler does not know."""


class Instruction(NamedTuple):
    name: str
    shape: str
    opcode: str
    operands: list[str]
    calls: dict[str, list[str]]  # attribute -> computations
    trips: int


class Collective(NamedTuple):
    opcode: str
    shape: str
    size: int  # bytes of the result on each device


def _balanced(text: str, start: int) -> int:
    """Where the bracket that opens at ``start`` closes."""
    depth = 0
    for index in range(start, len(text)):
        depth += (text[index] in "({") - (text[index] in ")}")
        if depth == 0:
            return index
    raise ValueError(text)


CALLS = re.compile(
    r"(to_apply|calls|condition|body|true_computation|false_computation|branch_computations|called_computations)"
    r"=(\{[^}]*\}|%?[\w.\-]+)"
)


def _instruction(line: str) -> Instruction | None:
    match = re.match(r"(?:ROOT )?%?([\w.\-]+) = ", line)
    if not match:
        return None
    rest = line[match.end() :]
    stop = _balanced(rest, 0) + 1 if rest[0] == "(" else re.search(r"\s", rest).start()
    shape, rest = rest[:stop], rest[stop:].strip()
    opening = rest.index("(")
    closing = _balanced(rest, opening)
    operands = re.findall(r"%?([A-Za-z_][\w.\-]*)", rest[opening : closing + 1])
    attributes = rest[closing + 1 :]
    calls = {name: re.findall(r"%?([\w.\-]+)", value) for name, value in CALLS.findall(attributes)}
    trips = re.search(r'known_trip_count"?:\{"?n"?:"?(\d+)', attributes)
    return Instruction(match[1], shape, rest[:opening], operands, calls, int(trips[1]) if trips else UNKNOWN)


def computations(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """The instructions of each computation in order, and the name of the entry."""
    found: dict[str, list[Instruction]] = {}
    entry, own = "", None
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        head = re.match(r"(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{\s*$", line)
        if head:
            own = found.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        elif own is not None and (instruction := _instruction(line.strip())):
            own.append(instruction)
    return found, entry


def size(shape: str) -> int:
    """Bytes of an array, or of all arrays of a tuple."""
    total = 0
    for kind, bits, dimensions in re.findall(r"\b(pred|bf|f|s|u)(\d*)\w*\[([\d,]*)\]", shape):
        count = 1
        for dimension in filter(None, dimensions.split(",")):
            count *= int(dimension)
        total += count * (int(bits) // 8 if bits else 1)
    return total


def collectives(text: str) -> list[Collective]:
    """All of a program, in whatever branch they are."""
    found = computations(text)[0]
    every = (one for body in found.values() for one in body)
    return [
        Collective(one.opcode, one.shape, size(one.shape)) for one in every if COLLECTIVE.match(one.opcode)
    ]


def longest_chain(text: str) -> int:
    """The greatest number of collectives that wait for each other; of a conditional the longer
    branch counts, of a loop its body as often as it turns."""
    found, entry = computations(text)
    known: dict[str, int] = {}

    def chain_of(name: str) -> int:
        if name not in known:
            known[name] = max(_chains(found[name], chain_of), default=0)
        return known[name]

    return chain_of(entry)


def _chains(body: list[Instruction], chain_of) -> Iterator[int]:
    depth: dict[str, int] = {}
    for one in body:
        before = max((depth[operand] for operand in one.operands if operand in depth), default=0)
        own = 1 if COLLECTIVE.match(one.opcode) else max(map(chain_of, _called(one)), default=0)
        if one.opcode == "while":
            own *= one.trips
        depth[one.name] = before + own
        yield depth[one.name]


def _called(one: Instruction) -> list[str]:
    return [] if COLLECTIVE.match(one.opcode) else [name for names in one.calls.values() for name in names]
