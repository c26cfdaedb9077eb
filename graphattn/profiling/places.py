"""Where in a step a node belongs: bucket, stage, layer, part, from the ranges of its capture."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

STAGES = ("admit", "prepare", "model", "sample", "commit", "draft")  # in the order of the step
NO_STAGE = "outside the stages"
_LAYER = re.compile(r"layer\.(\d+)")
_ATTEND = re.compile(r"(attend|attend_latent)\.(\d+)")


@dataclass(frozen=True, slots=True)
class Place:
    """`part` is what is named inside a layer, or inside a stage outside its layers; "" the rest."""

    bucket: str | None
    stage: str
    layer: int | None = None
    part: str = ""

    @property
    def has_stage(self) -> bool:
        """Whether more is known than the capture."""
        return self.stage != NO_STAGE


def place_of(names: Sequence[str]) -> Place | None:
    """The place under ranges of these names, outermost first; None without any."""
    if not names:
        return None
    bucket, inside = _captured(names)
    stage, layer = NO_STAGE, None
    parts: list[str] = []
    if inside and not (_LAYER.fullmatch(inside[0]) or _ATTEND.fullmatch(inside[0])):
        stage, *inside = inside
    for name in inside:
        if found := _LAYER.fullmatch(name):
            layer, parts = int(found[1]), []
        elif found := _ATTEND.fullmatch(name):
            layer = int(found[2]) if layer is None else layer
            parts.append(found[1])
        else:
            parts.append(name)
    if layer is not None and stage == NO_STAGE:
        stage = "model"  # of somebody's own loop
    return Place(bucket, stage, layer, "/".join(parts))


def _captured(names: Sequence[str]) -> tuple[str | None, list[str]]:
    """The bucket of the innermost capture, and the ranges inside it."""
    for index in range(len(names) - 1, -1, -1):
        if names[index].startswith("capture."):
            return names[index].removeprefix("capture."), list(names[index + 1 :])
    return None, list(names)


def stage_order(stage: str) -> tuple[int, str]:
    """Sorts stages as a step runs them, others behind."""
    return (STAGES.index(stage) if stage in STAGES else len(STAGES), stage)
