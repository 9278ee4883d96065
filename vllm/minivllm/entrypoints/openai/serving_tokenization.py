"""`POST /tokenize` and `/detokenize`. In vLLM v0.33.0:
`vllm/entrypoints/serve/tokenize/serving.py`.
"""

from minivllm.entrypoints.openai.protocol import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
    TokenizeResponse,
)
from minivllm.entrypoints.openai.serving_engine import OpenAIServing


class OpenAIServingTokenization(OpenAIServing):
    """The tokenization endpoints: texts and conversations to token ids, and back."""

    async def create_tokenize(self, request: TokenizeCompletionRequest | TokenizeChatRequest) -> TokenizeResponse:
        """Return the token ids of a text or of a conversation.

        Raises:
            MinivllmError: the request is invalid.
        """
        self.models.check(request.model)
        text = request.prompt if isinstance(request, TokenizeCompletionRequest) else self.rendered(request)
        token_ids = await self.tokenize(text, request.add_special_tokens)
        names = [self.tokenizer.id_to_token(token) or "" for token in token_ids] if request.return_token_strs else None
        return TokenizeResponse(
            count=len(token_ids), max_model_len=self.limits.max_model_len, tokens=token_ids, token_strs=names
        )

    async def create_detokenize(self, request: DetokenizeRequest) -> DetokenizeResponse:
        """Return the text of token ids; ids outside the vocabulary add none."""
        self.models.check(request.model)
        # The tokenizer would raise for others.
        known = [token for token in request.tokens if token < self.vocab_size]
        return DetokenizeResponse(prompt=await self.detokenize(known))
