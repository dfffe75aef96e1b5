"""Which states of the target a block drafter reads: two ways to count layers, one meaning."""

from __future__ import annotations

from itertools import pairwise

from specreg.errors import CheckpointError
from specreg_dflash.config_form import ConfigForm

__all__ = ["default_target_layers", "tapped_layers"]


def default_target_layers(num_target_layers: int, num_draft_layers: int) -> list[int]:
    """Layers whose outputs are read where a Hugging Face config names none: as the library does."""
    if num_draft_layers == 1:
        return [num_target_layers // 2]
    span = num_target_layers - 4
    return [round(1 + index * span / (num_draft_layers - 1)) for index in range(num_draft_layers)]


def tapped_layers(form: ConfigForm, num_draft_layers: int) -> tuple[int, ...]:
    """Entry ids, ascending: id `e` is the residual stream that enters layer `e` of the target.

    `target_layer_ids` count outputs, so that i stands for entry i + 1. Entries as they stand are
    `aux_hidden_state_layer_ids`, `eagle_aux_hidden_state_layer_ids` and `layer_ids`.

    Raises:
        CheckpointError: keys that contradict each other, ids that do not ascend, or none at all.
    """
    told: dict[str, tuple[int, ...]] = {}
    for reader, key, shift in (
        (form.top, "eagle_aux_hidden_state_layer_ids", 0),
        (form.top, "aux_hidden_state_layer_ids", 0),
        (form.section, "target_layer_ids", 1),
        (form.top, "target_layer_ids", 1),
        (form.section, "layer_ids", 0),
    ):
        ids = reader.integers(key)
        if ids is not None:
            place = key if reader is form.top else f"{reader.where}, {key}"
            told[place] = tuple(layer + shift for layer in ids)
    if not told and not form.is_speculators and "num_target_layers" in form.top:
        depth = form.top.integer("num_target_layers")
        by_library = default_target_layers(depth, num_draft_layers)
        chosen = form.section.get("target_layer_ids", by_library)
        told["num_target_layers"] = tuple(layer + 1 for layer in chosen)
    if len(set(told.values())) != 1 or () in told.values():
        _refuse(
            form,
            "the config of a drafter does not tell which states of the target it reads",
            f"entry ids by key: {told or 'none'}",
            "aux_hidden_state_layer_ids, or target_layer_ids one lower",
        )
    ids = next(iter(told.values()))
    if any(after <= before for before, after in pairwise(ids)):
        _refuse(
            form,
            "the tapped layers of a drafter are in no order that all libraries agree on",
            f"entry ids {list(ids)}",
            "ids that ascend",
        )
    return ids


def _refuse(form: ConfigForm, what: str, got: str, allowed: str) -> None:
    raise CheckpointError(
        what,
        where=f"{form.top.where}, tapped layers",
        got=f"{got}; allowed: {allowed}",
        fix="use the config.json that belongs to the weights",
    )
