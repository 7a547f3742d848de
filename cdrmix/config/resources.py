"""The `resources` section: how much of a machine a run may take, and how far it reads ahead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from cdrmix.config.section import Section

Auto = Literal["auto"]
# Share of the memory that a plan may fill where none is given.
_MEMORY_SHARE = 0.9
# Keys that were in other sections before they came here.
_OLDER_NAMES = {
    ("training", "memory_share"): "memory_share",
    ("data", "prefetch_batches"): "prefetch_batches",
}


class ResourcesConfig(Section):
    """Use of a machine. `auto` is adapted while the run goes on, by each rank for itself; nothing
    here changes what is trained, and what is given stays as it is."""

    memory_share: Annotated[float, Field(gt=0, le=1)] | Auto = "auto"
    """Share of a device's memory, and of a host's, that a plan, a probe and reading ahead may fill
    (ratio); auto: 0.9."""
    prefetch_batches: Annotated[int, Field(ge=0)] | Auto = "auto"
    """Batches that are read ahead; 0: none, the step waits for each. auto: as many as keep the step
    from waiting, within a part of the memory that memory_share leaves."""
    reader_threads: Annotated[int, Field(ge=1)] | Auto = "auto"
    """Threads of each rank that read ahead (count); auto: more while they wait for disk or network
    and the step waits for them."""
    queue_size: Annotated[int, Field(ge=1)] | Auto = "auto"
    """Most samples of a rank that are read ahead or being read, though always a batch (samples);
    auto: those of prefetch_batches."""
    probe: Literal["cached", "again"] = "cached"
    """With training.micro_batch_size = auto. cached: a size that was found before, on such a device
    for such a model and layout, is taken. again: it is looked for at each start."""

    @property
    def share(self) -> float:
        """Share of the memory that may be filled."""
        return _MEMORY_SHARE if self.memory_share == "auto" else self.memory_share


def older_names(values: Any) -> dict[str, str]:
    """Older names that plain values of a configuration give, each with the name of today."""
    if not isinstance(values, Mapping):
        return {}
    return {
        f"{section}.{key}": f"resources.{name}"
        for (section, key), name in _OLDER_NAMES.items()
        if isinstance(within := values.get(section), Mapping) and within.get(key) is not None
    }


def with_newer_names(values: Any) -> Any:
    """Moves the values of older names to the section `resources`, so that each has one place.

    Raises ValueError where the new name has another value. A value that the key does not take stays
    where it was given, to be refused there.
    """
    resources = values.get("resources") if isinstance(values, Mapping) else None
    if not older_names(values) or not isinstance(resources, Mapping | None):
        return values
    moved = dict(resources or {})
    made = dict(values)
    for (section, key), name in _OLDER_NAMES.items():
        within = values.get(section)
        if not isinstance(within, Mapping) or (value := within.get(key)) is None:
            continue
        try:
            ResourcesConfig.model_validate({name: value})
        except ValidationError:
            continue
        if moved.setdefault(name, value) != value:
            raise ValueError(
                f"{section}.{key} = {value} and resources.{name} = {moved[name]} are two values "
                f"for one thing. Give resources.{name} alone, and leave its older name "
                f"{section}.{key} out, or null"
            )
        made[section] = {k: v for k, v in within.items() if k != key}
    return made | {"resources": moved}
