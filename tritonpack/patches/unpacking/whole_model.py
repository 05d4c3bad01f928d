"""What is known of a model that users call: the arguments that it takes, and how its outputs belong to documents."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from tritonpack.patches.call_arguments import in_form
from tritonpack.patches.packing_context import PackingContext
from tritonpack.patches.parts import InstanceForward
from tritonpack.patches.tokens import text_config
from tritonpack.patches.unpacking.names import CONDITIONED, ONE_DOCUMENT_A_ROW, TARGETS

# Fields of a configuration that name the placeholder tokens of images or sounds.
PLACES_OF_IMAGES = ("image_token_id", "image_token_index", "video_token_id", "audio_token_id", "audio_token_index")


class WholeModel(InstanceForward):
    """The forward of a model that users call.

    Attributes:
        by_length: whether documents of one length run at a time, without padding.
        each: whether each document runs in a call of its own.
        takes_use_cache: whether the model takes `use_cache`, which is then False for documents in rows of their own.
        one_result: whether the model gives one result for each row.
        targets: the arguments that never have a value for each token, whatever their shape.
        decodes: whether the model takes tokens of a decoder; otherwise arguments and outputs of its decoder have none.
        across: whether the model compares all texts with all images or sounds, as CLIP does.
        puts_images_among_tokens: whether the model puts images or sounds in the place of tokens.
        summaries: how heads make one vector of a row: "last", "cls_index", "mean", ... (XLNet's, XLM's, RoFormer's).
    """

    by_length = each = False

    def __init__(self, module: nn.Module, context: PackingContext) -> None:
        super().__init__(module, context)
        parameters = inspect.signature(module.forward).parameters
        self.takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self.one_result = ONE_DOCUMENT_A_ROW.fullmatch(self.name) is not None
        self.targets = TARGETS if self.one_result else TARGETS[1:]
        self.takes_use_cache = "use_cache" in self.names
        self.decodes = "decoder_input_ids" in self.names
        self.across = hasattr(type(module), "get_text_features") and not CONDITIONED.fullmatch(self.name)
        self.summaries = {inner.__dict__.get("summary_type") for inner in module.modules()}
        self.puts_images_among_tokens = any(getattr(module.config, n, None) is not None for n in PLACES_OF_IMAGES)

    def bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name, in the form in which they are read."""
        return in_form(super().bound(args, kwargs))

    def takes(self, argument: str) -> bool:
        return self.takes_any or argument in self.names

    @property
    def pad_token(self) -> int | None:
        return getattr(text_config(self.module.config), "pad_token_id", None)
