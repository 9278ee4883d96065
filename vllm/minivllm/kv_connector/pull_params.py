"""Read and write `kv_transfer_params`, which a proxy carries between two engines, in the form that
NIXL's connector uses.

The proxy sends a prefill engine a request with `do_remote_decode`, and passes the params from its
answer to a decode engine, with the same prompt. Any client of the decode engine can write anything
here, so all of it is checked before use.

One key is not NIXL's: `remote_prompt_digest`, a digest of the tokens that were computed. Keys and
values of another prompt would be used unnoticed, and published for this prompt; so where the key is
present, the prompt must be the same.

In vLLM v0.33.0: `request_finished` and `update_state_after_alloc` in
`vllm/distributed/kv_transfer/kv_connector/v1/nixl/pull_scheduler.py`, which check less.
"""

import hashlib
import struct
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from minivllm.config.checks import encodable
from minivllm.errors import MinivllmError

Checked = TypeVar("Checked", bound=msgspec.Struct)
# A client's `X-Request-Id` may have 1,024 characters; the prefill engine's id of that request has
# some more.
Text = Annotated[str, Meta(min_length=1, max_length=2048)]
# No cache has as many blocks or tokens.
Count = Annotated[int, Meta(ge=0, lt=1 << 31)]
GENERATIONS_JOINED_BY = "."
"""`remote_registration_generation` has that of every rank, in their order."""


class _Flags(msgspec.Struct):
    do_remote_prefill: bool | None = None
    do_remote_decode: bool | None = None


class RemotePrefill(msgspec.Struct, frozen=True, rename="remote_{}".format):
    """A prompt that another engine has computed, and where its blocks are.

    `block_ids` has the blocks of each group of layers; here there is only one group. The first
    `num_tokens` tokens are computed there; None: all of them. `registration_generation` identifies
    the other engine's registered memory, and `prompt_digest` the computed tokens; each may be
    missing.
    """

    engine_id: Text
    request_id: Text
    host: Text
    port: Annotated[int, Meta(ge=1, le=65535)]
    block_ids: tuple[Annotated[tuple[Count, ...], Meta(min_length=1)]]
    num_tokens: Count | None = None
    registration_generation: str | None = None
    prompt_digest: str | None = None

    @classmethod
    def of(cls, params: dict[str, Any]) -> "RemotePrefill":
        """Read the params of a request with `do_remote_prefill`. Whether the two engines' caches are
        alike is found out when they meet.

        Raises:
            MinivllmError: a key is missing, or its value is not what a prefill engine sends.
        """
        remote = _checked(params, cls)
        (block_ids,) = remote.block_ids
        if len(set(block_ids)) < len(block_ids):
            raise MinivllmError("kv_transfer_params has a block twice in remote_block_ids")
        for name in ("engine_id", "request_id", "host"):
            encodable(getattr(remote, name), f"remote_{name}")
        return remote

    def is_of(self, prompt_token_ids: Sequence[int]) -> bool:
        """Return whether the other engine has computed this prompt or the beginning of it; True if
        it sent no digest.
        """
        return not self.prompt_digest or self.prompt_digest == digest(prompt_token_ids[: self.num_tokens])


def digest(token_ids: Sequence[int]) -> str:
    """Return a digest of token ids, 32 characters long and the same on every machine."""
    return hashlib.blake2b(struct.pack(f"<{len(token_ids)}q", *token_ids), digest_size=16).hexdigest()


def check_flags(params: dict[str, Any]) -> tuple[bool, bool]:
    """Return (`do_remote_prefill`, `do_remote_decode`). Raise `MinivllmError` if either is not a
    bool, or both are true.
    """
    flags = _checked(params, _Flags)
    if flags.do_remote_prefill and flags.do_remote_decode:
        raise MinivllmError("kv_transfer_params has do_remote_prefill and do_remote_decode; set only one")
    return bool(flags.do_remote_prefill), bool(flags.do_remote_decode)


def _checked(params: dict[str, Any], kind: type[Checked]) -> Checked:
    try:
        return msgspec.convert(params, kind)
    except msgspec.ValidationError as error:
        raise MinivllmError(f"kv_transfer_params are not those of a prefill engine's answer: {error}") from None
    except UnicodeEncodeError:  # JSON can also contain half of a surrogate pair
        raise MinivllmError("kv_transfer_params are not valid text: they have half a character") from None
