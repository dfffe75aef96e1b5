"""Which residual streams of the target an EAGLE-3 head reads."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specreg.config_reader import ConfigReader
from specreg.errors import CheckpointError
from specreg.model_config import text_config_of

if TYPE_CHECKING:
    from specreg_eagle.eagle3_config import Eagle3Config

__all__ = ["aux_layer_ids", "default_aux_layer_ids", "num_target_layers", "stated_aux_layer_ids"]

logger = logging.getLogger(__name__)

# In the order in which they are looked at: section, key, and what is added to come to entry ids.
PLACES = (
    ("", "eagle_aux_hidden_state_layer_ids", 0),
    ("eagle_config", "eagle_aux_hidden_state_layer_ids", 0),
    ("dflash_config", "target_layer_ids", 1),
    ("", "dspark_target_layer_ids", 1),
    ("", "target_layer_ids", 1),
    ("dflash_config", "layer_ids", 0),
    ("eagle_config", "layer_ids", 0),
)


def num_target_layers(target_config: Mapping[str, Any]) -> int | None:
    """Decoder layers of the target; None when its config is not known, or does not say."""
    text = text_config_of(target_config)
    for key in ("num_hidden_layers", "n_layer", "num_layers"):
        value = text.get(key)
        if type(value) is int and value > 0:
            return value
    return None


def stated_aux_layer_ids(config: ConfigReader) -> tuple[int, ...] | None:
    """Entry ids as the first place that has any states them; None where none does.

    Another place that says something else is told in a warning.

    Raises:
        CheckpointError: a place holds no list of integers.
    """
    found: list[tuple[str, tuple[int, ...]]] = []
    for section, key, offset in PLACES:
        if section and section not in config:
            continue
        ids = (config.section(section) if section else config).integers(key)
        if ids is not None:
            name = f"{section}.{key}" if section else key
            found.append((name, tuple(i + offset for i in ids)))
    if not found:
        return None
    first, ids = found[0]
    for name, others in found[1:]:
        if sorted(others) != sorted(ids):
            logger.warning(
                "%s: %s names the entries %s of the target's layers, %s names %s; the first is "
                "taken",
                config.where,
                first,
                list(ids),
                name,
                list(others),
            )
    return ids


def default_aux_layer_ids(num_layers: int) -> tuple[int, int, int]:
    """What every reader takes where a config states nothing."""
    return (2, num_layers // 2, num_layers - 3)


def aux_layer_ids(config: Eagle3Config, num_layers: int | None) -> tuple[int, ...]:
    """Entry ids in ascending order, whatever the order in the config.

    Args:
        config: of the head.
        num_layers: of the target; None when it is not known, which leaves defaults empty.

    Raises:
        CheckpointError: ids that repeat or lie beyond the target's layers, or another number of
            them than the config says.
    """
    ids = config.stated_aux_ids
    if ids is None:
        if num_layers is None:
            return ()
        ids = default_aux_layer_ids(num_layers)
        allowed = "distinct ids; the default is 2, half of the layers, and 3 before the last"
        if len(set(ids)) < len(ids) or min(ids) < 0:
            raise _error(
                config.where, f"no ids, {num_layers} target layers, so {list(ids)}", allowed
            )
    if repeated := sorted({i for i in ids if ids.count(i) > 1}):
        raise _error(config.where, f"{list(ids)}, {repeated} repeated", "distinct ids")
    if num_layers is not None and (beyond := [i for i in ids if i > num_layers]):
        raise _error(config.where, f"{list(ids)}, {beyond} beyond", f"0 to {num_layers}")
    if config.num_aux_states is not None and config.num_aux_states != len(ids):
        raise _error(
            config.where,
            f"{len(ids)} ids {list(ids)}{' by default' if config.stated_aux_ids is None else ''}",
            f"{config.num_aux_states}, as the config says elsewhere",
        )
    return tuple(sorted(ids))


def check_projection(width: int, ids: Sequence[int], target_hidden_size: int, where: str) -> None:
    """Whether `fc` takes as many states as there are ids. Raises `CheckpointError`."""
    if width == len(ids) * target_hidden_size:
        return
    num_states = width / target_hidden_size
    raise CheckpointError(
        "the projection of an EAGLE-3 head takes another number of target states than it has ids",
        where=where,
        got=f"fc.weight of {width} inputs, {num_states:g} states of {target_hidden_size}, for the "
        f"{len(ids)} ids {list(ids)}; allowed: one id a state",
        fix="state the ids that it was trained with in eagle_aux_hidden_state_layer_ids",
    )


def _error(where: str, got: str, allowed: str) -> CheckpointError:
    return CheckpointError(
        "the target layers that an EAGLE-3 head reads are not stated correctly",
        where=f"{where}, eagle_aux_hidden_state_layer_ids",
        got=f"{got}; allowed: {allowed}",
        fix="state the ids that it was trained with, as the entries of the target's layers",
    )
