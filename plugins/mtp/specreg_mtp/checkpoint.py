"""MTP modules in a checkpoint of their own, or in the target's."""

from __future__ import annotations

import logging
import re
from functools import cached_property

import torch

from specreg.checkpoint import Checkpoint
from specreg.errors import CheckpointError
from specreg.nn.vocabulary_ends import VocabularyEnds
from specreg.speculator import SpeculatorContext, TargetView
from specreg.weights import Ignored, load_weights
from specreg_mtp.conventions import Family
from specreg_mtp.module import MTPDrafter, MTPModule
from specreg_mtp.settings import MTPSettings
from specreg_mtp.tensor_names import ModuleTensor, TensorNames, plain_name

__all__ = ["MTPCheckpoint"]

logger = logging.getLogger(__name__)

# Parts of a decoder layer that say what it is, where it is not one of those that are offered.
_UNKNOWN_LAYERS = (
    (
        re.compile(
            r"(mlp\.(gate|router|experts|shared_experts?|shared_expert_gate)|moe|share_expert"
            r"|block_sparse_moe)\..*"
        ),
        "a mixture of experts",
    ),
    (re.compile(r"self_attn\.(q_a_|q_b_|kv_a_|kv_b_).*"), "latent attention (MLA)"),
    (re.compile(r"(linear_attn|mamba|mixer|conv)\..*"), "a recurrent or convolution state"),
)
_QUANTISED = re.compile(
    r".*(_scale|_scale_inv|scales|qweight|qzeros|g_idx|weight_packed|zero_point)"
)
_ENDS = {
    "model.embed_tokens.weight": "ends.embed_tokens.weight",
    "lm_head.weight": "ends.lm_head.weight",
}
NUM_NAMED = 5


class MTPCheckpoint:
    """The file, its convention and its modules.

    Args:
        context: of the speculator.

    Attributes:
        family: of the modules.
        num_modules: that run: one a step where the file holds several and K is above 1.
        tensors_of_target: names that are read of the target's own checkpoint.

    Raises:
        CheckpointError: there are no modules, fewer than the run needs, or of a kind that is not
            offered.
    """

    def __init__(self, context: SpeculatorContext) -> None:
        assert context.draft_path is not None
        speculative = context.config.speculative
        assert speculative is not None
        self.context = context
        self.is_in_target = speculative.model is None
        self.file = Checkpoint(context.draft_path)
        self.settings = MTPSettings(
            context.draft_config,
            speculative.num_speculative_tokens,
            f"{context.draft_path}/config.json",
        )
        self.family, self.names = self._recognised()
        self._found = self.names.modules(self.file.names)
        self.num_modules = self._num_modules()
        self._check_layers()
        self.tensors_of_target = frozenset(
            name for name in self.file.names if self.is_in_target and self.names.read(name)
        )

    def load(self, target: TargetView) -> MTPDrafter:
        """The drafter with its weights, sharing with the target what the file does not hold.

        Raises:
            CheckpointError: tensors or config do not fit each other, or the target.
        """
        settings, context = self.settings, self.context
        shapes = settings.shapes(self.family, self.num_modules)
        if not shapes[0].intermediate_size:
            settings.decoder.integer("intermediate_size")
        if shapes[0].hidden_size != target.hidden_size:
            raise self._error(
                "the MTP modules are not of this target",
                f"hidden_size {shapes[0].hidden_size}; allowed: the target's {target.hidden_size}",
            )
        vocab_size = target.vocab_size
        if not self.is_in_target:
            vocab_size = settings.vocab_size or vocab_size
        ends = VocabularyEnds(
            vocab_size, vocab_size, shapes[0].hidden_size, str(self.file.directory)
        )
        drafter = MTPDrafter(
            ends,
            [
                MTPModule(self.family.convention, shape, index, vocab_size, context.device)
                for index, shape in enumerate(shapes)
            ],
        )
        absent = {f"ends.{name}": reason for name, reason in ends.absent.items()}
        absent |= {f"steps.{i}.head.weight": "the target scores" for i in range(len(shapes))}
        load_weights(
            drafter,
            self.file,
            self._rename,
            absent=absent,
            file_name=self._file_name,
            dtype=context.dtype,
            device=context.device,
        )
        self.__dict__.pop("_target_head", None)  # only heads are compared with it
        ends.attach(target)
        self._report()
        return drafter

    def _recognised(self) -> tuple[Family, TensorNames]:
        """The family whose names the file has."""
        families = self.settings.families
        readers = [
            TensorNames(family.convention, self._num_target_layers(family)) for family in families
        ]
        for family, names in zip(families, readers, strict=True):
            if names.modules(self.file.names):
                return family, names
        wanted = " or ".join(names.write(0, "projection", "weight") for names in readers)
        raise self._error(
            "the target's checkpoint holds no MTP modules"
            if self.is_in_target
            else "the checkpoint holds no MTP modules",
            f"{len(self.file.names)} tensors, none of a module; allowed: {wanted}, and the rest "
            "of it",
            "name a checkpoint of MTP modules with the key 'model', or one of the target that kept "
            "them: conversions and quantised exports often drop them",
        )

    def _num_target_layers(self, family: Family) -> int:
        return self.settings.num_target_layers if "{n}" in family.convention.names["layer"] else 0

    def _num_modules(self) -> int:
        """How many run, as the file has them: an export may declare more than it holds."""
        num_steps = self.settings.num_steps or 1
        if len(self._found) == 1 or not self.family.convention.is_numbered:
            needed = 1
        else:
            needed = self.settings.num_used
        held = [index for index in self._found if index < needed]
        if len(held) < needed:
            raise self._error(
                "the checkpoint holds fewer MTP modules than steps of a proposal",
                f"modules {list(self._found)} for num_speculative_tokens {num_steps}; allowed: "
                f"modules {list(range(needed))}, or fewer tokens",
                "lower num_speculative_tokens, or use a complete checkpoint",
            )
        return needed

    def _check_layers(self) -> None:
        """Refuse, by the name of a tensor, layers that are not offered."""
        for name in self.file.names:
            tensor = self.names.read(name)
            if tensor is None:
                quantised = plain_name(name).startswith(("lm_head.", "model.embed_tokens."))
                if not self.is_in_target and quantised and _QUANTISED.fullmatch(name):
                    raise self._not_offered(name, "quantised weights")
                continue
            if (tensor.module or 0) >= self.num_modules or tensor.part == "ignored":
                continue
            kinds = [kind for pattern, kind in _UNKNOWN_LAYERS if pattern.fullmatch(tensor.rest)]
            if _QUANTISED.fullmatch(tensor.rest):
                kinds = ["quantised weights"]
            if kinds and (tensor.part == "layer" or kinds == ["quantised weights"]):
                raise self._not_offered(name, kinds[0])

    def _not_offered(self, name: str, kind: str) -> CheckpointError:
        return self._error(
            f"the MTP modules have {kind}, which drafters here do not run",
            f"{name!r} {list(self.file.shape(name))}; allowed: dense decoder layers with ordinary "
            "attention, unquantised",
            "use another speculator for this target",
        )

    def _rename(self, name: str) -> str | Ignored | None:
        tensor = self.names.read(name)
        if tensor is not None:
            return self._place(name, tensor)
        if self.is_in_target:
            return None
        if (end := _ENDS.get(plain_name(name))) is not None:
            return end
        return name if self.family.convention.is_exclusive else None

    def _place(self, name: str, tensor: ModuleTensor) -> str | Ignored:
        index = tensor.module or 0
        if tensor.part == "ignored":
            return Ignored(tensor.rest)
        if index >= self.num_modules:
            return Ignored(f"module {index} does not run")
        if tensor.part == "head" and self._is_the_targets_head(name):
            return Ignored("a copy of the target's head")
        return f"steps.{index}.{tensor.part}.{tensor.rest}"

    def _file_name(self, key: str) -> str:
        """What a parameter would be called in the file."""
        if not key.startswith("steps."):
            return key.removeprefix("ends.")
        _, index, part, rest = key.split(".", 3)
        return self.names.write(int(index), part, rest)

    @cached_property
    def _target_head(self) -> torch.Tensor | None:
        """The target's head, where it lies in the same file; of a tied one, the embedding."""
        by_name = {plain_name(name): name for name in self.file.names}
        for name in ("lm_head.weight", "model.embed_tokens.weight"):
            if self.is_in_target and name in by_name:
                return self.file.load(by_name[name])
        return None

    def _is_the_targets_head(self, name: str) -> bool:
        """Files are the same on every rank, and so is what this says."""
        head = self._target_head
        return head is not None and torch.equal(head, self.file.load(name))

    def _report(self) -> None:
        """Tell what nothing reads; once, after loading."""
        if unused := [i for i in self._found if i >= self.settings.num_declared]:
            logger.warning(
                "%s: MTP modules %s do not run: the config declares %d",
                self.file.directory,
                unused,
                self.settings.num_declared,
            )
        if self.is_in_target:
            return
        self.settings.report()
        unread = [name for name in self.file.names if self._rename(name) is None]
        if unread:
            more = f" and {len(unread) - NUM_NAMED} more" if len(unread) > NUM_NAMED else ""
            logger.warning(
                "%s: tensors that nothing reads: %s%s",
                self.file.directory,
                ", ".join(unread[:NUM_NAMED]),
                more,
            )

    def _error(self, what: str, got: str, fix: str = "") -> CheckpointError:
        return CheckpointError(
            what,
            where=str(self.file.directory),
            got=got,
            fix=fix or "use modules that were trained for this target, with their config.json",
        )
