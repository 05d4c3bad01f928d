"""Users' own heads with labels, whose outputs for a whole row have unknown names."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaModel, LlamaPreTrainedModel
from transformers.utils import ModelOutput

import tritonpack
from tests.patches import zoo
from tests.small_copies.packed_forms import FORMS

LENGTHS = (7, 1, 3, 11)


@dataclasses.dataclass
class Rating(ModelOutput):
    loss: Tensor | None = None
    states: Tensor | None = None
    rating: Tensor | None = None


class Rater(LlamaPreTrainedModel):
    """Rates a row by its first token."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = LlamaModel(config)
        self.score = nn.Linear(config.hidden_size, 3)
        self.post_init()

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        labels: Any = None,
        **more: Any,
    ) -> Rating:
        told = {"attention_mask": attention_mask, "position_ids": position_ids, **more}
        rating = self.score(self.model(input_ids, **told).last_hidden_state[:, 0])
        loss = None if labels is None else nn.functional.cross_entropy(rating, labels)
        return Rating(loss=loss, rating=rating)


class RaterOfStates(Rater):
    """Rates a row only if it has labels, so the trial leaves its rows packed."""

    def forward(self, *args: Any, labels: Any = None, **told: Any) -> Rating:
        states = self.model(*args, **told).last_hidden_state
        if labels is None:
            return Rating(states=states)
        return Rating(loss=nn.functional.cross_entropy(self.score(states[:, 0]), labels), states=states)


def build(kind: type[Rater]) -> Rater:
    torch.manual_seed(0)
    return kind(zoo.tiny_config("llama")).double().eval()


def packed() -> dict[str, Any]:
    batch = FORMS["position_ids"](zoo.documents(LENGTHS))
    return {"input_ids": batch.ids, **batch.arguments}


LABELS = torch.tensor([0, 1, 2, 0])


def test_one_rating_a_row_is_refused() -> None:
    with pytest.raises(tritonpack.UnsupportedModelError, match=r"rating.*Train it on padded rows, unpatched"):
        tritonpack.patch(build(Rater)).prove()


def test_labels_of_documents_for_results_of_rows_are_refused() -> None:
    with tritonpack.patch(model := build(RaterOfStates)) as handle:
        assert handle.report.attention == "tritonpack"
        assert model(**packed()).states.shape[:2] == (1, 22)
        with pytest.raises(ValueError, match=r"failed with labels .* for each of 4 documents.*Pass padded rows"):
            model(**packed(), labels=LABELS)
