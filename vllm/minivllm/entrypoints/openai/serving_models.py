"""The names that requests may use. In vLLM v0.33.0: `vllm/entrypoints/openai/models/serving.py`."""

import time
import uuid
from collections.abc import Sequence

from minivllm.entrypoints.openai.errors import not_found
from minivllm.entrypoints.openai.protocol import ModelCard, ModelList, ModelPermission


class OpenAIServingModels:
    """One model, under one name or several."""

    def __init__(self, names: Sequence[str], root: str, max_model_len: int) -> None:
        self.names = tuple(names)
        self._root = root
        self._max_model_len = max_model_len
        self._created = int(time.time())

    @property
    def name(self) -> str:
        """The name that replies use."""
        return self.names[0]

    def check(self, asked_for: str | None) -> None:
        """A request need not name the model.

        Raises:
            RequestError: it names another one.
        """
        if asked_for and asked_for not in self.names:
            known = ", ".join(self.names)
            raise not_found(f"The model `{asked_for[:200]}` does not exist. Valid aliases: {known}.", "model")

    def show(self) -> ModelList:
        """Return the list of models."""
        return ModelList(
            data=[
                ModelCard(
                    id=name,
                    created=self._created,
                    root=self._root,
                    max_model_len=self._max_model_len,
                    permission=[ModelPermission(id=f"modelperm-{uuid.uuid4().hex[:16]}", created=self._created)],
                )
                for name in self.names
            ]
        )
