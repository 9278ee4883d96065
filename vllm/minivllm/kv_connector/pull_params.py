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
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minivllm.errors import MinivllmError

MAX_ID_LENGTH = 2048
"""A client's `X-Request-Id` may have 1,024 characters; the prefill engine's id of that request
has some more.
"""
MAX_SHOWN = 80
MAX_NUMBER = (1 << 31) - 1
"""No cache has as many blocks or tokens."""
GENERATIONS_JOINED_BY = "."
"""`remote_registration_generation` has that of every rank, in their order."""


@dataclass(frozen=True, slots=True)
class RemotePrefill:
    """A prompt that another engine has computed, and where its blocks are.

    The first `num_tokens` tokens are computed there; None: all of them. `generation` identifies the
    other engine's registered memory, and `prompt_digest` the computed tokens; each is empty if that
    engine has not sent it.
    """

    engine_id: str
    request_id: str
    host: str
    port: int
    block_ids: tuple[int, ...]
    num_tokens: int | None = None
    generation: str = ""
    prompt_digest: str = ""

    @classmethod
    def of(cls, params: dict[str, Any], tensor_parallel_size: int) -> "RemotePrefill":
        """Read the params of a request with `do_remote_prefill`.

        Raises:
            MinivllmError: a key is missing, or its value is not what a prefill engine sends, or
                that engine's parallel sizes differ from this one's.
        """
        for key, own in (("tp_size", tensor_parallel_size), ("dcp_size", 1), ("pp_size", 1)):
            value = params.get(key)
            if (own if value is None else value) != own:
                raise MinivllmError(
                    f"kv_transfer_params has {key} {_shown(value)}, this engine {own}: both must be the same"
                )
        if params.get("transfer_mode") not in (None, "pull"):
            raise MinivllmError(
                f"kv_transfer_params has transfer_mode {_shown(params['transfer_mode'])}; only 'pull' is served"
            )
        return cls(
            engine_id=_text(params, "remote_engine_id"),
            request_id=_text(params, "remote_request_id"),
            host=_text(params, "remote_host"),
            port=_number(params, "remote_port", 1, 65535),
            block_ids=_block_ids(params),
            num_tokens=_number(params, "remote_num_tokens", 0, MAX_NUMBER)
            if params.get("remote_num_tokens") is not None
            else None,
            generation=str(params.get("remote_registration_generation") or ""),
            prompt_digest=str(params.get("remote_prompt_digest") or ""),
        )

    def is_of(self, prompt_token_ids: Sequence[int]) -> bool:
        """Return whether the other engine has computed this prompt or the beginning of it; True if
        it sent no digest.
        """
        return not self.prompt_digest or self.prompt_digest == digest(prompt_token_ids[: self.num_tokens])


def digest(token_ids: Sequence[int]) -> str:
    """Return a digest of token ids, 32 characters long and the same on every machine."""
    numbers = array("q", token_ids)
    # Two engines may run on processors of different byte order.
    if sys.byteorder == "big":
        numbers.byteswap()
    return hashlib.blake2b(numbers.tobytes(), digest_size=16).hexdigest()


def check_flags(params: dict[str, Any]) -> tuple[bool, bool]:
    """Return (`do_remote_prefill`, `do_remote_decode`). Raise `MinivllmError` if either is not a
    bool, or both are true.
    """
    flags = []
    for key in ("do_remote_prefill", "do_remote_decode"):
        value = params.get(key)
        if value is not None and not isinstance(value, bool):
            raise _invalid(key, value, "true or false")
        flags.append(bool(value))
    if all(flags):
        raise MinivllmError("kv_transfer_params has do_remote_prefill and do_remote_decode; set only one")
    return flags[0], flags[1]


def _text(params: dict[str, Any], key: str) -> str:
    value = params.get(key)
    if not isinstance(value, str) or not 0 < len(value) <= MAX_ID_LENGTH or not _is_unicode(value):
        raise _invalid(key, value, "a string from the prefill engine's answer")
    return value


def _is_unicode(text: str) -> bool:
    """Return whether a text can be encoded: JSON can also contain half of a surrogate pair."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _number(params: dict[str, Any], key: str, least: int, most: int) -> int:
    value = params.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise _invalid(key, value, f"a whole number from {least} to {most}")
    return value


def _block_ids(params: dict[str, Any]) -> tuple[int, ...]:
    """Return the blocks of the only group of layers: a list in a list or, from older engines, a
    plain list.

    A block may occur only once.
    """
    value = params.get("remote_block_ids")
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        value = value[0]
    if (
        not isinstance(value, list)
        or not value
        or not all(type(block_id) is int and 0 <= block_id <= MAX_NUMBER for block_id in value)
        or len(set(value)) < len(value)
    ):
        raise _invalid("remote_block_ids", params.get("remote_block_ids"), "[[ids]] from the prefill engine's answer")
    return tuple(value)


def _invalid(key: str, value: Any, wanted: str) -> MinivllmError:
    verb = "lacks" if value is None else "has an invalid"
    shown = "" if value is None else f" {_shown(value)}"
    return MinivllmError(f"kv_transfer_params {verb} {key}{shown}; it must be {wanted}")


def _shown(value: Any) -> str:
    """Return the value for use in a message, truncated in case a client has sent megabytes."""
    shown = repr(value)
    return shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}…"
